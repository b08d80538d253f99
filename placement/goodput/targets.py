"""Targets judges an outcome: which requests met what was asked for them, and whether enough did.

With request classes each one has targets of its own and a share of its requests that must meet them; what counts is the
class that is worst off. Otherwise there is one class, all requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from placement.plan import RequestClass, Slo
from placement.simulator.outcome import Bools, Outcome, percentiles
from placement.workload.requests import Floats, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Of one outcome as it is. `ratios`: each target by its name and how much of its limit is used; below 1 is kept."""

    is_met: bool
    attainment: float  # share of requests within all targets
    ratios: Mapping[str, float]

    @property
    def missed(self) -> tuple[str, ...]:
        return tuple(name for name, ratio in self.ratios.items() if not ratio < 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """`classes` in the order of the workload's class_names; empty: `slo` is everybody's."""

    slo: Slo
    classes: tuple[RequestClass, ...] = ()

    @property
    def loosest(self) -> Slo:
        """What a router is told of them: requests of a class ask for more themselves."""
        slos = [each.slo for each in self.classes] or [self.slo]
        return Slo(ttft_s=max(slo.ttft_s for slo in slos), tpot_s=max(slo.tpot_s for slo in slos))

    @property
    def most_slack(self) -> float:
        """The attainment less its target where every request meets both, of the class that is asked most of."""
        return 1 - max((each.slo.attainment for each in self.classes), default=self.slo.attainment)

    def limits_s(self, workload: Workload) -> tuple[Floats, Floats]:
        """The TTFT and TPOT target of each request."""
        if not self.classes:
            whole = np.ones(len(workload))
            return whole * self.slo.ttft_s, whole * self.slo.tpot_s
        ttft_s = np.array([each.slo.ttft_s for each in self.classes])[workload.class_of]
        tpot_s = np.array([each.slo.tpot_s for each in self.classes])[workload.class_of]
        return ttft_s, tpot_s

    def met(self, outcome: Outcome) -> tuple[Floats, Floats]:
        """1 for each request that met its TTFT target, and its TPOT target."""
        ttft_s, tpot_s = self.limits_s(outcome.workload)
        with np.errstate(invalid="ignore"):
            return (outcome.ttft_s <= ttft_s).astype(np.float64), (outcome.tpot_s <= tpot_s).astype(np.float64)

    def judged(self, outcome: Outcome) -> Bools:
        """Which requests count."""
        return outcome.is_judged(self.limits_s(outcome.workload)[0])

    def groups(self, workload: Workload) -> Mapping[str, tuple[Floats, float]]:
        """For each class: 1 for its requests, and the share of them that must meet both."""
        if not self.classes:
            return {"": (np.ones(len(workload)), self.slo.attainment)}
        return {
            each.name: ((workload.class_of == i).astype(np.float64), each.slo.attainment)
            for i, each in enumerate(self.classes)
        }

    # as provisioning judges, of requests of one class

    @property
    def longest_step_s(self) -> float:
        """How long a decode step may take."""
        return self.slo.tpot_s

    @property
    def wanted_attainment(self) -> float:
        return self.slo.attainment

    def judge(self, outcome: Outcome) -> Judgement:
        """Ratios at the percentile that is to be attained."""
        slo = self.slo
        share, judged = (100 * slo.attainment,), self.judged(outcome)
        ratios = {
            "ttft": percentiles(outcome.ttft_s[judged], share)[0] / slo.ttft_s,
            "tpot": percentiles(outcome.tpot_s[judged], share)[0] / slo.tpot_s,
        }
        attainment = outcome.attainment(slo.ttft_s, slo.tpot_s)
        return Judgement(is_met=attainment >= slo.attainment, attainment=attainment, ratios=ratios)

    def asked(self) -> dict[str, Any]:
        return {"slo": self.slo}
