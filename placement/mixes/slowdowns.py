"""SlowdownTargets: how much longer a request may take than the same one alone on an idle reference machine.

Nine limits: P50, P90 and P99 of the slowdowns of TTFT, TBT and E2E. Every one must be kept; values equal to a limit
miss it. The kind of SLO, and the limits where none are given, are Splitwise's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from placement.catalogs.base import PlanError
from placement.goodput.targets import Judgement
from placement.latency.base import LatencyModel
from placement.simulator.outcome import Outcome, percentiles
from placement.workload.requests import Floats, Workload

SHARES = (50, 90, 99)
Limits = tuple[float, float, float]
DEFAULT_LIMITS: Mapping[str, Limits] = {"ttft": (2.0, 3.0, 6.0), "tbt": (1.25, 1.5, 5.0), "e2e": (1.25, 1.5, 5.0)}


@runtime_checkable
class TimesUnloaded(Protocol):
    """A latency model that says itself how long a decode step takes for a request that is alone."""

    def unloaded_tbt_s(self, prompt_len: int) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowdownTargets:
    """`limits`: for ttft, tbt and e2e the largest P50, P90 and P99; one that is left out is free. `reference`: the
    idle machine, Splitwise's is an A100 machine."""

    reference: LatencyModel
    limits: Mapping[str, Limits] = field(default_factory=lambda: DEFAULT_LIMITS)

    def __post_init__(self) -> None:
        if unknown := [name for name in self.limits if name not in DEFAULT_LIMITS]:
            raise PlanError(f"slowdown {unknown[0]} is not known; give limits for ttft, tbt or e2e")
        for name, limits in self.limits.items():
            if len(limits) != len(SHARES) or not all(limit > 0 for limit in limits):
                raise PlanError(f"slowdown limits of {name} are {limits}; give P50, P90 and P99, each above 0")
        if not self.limits:
            raise PlanError("slowdown limits are empty; give them for ttft, tbt or e2e")

    @property
    def longest_step_s(self) -> float:
        """How long a decode step may take for half of the requests; without a limit, infinite."""
        limits = self.limits.get("tbt") or self.limits.get("e2e")
        return limits[0] * unloaded_tbt_s(self.reference, 1) if limits else float("inf")

    @property
    def wanted_attainment(self) -> float:
        """With 9 in 10 requests within the P90 limits, the SLO's middle row is kept."""
        return 0.9

    def judge(self, outcome: Outcome) -> Judgement:
        """Ratios by the percentile that is limited, as tbt_p90. Attainment: share of requests whose every slowdown is
        within the P90 limit."""
        stayed = outcome.is_judged()
        every = slowdowns(outcome, self.reference)
        limited = {name: values[stayed] for name, values in every.items() if name in self.limits}
        ratios = {
            f"{name}_p{share}": value / limit
            for name, values in limited.items()
            for share, value, limit in zip(SHARES, percentiles(values), self.limits[name], strict=True)
        }
        within = np.isfinite(outcome.finish_s[stayed])
        with np.errstate(invalid="ignore"):
            for name, values in limited.items():
                within &= values < self.limits[name][1]
        is_met = all(ratio < 1 for ratio in ratios.values())
        return Judgement(is_met=is_met, attainment=float(within.mean()), ratios=ratios)

    def asked(self) -> dict[str, Any]:
        limits = {name: list(limits) for name, limits in self.limits.items()}
        return {"slowdowns": limits, "against": self.reference.source}


def slowdowns(outcome: Outcome, reference: LatencyModel) -> dict[str, Floats]:
    """TTFT, TBT and E2E divided by the same request's on one unloaded machine."""
    ttft_s, tbt_s = _unloaded_s(reference, reference, outcome.workload)
    return {
        "ttft": outcome.ttft_s / ttft_s,
        "tbt": outcome.tpot_s / tbt_s,
        "e2e": outcome.e2e_s / (ttft_s + tbt_s * (outcome.workload.output_len - 1)),
    }


def unloaded(prompt: LatencyModel, token: LatencyModel, workload: Workload) -> Outcome:
    """Every request alone on a prompt and a token machine: no number of machines serves it faster."""
    ttft_s, tbt_s = _unloaded_s(prompt, token, workload)
    first_token_s = workload.arrival_s + ttft_s
    finish_s = first_token_s + tbt_s * (workload.output_len - 1)
    return Outcome(workload=workload, first_token_s=first_token_s, finish_s=finish_s)


def _unloaded_s(prompt: LatencyModel, token: LatencyModel, workload: Workload) -> tuple[Floats, Floats]:
    """TTFT and TBT of each request; asked once for each length."""
    lengths, rows = np.unique(workload.prompt_len, return_inverse=True)
    ttft_s = np.array([prompt.prefill_s([(int(n), 0)]) * prompt.stages for n in lengths])
    tbt_s = np.array([unloaded_tbt_s(token, int(n)) for n in lengths])
    return ttft_s[rows], tbt_s[rows]


def unloaded_tbt_s(latency: LatencyModel, prompt_len: int) -> float:
    """A decode step of one request behind its prompt."""
    if isinstance(latency, TimesUnloaded):
        return latency.unloaded_tbt_s(prompt_len)
    return latency.decode_line(1, prompt_len + 1).step_s * latency.stages
