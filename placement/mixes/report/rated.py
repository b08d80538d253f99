"""RatedMix is a mix that a search settled on, with its highest rate on each draw; Miss, where it missed the SLO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from placement.goodput.stationary import t_90
from placement.goodput.targets import Judgement
from placement.latency.scaled import factors_of
from placement.mixes.designs import Mix
from placement.mixes.scenario import LoadPoint
from placement.mixes.simulations import Simulations
from placement.plan import Interval, Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class RatedMix:
    """It holds `rate` on all seeds that it was searched with; `rates`: its highest rate on each, and on others. `step`:
    of the grid of rates, requests/s."""

    mix: Mix
    step: float
    rate: float
    rates: tuple[float, ...] = ()

    @property
    def error(self) -> float:
        """Of the latency models."""
        return max(machine.offer.error for machine in self.mix.design.machines)

    @property
    def mean_rate(self) -> float:
        return sum(self.rates) / len(self.rates)

    @property
    def highest_rate(self) -> Interval:
        return interval(self.rates, self.step / 2, self.error)


@dataclass(frozen=True, slots=True)
class Miss:
    """The SLO, missed at a rate."""

    rate: float
    judgement: Judgement

    @property
    def binding(self) -> Pool:
        """Prompt machines where the time to first token is furthest over its limit, token machines otherwise."""
        ratios = self.judgement.ratios
        ttft = max((ratio for name, ratio in ratios.items() if name.startswith("ttft")), default=0.0)
        rest = max((ratio for name, ratio in ratios.items() if not name.startswith(("ttft", "e2e"))), default=0.0)
        return "prefill" if ttft > rest else "decode"

    def __str__(self) -> str:
        ratios = self.judgement.ratios
        worst = max(ratios, key=lambda name: ratios[name])
        if ratios[worst] < 1:  # each target alone is kept by enough requests
            why = f"only {self.judgement.attainment:.1%} of requests meet both targets"
        else:
            why = f"{spoken(worst)} is {ratios[worst]:.2f} times its limit"
        return f"at {self.rate:.4g} requests/s {why}"


def first_miss(rated: RatedMix, simulations: Simulations) -> Miss | None:
    """The lowest rate above its goodput at which the mix was seen to miss the SLO."""
    for point in points_of(rated, simulations):
        judgement = simulations.results[point].judgement
        if point.rate > rated.mean_rate and not judgement.is_met:
            return Miss(point.rate, judgement)
    return None


def points_of(rated: RatedMix, simulations: Simulations) -> list[LoadPoint]:
    """All at which the mix was simulated with times as they are, by rate and seed."""
    own = (point for point in simulations.results if point.mix == rated.mix and point.factor == 1)
    return sorted(own, key=_by_rate)


def _by_rate(point: LoadPoint) -> tuple[float, int]:
    return point.rate, point.seed


def interval(values: Sequence[float], least_half: float, error: float = 0.0) -> Interval:
    """The mean of what each draw gave. `error`: of the latency model; times longer by it make rates as much smaller."""
    mean = sum(values) / len(values)
    if len(values) > 1:
        deviation = sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
        half = max(least_half, t_90(len(values) - 1) * deviation / sqrt(len(values)))
    else:
        half = least_half
    longer, shorter = factors_of(error)
    return Interval(mean, max(0.0, mean - half) / longer, (mean + half) / shorter)


def spoken(target: str) -> str:
    """tbt_p90 as TBT P90."""
    name, _, share = target.partition("_p")
    return f"{name.upper()} P{share}" if share else name.upper()
