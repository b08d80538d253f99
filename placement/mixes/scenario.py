"""Scenario is what every simulation of a search for mixes has in common: the load, the targets, the rules.

`simulate_point` plays one mix at one rate on one draw and judges it: plain values in and out, so that other processes
do it. Nothing is warmed up or cut off: each draw is as long as the load says, and several draws give the interval.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from placement.goodput.runner import used_cpu_s
from placement.goodput.targets import Judgement
from placement.mixes.designs import Mix
from placement.mixes.load import Load
from placement.mixes.rules import LIVE, MixRules
from placement.simulator.outcome import Outcome, percentiles
from placement.workload.requests import Floats

PERCENTILES = (50, 90, 99)


class MixTargets(Protocol):
    """placement.goodput.targets.Targets without classes, or SlowdownTargets."""

    @property
    def longest_step_s(self) -> float:
        """How long a decode step may take."""

    @property
    def wanted_attainment(self) -> float: ...

    def judge(self, outcome: Outcome) -> Judgement: ...

    def asked(self) -> dict[str, Any]:
        """For the plan: what was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scenario:
    load: Load
    targets: MixTargets
    rules: MixRules = LIVE


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """A mix at a rate (requests/s), on the requests of a seed; `factor`: all times so much longer."""

    mix: Mix
    rate: float
    seed: int
    factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PointResult:
    """Times by percentile ("50", "90", "99"); phases are the mean request's, busy a share of the machines' time."""

    judgement: Judgement
    ttft_s: Mapping[str, float]
    tpot_s: Mapping[str, float]
    e2e_s: Mapping[str, float]
    phases_s: Mapping[str, float]
    busy: Mapping[str, float]
    num_requests: int
    cpu_s: float


def simulate_point(job: tuple[Scenario, LoadPoint]) -> PointResult:
    """Same arguments, same result, but for cpu_s. Raises PlanError: the rules cannot use the machines."""
    began_s = used_cpu_s()
    scenario, point = job
    workload = scenario.load.at(point.rate, point.seed)
    system = scenario.rules.system(point.mix, workload)
    outcome = (system.scaled(point.factor) if point.factor != 1 else system).play(workload)
    stayed = outcome.is_judged()
    return PointResult(
        judgement=scenario.targets.judge(outcome),
        ttft_s=_at_percentiles(outcome.ttft_s[stayed]),
        tpot_s=_at_percentiles(outcome.tpot_s[stayed]),
        e2e_s=_at_percentiles(outcome.e2e_s[stayed]),
        phases_s={name: float(np.nanmean(spent)) for name, spent in outcome.phases.items()},
        busy=_busy(outcome, point.mix),
        num_requests=len(outcome),
        cpu_s=used_cpu_s() - began_s,
    )


def _at_percentiles(values: Floats) -> dict[str, float]:
    return {str(share): value for share, value in zip(PERCENTILES, percentiles(values, PERCENTILES), strict=True)}


def _busy(outcome: Outcome, mix: Mix) -> dict[str, float]:
    both = mix.num_prompt + mix.num_token
    counts = {"prefill": mix.num_prompt, "decode": mix.num_token, "mixed": both, "colocated": both}
    span_s = float(np.nanmax(outcome.finish_s, initial=0.0) - outcome.workload.arrival_s[0])
    if not span_s > 0:
        return {}
    return {name: spent_s / (span_s * counts[name]) for name, spent_s in outcome.busy_s.items() if counts.get(name)}
