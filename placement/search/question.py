"""PlanQuestion is what a plan is wanted for: targets, an objective, and what to spend or to serve. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from placement.catalogs.base import PlanError
from placement.plan import Objective, RequestClass, Slo

Algorithm = Literal["auto", "high", "low"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuestion:
    """What is wanted. Exactly one of num_gpus, rate and budget_usd_per_hour.

    `algorithm`: DistServe's "high" or "low" node-affinity; "auto" takes low where it promises more. `burstiness` of the
    arrivals (1: Poisson); `is_replay`: the workload's own arrivals instead. `processes`: None for one a core, 0 for
    none besides this one. `thoroughness`: so many times the simulated requests; less is quicker and less sure.
    `what_if`: what moves the answer is simulated, too.
    """

    slo: Slo
    objective: Objective = "goodput"
    num_gpus: int | None = None
    rate: float | None = None
    budget_usd_per_hour: float | None = None
    classes: tuple[RequestClass, ...] = ()
    max_pp: int = 1
    colocated: bool = True
    algorithm: Algorithm = "auto"
    burstiness: float = 1.0
    is_replay: bool = False
    seed: int = 0
    processes: int | None = None
    thoroughness: float = 1.0
    what_if: bool = False

    def __post_init__(self) -> None:
        given = [key for key in ("num_gpus", "rate", "budget_usd_per_hour") if getattr(self, key) is not None]
        if len(given) != 1:
            raise PlanError(f"{' and '.join(given) or 'nothing'} is given; give one of num_gpus, rate and budget")
        if not getattr(self, given[0]) > 0:
            raise PlanError(f"{given[0]} is {getattr(self, given[0]):g}; give a number above 0")
        for slo in (self.slo, *(kind.slo for kind in self.classes)):
            if not 0 < slo.attainment <= 1:
                raise PlanError(f"attainment is {slo.attainment:g}; give a share above 0, at most 1")
            if not (slo.ttft_s > 0 and slo.tpot_s > 0):
                raise PlanError(f"ttft is {slo.ttft_s:g} s and tpot {slo.tpot_s:g} s; give times above 0")
        if not self.thoroughness > 0:
            raise PlanError(f"thoroughness is {self.thoroughness:g}; give a number above 0 (1 is usual)")
        if self.max_pp < 1:
            raise PlanError(f"max_pp is {self.max_pp}; give 1 or more")
