"""How a trace's arrivals come, which says whether drawn arrivals, whose gaps are a gamma, stand for them.

A trace with whole minutes of silence is no gamma, and that is told.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from placement.workload.requests import Workload
from placement.workload.traces import WorkloadError

SILENCE_S = 60.0
FEW_GAPS = 0.05  # of the time in silences, that a gamma may still stand for


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalGaps:
    """`cv`: the gaps' coefficient of variation, 1 for Poisson. `silent_share`: of the time that passes in gaps of a
    minute and more."""

    cv: float
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


def gaps_of(workload: Workload) -> ArrivalGaps:
    """Raises WorkloadError where there are too few requests, or all at once."""
    if len(workload) < 3 or not workload.duration_s:
        raise WorkloadError(
            f"{workload.name}: gaps between arrivals say nothing; give 3 requests or more that come apart"
        )
    gaps = np.diff(workload.arrival_s)
    return ArrivalGaps(
        cv=float(gaps.std() / gaps.mean()),
        silent_share=float(gaps[gaps >= SILENCE_S].sum() / workload.duration_s),
        longest_gap_s=float(gaps.max()),
    )
