"""provision says which machines of which types to buy: the cheapest or the lowest-power mix for a rate, or the mix of
the highest throughput within a budget, for each of Splitwise's designs and its baselines.

    designs -> can a request alone meet the SLO there -> the best counts of each (placement/mixes/search.py, simulated)
            -> each one's highest rate on several draws, for an interval -> the best by the objective -> Plan

By the live rules machines keep their role, as in the cluster that `kvrelay up` starts; by a published simulator's they
may lend themselves to the other phase under load. The plan says which it counted on, and what the other gives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from placement.catalogs.base import PlanError
from placement.goodput.bounds import sampled_rows
from placement.goodput.runner import Progress, open_runner, used_cpu_s
from placement.mixes.affordable import raise_if_all_too_dear, too_dear, too_few
from placement.mixes.demand import rate_within, search_space
from placement.mixes.designs import Design, Mix, Resource, all_designs
from placement.mixes.grid import Asking, GridPoint, Limit
from placement.mixes.load import on_prefixes
from placement.mixes.machines import MachineType
from placement.mixes.options import Provisioning, scenario_of
from placement.mixes.report.advice import ByOtherRules, apart_words
from placement.mixes.report.plan import plan_of
from placement.mixes.report.rated import RatedMix, spoken
from placement.mixes.rules import LIVE, rules_to_compare
from placement.mixes.search import cheapest, fastest, headroom
from placement.mixes.simulations import DesignSearch, Simulations
from placement.mixes.slowdowns import unloaded
from placement.plan import Plan
from placement.search.problem import ALIKE
from placement.search.question import PlanQuestion
from placement.workload.requests import Workload

RATE_STEPS = 50  # of the grid of rates, from 0 to the rate looked for
SAMPLE = 4096  # requests that are looked at alone
RESOURCES: dict[str, Resource] = {"cost": "usd_per_hour", "power": "power", "goodput": "gpus"}


def provision(
    question: PlanQuestion,
    machines: Sequence[MachineType],
    workload: Workload,
    *,
    options: Provisioning | None = None,
    on_progress: Progress | None = None,
) -> Plan:
    """The best mix for what is asked, and every design's. Raises PlanError in one sentence where there is none.

    A rate: the mix that takes least of the objective (cost, power, or GPUs for goodput). A budget of GPUs, USD per hour
    or power: the highest throughput. `max_pp` and `algorithm` play no part: a machine is as it is offered.
    """
    options = options or Provisioning()
    if question.classes:
        raise PlanError("classes are given; mixes of machines are judged by one SLO, leave them out")
    began_s = used_cpu_s()
    with open_runner(question.processes) as runner:  # how far it is, is told by the searches
        simulations = Simulations(scenario_of(question, workload, options), runner, on_progress)
        plan = Provisioner(question, machines, options, simulations, on_prefixes(workload)).plan()
    own_s = used_cpu_s() - began_s
    return replace(plan, cpu_s=own_s + (plan.cpu_s if question.processes != 0 else 0.0))


class Provisioner:
    """The steps of one plan. `caution`: a sentence on the workload for who reads it; empty: there is none."""

    def __init__(
        self,
        question: PlanQuestion,
        machines: Sequence[MachineType],
        options: Provisioning,
        simulations: Simulations,
        caution: str,
    ) -> None:
        self.question = question
        self.caution = caution
        self.options = options
        self.simulations = simulations
        self.scenario = simulations.scenario
        self.refused: dict[str, str] = {}
        self.resource = RESOURCES[question.objective]
        designs = all_designs(machines, options.designs, are_pooled=self.scenario.rules.name == LIVE.name)
        self.designs = [design for design in designs if question.colocated or design.is_split]
        if not self.designs:
            raise PlanError("designs are baselines alone, and colocated is off; give a design with two kinds of pools")
        self.machines = list({machine.name: machine for d in self.designs for machine in d.machines}.values())
        self._check_units()
        self.seeds = tuple(question.seed + i for i in range(options.seeds))
        self.interval_seeds = tuple(question.seed + i for i in range(max(options.seeds, options.interval_seeds)))

    def _check_units(self) -> None:
        wanted = {self.resource} if self.question.rate else set(self._budgets())
        asked = f"objective {self.question.objective}" if self.question.rate else "the budget"
        figures = (("usd_per_hour", "price per hour", "usd_per_gpu_hour"), ("power", "power", "watts_per_gpu"))
        for resource, what, key in figures:
            for machine in self.machines:
                if resource in wanted and not getattr(machine, resource):
                    raise PlanError(
                        f"{machine.name} has no {what}, which {asked} needs; give {key} in its hardware file"
                    )

    def _budgets(self) -> dict[Resource, float]:
        given: dict[Resource, float | None] = {
            "usd_per_hour": self.question.budget_usd_per_hour,
            "gpus": self.question.num_gpus,
            "power": self.options.budget_power,
        }
        budgets = {resource: limit for resource, limit in given.items() if limit is not None and math.isfinite(limit)}
        if not budgets and not self.question.rate:
            raise PlanError("the budget is infinite; give one in USD per hour, GPUs or power")
        return budgets

    def plan(self) -> Plan:
        able = [design for design in self.designs if self._is_able(design)]
        rated = self._for_rate(able, self.question.rate) if self.question.rate else self._within_budget(able)
        if not rated:
            raise PlanError(self._why_nothing())
        rated = self._in_order(self._with_highest_rates(rated))
        other = self._by_other_rules(rated[0])
        plan = plan_of(
            self.question,
            self._asked(),
            self.simulations,
            rated,
            resource=self.resource,
            refused=self.refused,
            other=other,
        )
        apart = apart_words(rated, self.options.gpus_of)
        return replace(plan, advice=tuple(filter(None, (*plan.advice[:1], apart, *plan.advice[1:], self.caution))))

    def _asked(self) -> dict[str, Any]:
        question, options, load = self.question, self.options, self.scenario.load
        return {
            "model": self.designs[0].prompt.model,
            "hardware": ", ".join(machine.name for machine in self.machines),
            "workload": load.source.name,
            "requests": len(load.source),
            "num_gpus": question.num_gpus,
            "rate": question.rate,
            "budget_usd_per_hour": question.budget_usd_per_hour,
            "budget_power": options.budget_power,
            "objective": question.objective,
            "designs": [design.name for design in self.designs],
            "rules": options.rules,
            "draw": load.draw,
            "burstiness": question.burstiness,
            "seed": question.seed,
            "seeds": options.seeds,
            **self.scenario.targets.asked(),
        }

    def _is_able(self, design: Design) -> bool:
        """Whether requests alone meet the SLO on its machines."""
        first, second = design.machines
        targets, source = self.scenario.targets, self.scenario.load.source
        sample = source.without_prefixes(sampled_rows(source, most=SAMPLE))
        judgement = targets.judge(unloaded(first.latency, second.latency, sample))
        worst = max(judgement.ratios, key=lambda name: judgement.ratios[name])
        if judgement.ratios[worst] >= 1:
            reason = f"{spoken(worst)} is {judgement.ratios[worst]:.2f} times its limit"
        elif not judgement.is_met:
            wanted = targets.wanted_attainment
            reason = f"only {judgement.attainment:.1%} meet both targets, of {100 * wanted:.4g}% wanted,"
        else:
            return True
        self.refused[design.name] = f"{reason} for requests that are alone on a machine"
        return False

    def _why_nothing(self) -> str:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.refused.items())
        why = f"no design does what is asked ({reasons}); give a looser SLO, other machines or a larger budget"
        return f"{why}. {self.caution.removesuffix('.')}" if self.caution else why

    # searches

    def _for_rate(self, designs: Sequence[Design], rate: float) -> list[RatedMix]:
        steps = max(1, round(rate / self.options.rate_step)) if self.options.rate_step else RATE_STEPS
        asking = [cheapest(search_space(design, rate, self.scenario, self.resource), steps) for design in designs]
        return self._best_mixes(designs, rate / steps, asking, self.interval_seeds, "mixes for the rate")

    def _within_budget(self, designs: Sequence[Design]) -> list[RatedMix]:
        budgets = self._budgets()
        if designs:
            raise_if_all_too_dear(designs, budgets)
        few = self.options.gpus_of
        told = {design.name: too_dear(design, budgets) or too_few(design, few) for design in designs}
        self.refused |= {name: why for name, why in told.items() if why}
        designs = [design for design in designs if design.name not in self.refused]
        limits = {design.name: self._limits(design) for design in designs}
        rates = {design.name: rate_within(design, limits[design.name], self.scenario) for design in designs}
        step = self.options.rate_step or _nice(max(rates.values(), default=1.0) / RATE_STEPS)
        asking = [
            fastest(
                search_space(design, rates[design.name], self.scenario, self.resource),
                limits[design.name],
                max(1, int(rates[design.name] / step)),
            )
            for design in designs
        ]
        return self._best_mixes(designs, step, asking, self.seeds, "mixes within the budget")

    def _limits(self, design: Design) -> list[Limit]:
        limits = [Limit(unit_costs=design.unit_costs(key), at_most=most) for key, most in self._budgets().items()]
        kinds = {machine.kind for machine in design.machines}
        of_kinds = {kind: most for kind, most in self.options.gpus_of.items() if kind in kinds}
        return [*limits, *(Limit(unit_costs=design.gpus_of(kind), at_most=most) for kind, most in of_kinds.items())]

    def _best_mixes(
        self, designs: Sequence[Design], step: float, asking: Sequence[Asking], seeds: tuple[int, ...], what: str
    ) -> list[RatedMix]:
        searches = [
            DesignSearch(design=design, step=step, seeds=seeds, asking=asked)
            for design, asked in zip(designs, asking, strict=True)
        ]
        rated = []
        for design, best in zip(designs, self.simulations.search(what, searches), strict=True):
            if best is None:
                self.refused[design.name] = self._why_not_found()
            else:
                mix = Mix(design=design, num_prompt=best.num_prompt, num_token=best.num_token)
                rated.append(RatedMix(mix=mix, step=step, rate=best.rate * step))
        return rated

    def _why_not_found(self) -> str:
        if self.question.rate:
            return "64 times the machines that the work asks for did not keep the SLO"
        return "what the budget buys keeps the SLO at no rate"

    def _with_highest_rates(self, rated: Sequence[RatedMix]) -> list[RatedMix]:
        searches = [_highest_rate(mix, seed) for mix in rated for seed in self.interval_seeds]
        answers = iter(self.simulations.search("highest rates", searches))
        return [replace(mix, rates=tuple(_rate(next(answers), mix.step) for _ in self.interval_seeds)) for mix in rated]

    def _in_order(self, rated: Sequence[RatedMix]) -> list[RatedMix]:
        """The best first, but of those as good as that the cheapest, and of these the simplest."""
        ranked = sorted(rated, key=self._rank)
        best, taken = ranked[0], ranked[0].mix.total(self.resource)
        alike = [mix for mix in ranked if mix.mean_rate >= (1 - ALIKE) * best.mean_rate]
        if self.question.rate:
            alike = [mix for mix in alike if math.isclose(mix.mix.total(self.resource), taken)]
        alike.sort(key=lambda mix: (mix.mix.total("usd_per_hour"), not mix.mix.design.is_baseline))
        return [*alike, *(mix for mix in ranked if mix not in alike)]

    def _rank(self, rated: RatedMix) -> tuple[float, float, str]:
        taken, rate, name = rated.mix.total(self.resource), rated.mean_rate, rated.mix.design.name
        return (taken, -rate, name) if self.question.rate else (-rate, taken, name)

    def _by_other_rules(self, chosen: RatedMix) -> ByOtherRules | None:
        """The chosen mix's highest rate on the first seed; None where it is not asked for or the other rules cannot
        use the machines."""
        if not self.options.compare_rules or not chosen.mix.design.is_split:
            return None
        rules = rules_to_compare(self.scenario.rules)
        known = self.simulations
        simulations = Simulations(replace(self.scenario, rules=rules), known.runner, known.on_progress)
        try:
            (answer,) = simulations.search("by the other rules", [_highest_rate(chosen, self.seeds[0])])
        except PlanError:
            return None
        known.cpu_s += simulations.cpu_s
        known.num_simulated += simulations.num_simulated
        return ByOtherRules(rules, _rate(answer, chosen.step))


def _highest_rate(rated: RatedMix, seed: int) -> DesignSearch:
    mix = rated.mix
    asking = headroom(mix.num_prompt, mix.num_token, round(rated.rate / rated.step))
    return DesignSearch(design=mix.design, step=rated.step, seeds=(seed,), asking=asking)


def _rate(answer: GridPoint | None, step: float) -> float:
    return answer.rate * step if answer else 0.0


def _nice(step: float) -> float:
    """1, 2 or 5 times a power of ten, at most `step`."""
    power = 10.0 ** math.floor(math.log10(step))
    return max(factor * power for factor in (1, 2, 5) if factor * power <= step * (1 + 1e-9))
