"""Lengths are fitted to a trace, when there is too little of it to draw from or when it may not leave the house.

    empirical   the trace's own pairs of prompt and output tokens, drawn again: exact, joint
    lognormal   both lognormal, their logarithms correlated as in the trace, cut off at its shortest and longest
    apart       the trace's own prompts and outputs, each drawn by itself, as Splitwise's generator does

A fit says how far off it is: the largest distance between its distribution and the trace's (Kolmogorov and Smirnov),
how wrong its mean and its P90 are, and what it makes of the correlation. Arrivals are fitted by a gamma distribution of
the gaps; a trace with whole minutes of silence is no gamma, and the fit says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from placement.workload.requests import Floats, Ints, Workload
from placement.workload.traces import WorkloadError

Kind = Literal["empirical", "lognormal", "apart"]
KINDS: tuple[Kind, ...] = ("empirical", "lognormal", "apart")
DRAWN = 20_000  # to judge a fit
SILENCE_S = 60.0
FEW_GAPS = 0.05  # of the time in silences, that a gamma may still stand for


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthError:
    """How far a fit is off, of prompts or of outputs."""

    distance: float  # largest difference between the two distributions, 0 to 1
    mean: float  # relative: 0.1 is a tenth too long
    p90: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LengthFit:
    """Draws lengths like a workload's. `correlation`: of the logarithms, in the workload and as drawn."""

    kind: Kind
    source: Workload
    log_mean: tuple[float, float]
    log_std: tuple[float, float]
    correlation: float

    def draw(self, count: int, seed: int) -> tuple[Ints, Ints]:
        """Prompt and output tokens of `count` requests."""
        rng = np.random.default_rng([seed, 3])
        prompts, outputs = self.source.prompt_len, self.source.output_len
        if self.kind == "lognormal":
            return self._lognormal(count, rng)
        rows = rng.integers(0, len(prompts), size=count)
        others = rng.integers(0, len(prompts), size=count) if self.kind == "apart" else rows
        return prompts[rows], outputs[others]

    def _lognormal(self, count: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
        first, second = rng.standard_normal(count), rng.standard_normal(count)
        second = self.correlation * first + math.sqrt(1 - self.correlation**2) * second
        drawn = []
        for column, normal, mean, std in zip(
            (self.source.prompt_len, self.source.output_len), (first, second), self.log_mean, self.log_std, strict=True
        ):
            lengths = np.rint(np.exp(mean + std * normal)).astype(np.int64)
            drawn.append(np.clip(lengths, int(column.min()), int(column.max())))
        return drawn[0], drawn[1]

    def workload(self, count: int, seed: int) -> Workload:
        """`count` requests, one a second, to draw traffic from."""
        prompts, outputs = self.draw(count, seed)
        return Workload(
            arrival_s=np.arange(count, dtype=np.float64),
            prompt_len=prompts,
            output_len=outputs,
            name=f"{self.kind} lengths after {self.source.name}",
        )

    def errors(self, seed: int = 0) -> dict[str, LengthError]:
        """By "prompt" and "output", of DRAWN requests."""
        prompts, outputs = self.draw(DRAWN, seed)
        return {
            "prompt": _error(self.source.prompt_len, prompts),
            "output": _error(self.source.output_len, outputs),
        }

    def drawn_correlation(self, seed: int = 0) -> float:
        return log_correlation(*self.draw(DRAWN, seed))

    def summary(self, seed: int = 0) -> str:
        """One sentence for the report."""
        errors = self.errors(seed)
        off = ", ".join(
            f"{name}s at most {error.distance:.0%} apart, mean {error.mean:+.0%}, P90 {error.p90:+.0%}"
            for name, error in errors.items()
        )
        own = log_correlation(self.source.prompt_len, self.source.output_len)
        return (
            f"{self.kind} lengths after {self.source.name}: {off}; correlation {self.drawn_correlation(seed):.2f} "
            f"for {own:.2f}"
        )


def fit_lengths(workload: Workload, kind: Kind = "empirical") -> LengthFit:
    if kind not in KINDS:
        raise WorkloadError(f"lengths is {kind!r}; give one of {', '.join(KINDS)}")
    logs = [np.log(column.astype(np.float64)) for column in (workload.prompt_len, workload.output_len)]
    return LengthFit(
        kind=kind,
        source=workload,
        log_mean=(float(logs[0].mean()), float(logs[1].mean())),
        log_std=(float(logs[0].std()), float(logs[1].std())),
        correlation=log_correlation(workload.prompt_len, workload.output_len),
    )


def log_correlation(prompts: Ints, outputs: Ints) -> float:
    """Of the logarithms; 0 where one of them does not vary."""
    logs = np.log(prompts.astype(np.float64)), np.log(outputs.astype(np.float64))
    if len(prompts) < 2 or not (logs[0].std() > 0 and logs[1].std() > 0):
        return 0.0
    return float(np.corrcoef(*logs)[0, 1])


def _error(wanted: Ints, drawn: Ints) -> LengthError:
    p90 = float(np.percentile(wanted, 90))
    return LengthError(
        distance=distance(wanted.astype(np.float64), drawn.astype(np.float64)),
        mean=float(drawn.mean() / wanted.mean()) - 1,
        p90=float(np.percentile(drawn, 90)) / p90 - 1,
    )


def distance(wanted: Floats, drawn: Floats) -> float:
    """Kolmogorov and Smirnov's: the largest difference between the shares below any value."""
    at = np.union1d(wanted, drawn)
    below = [np.searchsorted(np.sort(values), at, side="right") / len(values) for values in (wanted, drawn)]
    return float(np.abs(below[0] - below[1]).max())


# arrivals


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalFit:
    """`cv`: the gaps' coefficient of variation, 1 for Poisson. `burstiness`: the shape of the gamma that has it.
    `distance` between the two. `silent_share`: of the time that passes in gaps of a minute and more."""

    rate: float
    cv: float
    burstiness: float
    distance: float
    silent_share: float
    longest_gap_s: float

    @property
    def warning(self) -> str:
        """Why drawn arrivals do not stand for these; nothing when they do."""
        if self.silent_share > FEW_GAPS:
            return (
                f"{self.silent_share:.0%} of the trace's time passes in gaps of a minute or more (the longest "
                f"{self.longest_gap_s:.0f} s), and its gaps vary {self.cv:.1f} times their mean: drawn arrivals do not "
                f"stand for it, so replay its own arrivals too"
            )
        if self.cv > 2:
            return f"the trace's gaps vary {self.cv:.1f} times their mean (Poisson: 1); replay its own arrivals too"
        return ""


def fit_arrivals(workload: Workload) -> ArrivalFit:
    """Raises WorkloadError where there are too few requests, or all at once."""
    if len(workload) < 3 or not workload.duration_s:
        raise WorkloadError(f"{workload.name}: arrivals cannot be fitted; give 3 requests or more that come apart")
    gaps = np.diff(workload.arrival_s)
    cv = float(gaps.std() / gaps.mean())
    burstiness = min(1e6, 1 / max(cv, 1e-3) ** 2)
    drawn = np.random.default_rng(0).gamma(shape=burstiness, scale=float(gaps.mean()) / burstiness, size=DRAWN)
    return ArrivalFit(
        rate=workload.rate,
        cv=cv,
        burstiness=burstiness,
        distance=distance(gaps, drawn),
        silent_share=float(gaps[gaps >= SILENCE_S].sum() / workload.duration_s),
        longest_gap_s=float(gaps.max()),
    )
