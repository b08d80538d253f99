"""repeats_of splits what several runs of one case differed from its prediction by: what repeats is bias, and a better
profile mends it; what does not is noise between runs, and no profile does.

Shares of what was predicted; of the attainment, in shares of all requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from placement.checks.verification import Verification
from placement.goodput.stationary import t_90
from placement.plan import Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated:
    """`bias`: what the runs have in common, with the interval in which it lies nine times in ten. `noise`: by how much
    one run differs from another (standard deviation)."""

    what: str
    bias: Interval
    noise: float
    runs: int

    @property
    def repeats(self) -> bool:
        """Whether there is any bias, as far as so many runs tell."""
        return not self.bias.low <= 0 <= self.bias.high

    @property
    def words(self) -> str:
        size, runs = _signed(self.bias.value), f"{self.runs} runs"
        between = f"({_signed(self.bias.low)} to {_signed(self.bias.high)})"
        noise = f"one run differs from another by {self.noise:.1%}"
        if self.repeats:
            return f"{self.what} was off by {size} {between} in all {runs}: that repeats, and is bias; {noise}"
        return f"{self.what} was off by {size} {between} in {runs}, which may be chance: {noise}"


def repeats_of(found: Sequence[Verification]) -> tuple[Repeated, ...]:
    """Of two runs or more of one case."""
    shares = [each.measured_attainment - each.attainment.value for each in found]
    rows = [("attainment", shares)]
    for first in found[0].rows:
        errors = [each.row(first.metric, first.percentile).error for each in found]
        rows.append((f"{first.metric.upper()} P{first.percentile:g}", errors))
    return tuple(_repeated(what, values) for what, values in rows if np.isfinite(values).all())


def _repeated(what: str, values: Sequence[float]) -> Repeated:
    mean, noise, count = float(np.mean(values)), float(np.std(values, ddof=1)), len(values)
    half = t_90(count - 1) * noise / math.sqrt(count)
    return Repeated(what=what, bias=Interval(mean, mean - half, mean + half), noise=noise, runs=count)


def _signed(share: float) -> str:
    return f"{share:+.1%}"
