"""find_goodput searches the knee: the highest rate at which enough requests meet both targets.

From an analytic bound downwards until a rate keeps the SLO, then bisection, until two rates are near each other or one
cannot be told to keep or to miss the SLO, however long it is simulated: that is the knee, and more rates add nothing.
All rates are judged on the same requests (placement/workload/traffic.py), so that the answer hangs on the seed and not
on luck between two rates, nor on the number of processes: a search is one task, done by one process from its beginning
to its end.

Near capacity a queue builds so slowly that a short run keeps the SLO at a rate that no long one does. So the rate that
is found may be verified by longer runs.

The interval of a goodput is where the interval of the attainment crosses the target: rates that surely keep it below,
rates that surely miss it above.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from placement.goodput.estimate import Effort, Estimate, estimate
from placement.goodput.targets import Targets
from placement.plan import Interval
from placement.simulator.systems import System
from placement.workload.traffic import Traffic

MOST_RAISES = 6
LEAST_STEP = 1.1
MOST_STEPS_DOWN = 12  # out of a range that was given, each as large as all before
MOST_STEPS_UP = 24  # likewise, where idle rates are soon seen: from 1e-9 requests/s to any that there is
MOST_HALVINGS = 9
LOWER = 0.85  # of the lowest rate tried, where that may miss the SLO
MOST_LOWER = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputProblem:
    """One search. `top`: a rate that it will hardly exceed. `precision`: of the rate, where bisection ends. `factor`:
    all times of the system so much longer."""

    system: System
    traffic: Traffic
    targets: Targets
    top: float
    effort: Effort = field(default_factory=lambda: Effort(decides=True))
    precision: float = 0.02
    seed: int = 0
    factor: float = 1.0
    copies: float = 1.0  # of the system share the rate
    bottom: float = 0.0  # a rate that it will hardly fall below
    known: Estimate | None = None  # of one rate, by the same effort or a longer one
    longer: Effort | None = None  # the rate found is verified by it

    def estimate(self, rate: float) -> Estimate:
        system = self.system.scaled(self.factor)
        return estimate(
            system, self.traffic, rate, self.targets, effort=self.effort, seed=self.seed, copies=self.copies
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Knee:
    """`estimates`: of all rates tried, by rate. `goodput.value` 0: none of them keeps the SLO."""

    goodput: Interval
    estimates: tuple[Estimate, ...]
    num_simulated: int
    cpu_s: float

    @property
    def first_miss(self) -> Estimate | None:
        return next((estimate for estimate in self.estimates if not estimate.keeps_slo), None)


def find_goodput(problem: GoodputProblem) -> Knee:
    tried: list[Estimate] = []
    known = problem.known

    def keeps(rate: float) -> bool:
        tried.append(known if known is not None and known.point.rate == rate else problem.estimate(rate))
        return tried[-1].keeps_slo

    low, high = _bracket(problem, keeps)
    while low and high - low > problem.precision * high and not tried[-1].is_undecided:
        middle = (low + high) / 2
        if keeps(middle):
            low = middle
        else:
            high = middle
    found = {estimate.point.rate: estimate for estimate in tried}
    if problem.longer is not None:
        tried += _verified(replace(problem, effort=problem.longer), found)
    if low:
        tried += _lower(problem, found)
    estimates = tuple(found[rate] for rate in sorted(found))
    simulated = [estimate for estimate in tried if estimate is not known]
    return Knee(
        goodput=goodput_of(estimates, problem.targets.most_slack),
        estimates=estimates,
        num_simulated=sum(estimate.num_simulated for estimate in simulated),
        cpu_s=sum(estimate.cpu_s for estimate in simulated),
    )


def _lower(problem: GoodputProblem, found: dict[float, Estimate]) -> list[Estimate]:
    """Where even the lowest rate may miss the SLO, lower ones, until one surely keeps it: else only a guess would bound
    the goodput from below. They are put to what is found."""
    looked_at: list[Estimate] = []
    rate = min(found)
    while found[rate].slack.low < 0 and len(looked_at) < MOST_LOWER:
        rate *= LOWER
        found[rate] = problem.estimate(rate)
        looked_at.append(found[rate])
    return looked_at


def _verified(problem: GoodputProblem, found: dict[float, Estimate]) -> list[Estimate]:
    """The best rate again, by longer runs, and where it turns out to be missed lower ones, until one is kept. What is
    found takes the place of what was."""
    again: list[Estimate] = []
    rate = _highest_kept(found)
    while rate and len(again) < MOST_HALVINGS:
        again.append(problem.estimate(rate))
        found[rate] = again[-1]
        if again[-1].keeps_slo:
            break
        rate = max(0.96 * rate, _highest_kept(found))
    return again


def _highest_kept(by_rate: Mapping[float, Estimate]) -> float:
    """The highest rate that keeps the SLO, below all that miss it; 0 when there is none."""
    kept = 0.0
    for rate in sorted(by_rate):
        if not by_rate[rate].keeps_slo:
            break
        kept = rate
    return kept


def _bracket(problem: GoodputProblem, keeps: Callable[[float], bool]) -> tuple[float, float]:
    """A rate that keeps the SLO (0: none does) and one that misses it."""
    if problem.bottom:
        return _bracket_from(problem.bottom, problem.top, keeps)
    high = problem.top
    low = high * 0.7
    if keeps(low):
        return _raise(low, high, keeps)
    high = low
    for _ in range(MOST_HALVINGS):
        low = high * 0.6
        if keeps(low):
            return low, high
        high = low
    return 0.0, high


def _bracket_from(bottom: float, top: float, keeps: Callable[[float], bool]) -> tuple[float, float]:
    """Between the two; where it is not, further and further out. A bound that was wrong may lie below what was seen."""
    top = top if top > bottom else LEAST_STEP * bottom
    step, is_above = top / bottom, keeps(bottom)
    low, high = (bottom, top) if is_above else (bottom / step, bottom)
    for _ in range(MOST_STEPS_UP if is_above else MOST_STEPS_DOWN):
        if is_above != keeps(high if is_above else low):
            return low, high
        low, high = (high, high * step) if is_above else (low / step, low)
        step = min(step * step, 4)
    return (low, low) if is_above else (0.0, high)


def _raise(low: float, high: float, keeps: Callable[[float], bool]) -> tuple[float, float]:
    for _ in range(MOST_RAISES):
        if not keeps(high):
            return low, high
        low, high = high, 1.3 * high
    return low, low


def goodput_of(estimates: Sequence[Estimate], most_slack: float) -> Interval:
    """Where the slack crosses 0, and where it is so far from 0 as its interval at the knee is wide; but no lower than a
    rate that surely keeps the SLO, nor higher than one that surely misses it. `estimates` by rate; `most_slack`: where
    all requests meet both targets, as at rate 0."""
    slacks = [(at.point.rate, at.slack.value) for at in estimates]
    value = crossing(slacks)
    if not value:
        return Interval(0.0, 0.0, estimates[0].point.rate if estimates else 0.0)
    knee = min((at for at in estimates if not at.is_growing), key=lambda at: abs(at.slack.value)).slack
    slacks.insert(0, (0.0, max(most_slack, knee.value - knee.low)))
    low, high = crossing(slacks, knee.value - knee.low), crossing(slacks, knee.value - knee.high)
    kept = max((at.point.rate for at in estimates if at.slack.low >= 0 and at.point.rate <= value), default=0.0)
    missed = min((at.point.rate for at in estimates if at.slack.high < 0 and at.point.rate >= value), default=high)
    if not any(at.is_undecided for at in estimates):  # the line between two rates that are sure is a guess
        return Interval(value, kept, missed)
    return Interval(value, min(max(low, kept), value), max(min(high, missed), value))


def crossing(slacks: Sequence[tuple[float, float]], level: float = 0.0) -> float:
    """The rate at which a falling line through the points first goes below the level; 0 when it begins there."""
    before: tuple[float, float] | None = None
    for rate, slack in slacks:
        if slack < level:
            if before is None:
                return 0.0
            held_rate, held = before
            return held_rate + (rate - held_rate) * (held - level) / (held - slack)
        before = (rate, slack)
    return before[0] if before else 0.0
