"""SlowdownSlo is Splitwise's kind of target: how much longer than the same request alone on an idle reference machine.

Nine limits: P50, P90 and P99 of the slowdowns of TTFT, TBT and E2E. Every one must be kept; values equal to a limit
miss it, as in Splitwise's simulator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from placement.catalogs.base import PlanError
from placement.latency.base import LatencyModel
from placement.papers.splitwise.rules import alone_tbt_s, slowdowns
from placement.simulator.outcome import Outcome, percentiles
from placement.workload.requests import Floats, Workload

SHARES = (50, 90, 99)
Limits = tuple[float, float, float]
PUBLISHED: Mapping[str, Limits] = {"ttft": (2.0, 3.0, 6.0), "tbt": (1.25, 1.5, 5.0), "e2e": (1.25, 1.5, 5.0)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowdownSlo:
    """`limits`: for ttft, tbt and e2e the largest P50, P90 and P99; one that is left out is free. `reference`: the
    idle machine, Splitwise's is an A100 machine."""

    reference: LatencyModel
    limits: Mapping[str, Limits] = field(default_factory=lambda: PUBLISHED)

    def __post_init__(self) -> None:
        if unknown := [name for name in self.limits if name not in PUBLISHED]:
            raise PlanError(f"slowdown {unknown[0]} is not known; give limits for ttft, tbt or e2e")
        for name, limits in self.limits.items():
            if len(limits) != len(SHARES) or not all(limit > 0 for limit in limits):
                raise PlanError(f"slowdown limits of {name} are {limits}; give P50, P90 and P99, each above 0")
        if not self.limits:
            raise PlanError("slowdown limits are empty; give them for ttft, tbt or e2e")

    @property
    def max_tbt_s(self) -> float:
        """How long a decode step may take for half of the requests; without a limit, infinite."""
        limits = self.limits.get("tbt") or self.limits.get("e2e")
        return limits[0] * alone_tbt_s(self.reference, 1) if limits else float("inf")

    def ratios(self, outcome: Outcome) -> dict[str, float]:
        """Each limited percentile as a share of its limit, as tbt_p90: below 1 is kept."""
        found = {}
        for name, values in self._slowdowns(outcome).items():
            for share, value, limit in zip(SHARES, percentiles(values), self.limits[name], strict=True):
                found[f"{name}_p{share}"] = value / limit
        return found

    def within_p90(self, outcome: Outcome) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Requests whose every slowdown is within the P90 limit: with 9 in 10 of them the SLO's middle row is kept."""
        kept = np.isfinite(outcome.finish_s)
        with np.errstate(invalid="ignore"):
            for name, values in self._slowdowns(outcome).items():
                kept &= values < self.limits[name][1]
        return kept

    def _slowdowns(self, outcome: Outcome) -> Mapping[str, Floats]:
        return {name: values for name, values in slowdowns(outcome, self.reference).items() if name in self.limits}


def alone(prompt: LatencyModel, token: LatencyModel, workload: Workload) -> Outcome:
    """Every request alone on a prompt and a token machine: no number of machines serves it faster."""
    prompts, outputs = workload.prompt_len, workload.output_len
    lengths, rows = np.unique(prompts, return_inverse=True)
    ttft_s = np.array([prompt.prefill_s([(int(n), 0)]) * prompt.stages for n in lengths])[rows]
    step_s = np.array([alone_tbt_s(token, int(n)) for n in lengths])[rows]
    first_token_s = workload.arrival_s + ttft_s
    return Outcome(workload=workload, first_token_s=first_token_s, finish_s=first_token_s + step_s * (outputs - 1))
