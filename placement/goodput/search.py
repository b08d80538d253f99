"""find_goodput searches the highest rate at which enough requests meet both targets.

From an analytic bound downwards until a rate keeps the SLO, then bisection, until two rates are near each other or one
cannot be told to keep or to miss the SLO, however long it is simulated: that is the knee, and more rates add nothing.
All rates are judged on the same requests (placement/workload/traffic.py), so that the answer hangs on the seed and not
on luck between two rates, nor on the number of processes: a search is one task, done by one process from its beginning
to its end.

The interval of a goodput is where the interval of the attainment crosses the target: rates that surely keep it below,
rates that surely miss it above.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.pool import Pool
from typing import Protocol, TypeVar

from placement.goodput.estimate import Effort, Estimate, estimate
from placement.goodput.targets import Targets
from placement.plan import Interval
from placement.simulator.compiled import simulation_pool
from placement.simulator.systems import System, scaled
from placement.workload.traffic import Traffic

Progress = Callable[[str, int, int], None]
MOST_RAISES = 6
MOST_LEAPS = 18  # after so many raises, from a rate far below the goodput
MOST_HALVINGS = 9


Job = TypeVar("Job")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quest:
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
    copies: int = 1  # of the system share the rate
    bottom: float = 0.0  # a rate that it will hardly fall below
    seen: tuple[Estimate, ...] = ()  # of an earlier search, whose goodput is to be verified by longer runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """`looked_at`: by rate. `goodput.value` 0: none of the rates tried keeps the SLO."""

    goodput: Interval
    looked_at: tuple[Estimate, ...]
    num_simulated: int
    cpu_s: float

    @property
    def first_miss(self) -> Estimate | None:
        return next((one for one in self.looked_at if not one.keeps_slo), None)


def find_goodput(quest: Quest) -> Found:
    system = scaled(quest.system, quest.factor)
    seen: list[Estimate] = []

    def keeps(rate: float) -> bool:
        seen.append(
            estimate(
                system, quest.traffic, rate, quest.targets, effort=quest.effort, seed=quest.seed, copies=quest.copies
            )
        )
        return seen[-1].keeps_slo

    low, high = _bracket(quest, keeps)
    while low and high - low > quest.precision * high and not seen[-1].is_undecided:
        middle = (low + high) / 2
        if keeps(middle):
            low = middle
        else:
            high = middle
    seen.sort(key=lambda one: one.point.rate)
    return _found(seen, quest, seen)


def _look(quest: Quest, system: System, rate: float) -> Estimate:
    return estimate(
        system,
        quest.traffic,
        rate,
        quest.targets,
        effort=quest.effort,
        seed=quest.seed,
        copies=quest.copies,
    )


def verify_goodput(quest: Quest) -> Found:
    """The goodput of an earlier search again, by the longer runs of this quest's effort.

    Near capacity a queue builds so slowly that a short run keeps the SLO at a rate that no long one does. So the best
    rate found is simulated again, and where it turns out to be missed lower ones are, until one is kept.
    """
    system = scaled(quest.system, quest.factor)
    seen = {one.point.rate: one for one in quest.seen}
    done: list[Estimate] = []
    rate = _highest_kept(seen)
    while rate and len(done) < MOST_HALVINGS:
        done.append(
            estimate(
                system, quest.traffic, rate, quest.targets, effort=quest.effort, seed=quest.seed, copies=quest.copies
            )
        )
        seen[rate] = done[-1]
        if done[-1].keeps_slo:
            break
        rate = max(0.96 * rate, _highest_kept(seen))
    told = [seen[rate] for rate in sorted(seen)]
    return _found(told, quest, done)


def _highest_kept(seen: Mapping[float, Estimate]) -> float:
    """The highest rate that keeps the SLO, below all that miss it; 0 when there is none."""
    kept = 0.0
    for rate in sorted(seen):
        if not seen[rate].keeps_slo:
            break
        kept = rate
    return kept


def _found(told: Sequence[Estimate], quest: Quest, done: Sequence[Estimate]) -> Found:
    return Found(
        goodput=goodput_of(told, quest.targets.most_slack),
        looked_at=tuple(told),
        num_simulated=sum(one.num_simulated for one in done),
        cpu_s=sum(one.cpu_s for one in done),
    )


def _bracket(quest: Quest, keeps: Callable[[float], bool]) -> tuple[float, float]:
    """A rate that keeps the SLO (0: none does) and one that misses it."""
    if quest.bottom and keeps(quest.bottom):
        low, high = quest.bottom, quest.top
        for raised in range(MOST_RAISES + MOST_LEAPS):
            if not keeps(high):
                return low, high
            low, high = high, high * (1.3 if raised < MOST_RAISES else 4)
        return low, low
    high = quest.bottom or quest.top
    low = high * 0.7
    if not quest.bottom and keeps(low):
        return _raise(low, high, keeps)
    high = low if not quest.bottom else high
    for _ in range(MOST_HALVINGS):
        low = high * 0.6
        if keeps(low):
            return low, high
        high = low
    return 0.0, high


def _raise(low: float, high: float, keeps: Callable[[float], bool]) -> tuple[float, float]:
    for _ in range(MOST_RAISES):
        if not keeps(high):
            return low, high
        low, high = high, 1.3 * high
    return low, low


def goodput_of(seen: Sequence[Estimate], most_slack: float) -> Interval:
    """Where the slack crosses 0, and where it is so far from 0 as its interval at the knee is wide; but no lower than a
    rate that surely keeps the SLO, nor higher than one that surely misses it. `seen` by rate; `most_slack`: where all
    requests meet both targets, as at rate 0."""
    slacks = [(one.point.rate, one.slack.value) for one in seen]
    value = crossing(slacks)
    if not value:
        return Interval(0.0, 0.0, seen[0].point.rate if seen else 0.0)
    knee = min((one for one in seen if not one.is_growing), key=lambda one: abs(one.slack.value)).slack
    slacks.insert(0, (0.0, max(most_slack, knee.value - knee.low)))
    low, high = crossing(slacks, knee.value - knee.low), crossing(slacks, knee.value - knee.high)
    kept = max((one.point.rate for one in seen if one.slack.low >= 0 and one.point.rate <= value), default=0.0)
    missed = min((one.point.rate for one in seen if one.slack.high < 0 and one.point.rate >= value), default=high)
    if not any(one.is_undecided for one in seen):  # the line between two rates that are sure is a guess
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


# in processes


class Runner(Protocol):
    def map(self, work: Callable[[Job], Result], jobs: Sequence[Job], what: str) -> list[Result]:
        """The results in the order of the jobs."""


class _Here:
    """In this process, from the sources."""

    def __init__(self, on_progress: Progress | None) -> None:
        self._say = on_progress or _silent

    def map(self, work: Callable[[Job], Result], jobs: Sequence[Job], what: str) -> list[Result]:
        found = []
        for done, job in enumerate(jobs):
            self._say(what, done, len(jobs))
            found.append(work(job))
        self._say(what, len(jobs), len(jobs))
        return found


class _There:
    """In processes of the compiled simulator, started with the first work for them: what cannot be is told before."""

    def __init__(self, processes: int, stack: ExitStack, on_progress: Progress | None) -> None:
        self._processes = processes
        self._stack = stack
        self._pool: Pool | None = None
        self._say = on_progress or _silent

    def map(self, work: Callable[[Job], Result], jobs: Sequence[Job], what: str) -> list[Result]:
        if self._pool is None:
            self._say("starting the simulator", 0, 1)
            self._pool = self._stack.enter_context(simulation_pool(self._processes))
        self._say(what, 0, len(jobs))
        found = []
        for result in self._pool.imap(work, jobs):
            found.append(result)
            self._say(what, len(found), len(jobs))
        return found


def _silent(what: str, done: int, total: int) -> None:
    return None


@contextmanager
def runner(processes: int | None, on_progress: Progress | None = None) -> Iterator[Runner]:
    """`processes` None: as many as there are cores; 0: this one."""
    if processes == 0:
        yield _Here(on_progress)
        return
    with ExitStack() as stack:
        yield _There(processes or len(os.sched_getaffinity(0)), stack, on_progress)
