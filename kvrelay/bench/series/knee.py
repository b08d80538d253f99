"""The knee: the highest rate at which the wanted share of requests meets its targets, between the rates that were
played, and how sure that is. Pure; chance comes from the generator that is passed.

Attainment is taken not to rise with the rate (what rises in a measurement is levelled with its neighbours, as isotonic
regression does), and to run straight from one rate to the next. The interval holds what other requests of the same kind
would have shown (bootstrap over requests, nine times in ten); that the machine itself is slower at another time it
cannot hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

RESAMPLES = 2000
TAILS = (5.0, 95.0)
NARROW = 1.1  # high over low, where a search stops
MOST_RATES = 16
Where = Literal["within", "below", "above"]  # of the rates that were played


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """Of the requests at one rate."""

    within: int
    requests: int

    @property
    def share(self) -> float:
        return self.within / self.requests if self.requests else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Knee:
    """`below`: even the lowest rate misses, `rate` is it; `above`: the highest keeps it, `rate` is that."""

    rate: float
    low: float
    high: float
    where: Where


def knee(curve: Mapping[float, Met], wanted: float, rng: np.random.Generator) -> Knee:
    """`curve`: by rate, at least one."""
    rates = sorted(curve)
    weights = [curve[rate].requests for rate in rates]
    shares = np.array([curve[rate].share for rate in rates])
    at, where = _crossing(rates, falling(shares, weights), wanted)
    drawn = rng.binomial(weights, shares, size=(RESAMPLES, len(rates))) / np.maximum(weights, 1)
    low, high = np.percentile([_crossing(rates, falling(each, weights), wanted)[0] for each in drawn], TAILS)
    return Knee(rate=at, low=min(float(low), at), high=max(float(high), at), where=where)


def falling(shares: Sequence[float] | np.ndarray, weights: Sequence[int]) -> list[float]:
    """The nearest that never rises (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, how many
    for share, weight in zip(shares, weights, strict=True):
        pools.append((float(share), float(max(weight, 1)), 1))
        while len(pools) > 1 and pools[-1][0] > pools[-2][0]:
            (mean, load, count), (before, held, more) = pools.pop(), pools.pop()
            pools.append(((mean * load + before * held) / (load + held), load + held, count + more))
    return [mean for mean, _, count in pools for _ in range(count)]


def _crossing(rates: Sequence[float], shares: Sequence[float], wanted: float) -> tuple[float, Where]:
    keeping = sum(share >= wanted for share in shares)
    if keeping == 0:
        return rates[0], "below"
    if keeping == len(rates):
        return rates[-1], "above"
    (left, right), (high, low) = rates[keeping - 1 : keeping + 1], shares[keeping - 1 : keeping + 1]
    return left + (right - left) * (high - wanted) / (high - low), "within"


def next_rate(curves: Sequence[Mapping[float, Met]], wanted: float, first: float) -> float | None:
    """What a search plays next: twice the rate while one of those who are compared misses nowhere, half of it while one
    keeps its targets nowhere, then between what it keeps and what it misses. None: it is narrow enough, or long."""
    if not curves[0]:
        return first
    if len(curves[0]) >= MOST_RATES:
        return None
    for curve in curves:
        kept = [rate for rate, met in curve.items() if met.share >= wanted]
        missed = [rate for rate, met in curve.items() if met.share < wanted]
        if not missed:
            return 2 * max(kept)
        if not kept:
            return min(missed) / 2
        low = max(kept)
        above = [rate for rate in missed if rate > low]
        if not above:
            return 2 * low
        if min(above) / low > NARROW:
            return float(f"{np.sqrt(low * min(above)):.3g}")
    return None
