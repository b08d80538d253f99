"""A gamma distribution of the gaps is fitted to a trace's arrivals, which says whether drawn arrivals stand for them.

A trace with whole minutes of silence is no gamma, and the fit says so. Nothing is drawn to be simulated here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from placement.workload.requests import Floats, Workload
from placement.workload.traces import WorkloadError

DRAWN = 20_000  # to judge a fit
SILENCE_S = 60.0
FEW_GAPS = 0.05  # of the time in silences, that a gamma may still stand for


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


def distance(wanted: Floats, drawn: Floats) -> float:
    """Kolmogorov and Smirnov's: the largest difference between the shares below any value."""
    at = np.union1d(wanted, drawn)
    below = [np.searchsorted(np.sort(values), at, side="right") / len(values) for values in (wanted, drawn)]
    return float(np.abs(below[0] - below[1]).max())
