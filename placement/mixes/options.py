"""Provisioning is what provisioning wants to know beside a PlanQuestion; together they make a Scenario. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from placement.catalogs.base import PlanError
from placement.goodput.targets import Targets
from placement.mixes.load import DRAW_SECONDS, drawn_load
from placement.mixes.rules import LIVE, rules_named
from placement.mixes.scenario import Scenario
from placement.mixes.slowdowns import SlowdownTargets
from placement.search.question import PlanQuestion
from placement.workload.requests import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Provisioning:
    """`designs`: names; all that the machines make when None. `slowdowns`: another kind of SLO, in place of the
    question's. `budget_power`: watts, or the machines' unit, beside the question's own budget, which may be infinite.
    `gpus_of`: how many there are, by the kind of machine; those of other kinds are as many as the budgets allow.
    `rules`: live, or a name of placement/papers/registry.py. `apart`: draw prompt and output lengths each by itself.
    `seconds`, `min_requests`: how long a draw is, whichever is more. `interval_seeds`: draws that a mix's highest rate
    is looked for on, and that it must hold a rate on; `seeds`: those of them that find what a budget buys.
    `rate_step`: of the grid of rates, requests/s; a fiftieth of the rate when None. `compare_rules`: say what the
    chosen mix does by other rules too.
    """

    designs: tuple[str, ...] | None = None
    slowdowns: SlowdownTargets | None = None
    budget_power: float | None = None
    gpus_of: Mapping[str, int] = field(default_factory=dict)
    rules: str = LIVE.name
    apart: bool = False
    seconds: float = DRAW_SECONDS
    min_requests: int = 2000
    seeds: int = 2
    interval_seeds: int = 4
    rate_step: float | None = None
    compare_rules: bool = True

    def __post_init__(self) -> None:
        for key in ("seconds", "min_requests", "seeds", "interval_seeds", "budget_power", "rate_step"):
            value = getattr(self, key)
            if value is not None and not value > 0:
                raise PlanError(f"{key} is {value:g}; give a number above 0")


def scenario_of(question: PlanQuestion, workload: Workload, options: Provisioning) -> Scenario:
    load = drawn_load(
        workload,
        burstiness=question.burstiness,
        is_replay=question.is_replay,
        are_lengths_apart=options.apart,
        seconds=options.seconds,
        min_requests=options.min_requests,
    )
    if options.slowdowns is not None:
        return Scenario(load=load, targets=options.slowdowns, rules=rules_named(options.rules))
    return Scenario(load=load, targets=Targets(slo=question.slo), rules=rules_named(options.rules, question.slo))
