"""estimate says what a system does in the long run at one rate: attainment and percentiles, each with an interval.

Runs are simulated, each a quarter longer than the last or more, until the interval of the attainment is narrow enough,
or lies on one side of the target where only that is asked, or a limit is hit (is_settled False). The beginning and the
end of a run are cut off (placement/goodput/stationary.py); a run shorter than six times what a request takes, or with
batches that still know of each other, is not trusted. A queue that grows without end is told apart: no run is long
enough for it, and its attainment can only fall.

The interval covers the chance in the requests drawn and, where `error` says how wrong the latency model may be, that
the true times are so much longer or shorter. `burst` is the other measure: a fixed number of requests from an empty
system, nothing cut off, as DistServe measures its goodput; it flatters, since the queue has no time to build.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from placement.goodput.runner import used_cpu_s
from placement.goodput.stationary import is_growing, mser, percentile_interval, share_interval
from placement.goodput.targets import Targets
from placement.latency.scaled import factors_of
from placement.plan import Interval, RatePoint
from placement.simulator.outcome import Outcome
from placement.simulator.systems import System
from placement.workload.requests import Floats, Ints
from placement.workload.traffic import Traffic

TRUSTED_CORRELATION = 0.4
FILLED = 3  # times what a request takes: a cluster that was empty has filled up
LONGER = 1.25  # times as many requests, at least, where a run that was not enough is made again
MOST_LONGER = 8  # times the most requests of an effort, where a run of so few does not last so long
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long to simulate. `half_width`: of the attainment's interval, where it is narrow enough. `decides`: stop too
    as soon as the interval leaves the target on one side. `max_requests`: more only where so few do not last.
    `e2e_times`: what a request takes, so many times, does a run last that is trusted; and as long as this share of them
    (`covers`) takes at most, where few may take far longer than most do."""

    first_requests: int = 2000
    max_requests: int = 32_000
    half_width: float = 0.01
    decides: bool = False
    e2e_times: float = 6.0
    covers: float = 0.0

    def times(self, factor: float) -> Effort:
        """So many times as many requests, and intervals as much narrower as that gives."""
        return replace(
            self,
            first_requests=max(200, round(self.first_requests * factor)),
            max_requests=max(200, round(self.max_requests * factor)),
            half_width=self.half_width / math.sqrt(factor),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """`slack`: the attainment less what it must be, of the class that is worst off; below 0 the SLO is missed."""

    point: RatePoint
    slack: Interval
    is_growing: bool
    missed_ttft: float  # share of requests
    missed_tpot: float
    num_simulated: int
    cpu_s: float

    @property
    def keeps_slo(self) -> bool:
        return self.slack.value >= 0 and not self.is_growing

    @property
    def is_undecided(self) -> bool:
        """Whether the interval lies on both sides of the target."""
        return self.slack.low < 0 <= self.slack.high and not self.is_growing


def estimate(
    system: System,
    traffic: Traffic,
    rate: float,
    targets: Targets,
    *,
    effort: Effort | None = None,
    seed: int = 0,
    error: float = 0.0,
    copies: float = 1.0,
) -> Estimate:
    """Requests drawn by `seed` alone: the same arguments give the same estimate. `copies` of the system share the rate,
    each request going to any of them by chance; one is simulated."""
    effort = effort or Effort()
    began_s = used_cpu_s()
    count, simulated = effort.first_requests, 0
    while True:
        look = _Look(system, system.play(traffic.draw(rate / copies, count, seed)), targets)
        simulated += count
        most = min(max(effort.max_requests, look.lasting(effort)), MOST_LONGER * effort.max_requests)
        if look.is_enough(effort) or most < LONGER * count:
            break
        count = min(most, max(2 * count, look.wanted(effort)))
    estimated = look.estimate(rate, simulated, is_settled=look.is_enough(effort))
    count = min(count, max(effort.first_requests, look.lasting(effort)))  # enough for what differs by so much
    for factor in factors_of(error) if error else ():
        other = _Look(system, system.scaled(factor).play(traffic.draw(rate / copies, count, seed)), targets)
        estimated = _widened(estimated, other.estimate(rate, count, is_settled=True))
    return replace(estimated, cpu_s=used_cpu_s() - began_s)


def burst(
    system: System, traffic: Traffic, rate: float, targets: Targets, count: int, seed: int = 0, *, error: float = 0.0
) -> RatePoint:
    """`count` requests from an empty system to its last token, all of them counted."""
    workload = traffic.draw(rate, count, seed)

    def estimated(played: System) -> Estimate:
        return _Look(played, played.play(workload), targets, is_whole=True).estimate(rate, count, is_settled=True)

    found = estimated(system)
    for factor in factors_of(error) if error else ():
        found = _widened(found, estimated(system.scaled(factor)))
    return found.point


def estimate_of(system: System, outcome: Outcome, targets: Targets, rate: float) -> Estimate:
    """Of one run that was simulated elsewhere."""
    return _Look(system, outcome, targets).estimate(rate, len(outcome), is_settled=True)


class _Look:
    """One run, and the part of it that counts."""

    def __init__(self, system: System, outcome: Outcome, targets: Targets, *, is_whole: bool = False) -> None:
        self.system = system
        self.outcome = outcome
        self.e2e_s = _mean(outcome.e2e_s)
        self.window = slice(0, len(outcome)) if is_whole else self._window()
        self.kept = self._judged(targets)
        ttft, tpot = targets.met(outcome)
        self.ttft, self.tpot = ttft[self.kept], tpot[self.kept]
        self.correlation = 0.0
        self.by_class: dict[str, float] = {}
        self.attainment = self._share(self.ttft * self.tpot)
        self.slack = self._slack(targets)
        self.is_growing = not is_whole and is_growing(self._in_system())

    def _window(self) -> slice:
        outcome, at = self.outcome, self.outcome.workload.arrival_s
        first = int(np.searchsorted(at, at[0] + min(self.e2e_s, float(at[-1] - at[0]) / 4)))
        start = max(first, mser(self._known(outcome.ttft_s)), mser(self._known(outcome.tpot_s)))
        end = int(np.searchsorted(at, at[-1] - min(1.5 * self.e2e_s, float(at[-1] - at[0]) / 4)))
        return slice(start, max(end, start + 1))

    def _known(self, values: Floats) -> Floats:
        """The mean where a client left, so that it is no sign of a beginning."""
        cancelled_s = self.outcome.cancelled_s
        if not len(cancelled_s):
            return values
        return np.where(np.isnan(values) & ~np.isnan(cancelled_s), _mean(values), values)

    def _judged(self, targets: Targets) -> Ints:
        """Of the window; all of it where every client left in time."""
        rows = np.arange(len(self.outcome))[self.window]
        judged = rows[targets.judged(self.outcome)[rows]]
        return judged if len(judged) else rows

    def _share(self, met: Floats) -> Interval:
        share, correlation = share_interval(met)
        self.correlation = max(self.correlation, correlation)
        return share

    def _slack(self, targets: Targets) -> Interval:
        worst = Interval(math.inf, math.inf, math.inf)
        both = self.ttft * self.tpot
        for name, (is_of, wanted) in targets.groups(self.outcome.workload).items():
            met = both[is_of[self.kept] > 0]
            share = self._share(met) if len(met) else Interval(1.0, 0.0, 1.0)
            if name:
                self.by_class[name] = share.value
            if share.value - wanted < worst.value:
                worst = Interval(share.value - wanted, share.low - wanted, share.high - wanted)
        return worst

    def _in_system(self) -> Floats:
        """How many requests were there, at even times up to the last arrival: the second half of them, if the run lasts
        so long, when a cluster that was empty has filled up, which looks as if a queue grew."""
        at, ended_s = self.outcome.workload.arrival_s, self.outcome.ended_s
        begin_s = max(float(at[0]), 2 * (float(at[0]) + FILLED * self.e2e_s) - float(at[-1]))
        times = np.linspace(begin_s if begin_s < at[-1] else at[0], at[-1], 65)[1:]
        end_s = np.sort(ended_s[np.isfinite(ended_s)])
        came_at = np.sort(at[np.isfinite(ended_s)])
        counts: Floats = (np.searchsorted(came_at, times) - np.searchsorted(end_s, times)).astype(np.float64)
        return counts

    def is_enough(self, effort: Effort) -> bool:
        if effort.decides and (self.slack.high < 0 or (self.is_growing and self.slack.value < 0)):
            return True
        if self.is_growing:  # none will be in time, and hardly any are
            return self.attainment.high <= 2 * effort.half_width and self._is_filled()
        if self._is_short(effort) or self.correlation > TRUSTED_CORRELATION:
            return False
        if effort.decides and self.slack.low > 0:
            return True
        return self.attainment.high - self.attainment.low <= 2 * effort.half_width

    def _is_filled(self) -> bool:
        """Whether the cluster has had the time to fill up, whatever waits."""
        phases = self.outcome.phases
        served_s = sum(_mean(phases[name]) for name in ("prefill", "decode")) if phases else self.e2e_s
        return self.outcome.workload.duration_s >= FILLED * served_s

    def _is_short(self, effort: Effort) -> bool:
        counted = self.window.stop - self.window.start
        return self.outcome.workload.duration_s < self.lasts_s(effort) or counted < 0.4 * len(self.outcome)

    def lasts_s(self, effort: Effort) -> float:
        """That a run must last."""
        return max(effort.e2e_times * self.e2e_s, _most(self.outcome.e2e_s, effort.covers) if effort.covers else 0.0)

    def lasting(self, effort: Effort) -> int:
        """Requests in a run that lasts long enough, though they may take longer in it than in this one. 0 where a queue
        that grows has made too many late."""
        if self.is_growing and self.slack.value < 0:
            return 0
        longer = 1.5 if self.is_growing else 1.2
        return math.ceil(longer * self.lasts_s(effort) * self._rate(self.outcome.workload.rate))

    def wanted(self, effort: Effort) -> int:
        """Requests in a run that is long enough, as far as this one tells: its interval narrows as the root of them.
        What looks as if it grew may only have filled up, which a run that lasts tells."""
        if self.is_growing:
            return self.lasting(effort)
        half = (self.attainment.high - self.attainment.low) / 2
        aim = max(effort.half_width, abs(self.slack.value) if effort.decides else 0.0)
        return max(self.lasting(effort), math.ceil(len(self.outcome) * (half / aim) ** 2 * 1.2))

    def estimate(self, rate: float, simulated: int, *, is_settled: bool) -> Estimate:
        outcome, kept = self.outcome, self.kept
        attainment, slack = self.attainment, self.slack
        if self.is_growing:  # in the long run all are late
            attainment = replace(attainment, low=0.0)
            slack = Interval(min(slack.value, -1e-6), -1.0, slack.high)
        point = RatePoint(
            rate=self._rate(rate),
            attainment=attainment,
            ttft_s={str(at): percentile_interval(outcome.ttft_s[kept], at) for at in PERCENTILES},
            tpot_s={str(at): percentile_interval(outcome.tpot_s[kept], at) for at in PERCENTILES},
            phases_s={name: _mean(spent[kept]) for name, spent in outcome.phases.items()},
            busy=self._busy(),
            by_class=self.by_class,
            num_requests=simulated,
            is_settled=is_settled and not self.is_growing,
        )
        return Estimate(
            point=point,
            slack=slack,
            is_growing=self.is_growing,
            missed_ttft=1 - float(self.ttft.mean()),
            missed_tpot=1 - float(self.tpot.mean()),
            num_simulated=simulated,
            cpu_s=0.0,
        )

    def _rate(self, asked: float) -> float:
        """As it was asked for; of clients who wait for their answers, how many got one a second."""
        workload, end_s = self.outcome.workload, self.outcome.finish_s
        if workload.loop is None:
            return asked
        at = workload.arrival_s[self.window]
        if self.window == slice(0, len(self.outcome)) or at[0] == at[-1]:
            span_s, count = float(np.nanmax(end_s, initial=0.0) - at[0]), self.outcome.served
        else:
            span_s, count = float(at[-1] - at[0]), int(((end_s > at[0]) & (end_s <= at[-1])).sum())
        return count / span_s if span_s > 0 else 0.0

    def _busy(self) -> dict[str, float]:
        """Shares of the whole run, its beginning and end too."""
        outcome, counts = self.outcome, dict(self.system.workers_by_pool)
        span_s = float(np.nanmax(outcome.finish_s, initial=0.0) - outcome.workload.arrival_s[0]) or math.inf
        counts["link"] = max(1, counts.get("prefill", 0) + counts.get("mixed", 0))
        shares = {name: spent / (span_s * counts[name]) for name, spent in outcome.busy_s.items() if counts.get(name)}
        if outcome.phases:
            held = self._held_token_s()
            kv_tokens = self.system.kv_tokens_by_pool
            if "mixed" in kv_tokens and len(kv_tokens) > 1:
                kv_tokens = {}  # of a request it is not known which of them held it
            shares |= {f"{name}_kv": min(1.0, held[name] / (span_s * n)) for name, n in kv_tokens.items()}
        return shares

    def _held_token_s(self) -> dict[str, float]:
        """Tokens of KV times the seconds that they were held. Decode pages are leased when prefill begins; a handoff
        that waits for pages holds none there."""
        workload, phases = self.outcome.workload, self.outcome.phases
        prompt, grown = workload.prompt_len, workload.prompt_len + workload.output_len / 2
        decoding = grown * phases["decode"]
        at_decode = float((prompt * (phases["prefill"] + phases["decode_queue"]) + decoding).sum())
        at_prefill = float((prompt * (phases["prefill"] + phases["handoff"])).sum())
        return {"prefill": at_prefill, "decode": at_decode, "mixed": at_decode, "colocated": at_decode}


def _most(values: Floats, share: float) -> float:
    finite = values[np.isfinite(values)]
    return float(np.quantile(finite, share)) if len(finite) else 0.0


def _mean(values: Floats) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else 0.0


def _widened(estimated: Estimate, other: Estimate) -> Estimate:
    point, more = estimated.point, other.point
    return replace(
        estimated,
        point=replace(
            point,
            attainment=_hull(point.attainment, more.attainment),
            ttft_s={at: _hull(interval, more.ttft_s[at]) for at, interval in point.ttft_s.items()},
            tpot_s={at: _hull(interval, more.tpot_s[at]) for at, interval in point.tpot_s.items()},
        ),
        slack=_hull(estimated.slack, other.slack),
        num_simulated=estimated.num_simulated + other.num_simulated,
    )


def _hull(interval: Interval, other: Interval) -> Interval:
    return interval.covering(other.low, other.high)
