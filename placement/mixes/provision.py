"""provision says which machines of which types to buy: the cheapest or the lowest-power mix for a rate, or the mix of
the highest throughput within a budget, for each of Splitwise's designs and its baselines.

    designs -> can a request alone meet the SLO there -> the best counts of each (placement/mixes/search.py, simulated)
            -> each one's highest rate on several draws, for an interval -> the best by the objective -> Plan

By Splitwise's own rules machines lend themselves to the other phase under load; by the live rules they do not, since
the cluster that `kvrelay up` starts has no mixed role. The plan says which it counted on, and what the other gives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from placement.catalogs.base import PlanError
from placement.goodput.runner import used_cpu_s
from placement.mixes.designs import Design, Mix, Resource, all_designs, work
from placement.mixes.machines import MachineType
from placement.mixes.report import Tried, answer, slo_asked, spoken
from placement.mixes.runs import Progress, Runs, Search, pool_of
from placement.mixes.search import Found, Limit, Questions, Space, cheapest, fastest, headroom
from placement.mixes.slowdowns import SlowdownSlo, alone
from placement.mixes.trial import SPLITWISE_SECONDS, Arrivals, Rules, Scene, ratios_of
from placement.plan import Plan, Slo
from placement.search.question import PlanQuestion
from placement.workload.requests import Workload

RATE_STEPS = 50  # of the grid of rates, from 0 to the rate looked for
OVERLOAD = 1.1  # more work than this for the machines there are, in their most efficient steps, is not simulated
BUSY = 0.75  # of machines, at the first guess
SAMPLE = 4096  # requests that are looked at alone
RESOURCES: dict[str, Resource] = {"cost": "usd_per_hour", "power": "power", "goodput": "gpus"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Provisioning:
    """What provisioning wants to know beside a PlanQuestion.

    `designs`: names; all that the machines make when None. `slowdowns`: Splitwise's kind of SLO, in place of the ask's
    TTFT and TPOT. `budget_power`: watts, or the machines' unit, beside the ask's own budget, which may be infinite.
    `apart`: draw prompt and output lengths each by itself, as Splitwise does. `seconds`, `min_requests`: how long a
    trial is, whichever is more. `seeds`: draws that a mix must hold; `interval_seeds`: draws that its highest rate is
    looked for on. `rate_step`: of the grid of rates, requests/s; a fiftieth of the rate when None.
    """

    designs: tuple[str, ...] | None = None
    slowdowns: SlowdownSlo | None = None
    budget_power: float | None = None
    rules: Rules = "splitwise"
    apart: bool = False
    seconds: float = SPLITWISE_SECONDS
    min_requests: int = 2000
    seeds: int = 2
    interval_seeds: int = 4
    rate_step: float | None = None
    compare_rules: bool = True  # what the chosen mix does by the other rules too

    def __post_init__(self) -> None:
        for key in ("seconds", "min_requests", "seeds", "interval_seeds", "budget_power", "rate_step"):
            value = getattr(self, key)
            if value is not None and not value > 0:
                raise PlanError(f"{key} is {value:g}; give a number above 0")


def provision(
    ask: PlanQuestion,
    machines: Sequence[MachineType],
    workload: Workload,
    *,
    options: Provisioning | None = None,
    on_progress: Progress | None = None,
) -> Plan:
    """The best mix for what is asked, and every design's. Raises PlanError in one sentence where there is none.

    A rate: the mix that takes least of the objective (cost, power, or GPUs for goodput). A budget of GPUs, USD per hour
    or power: the highest throughput. `ask.classes`, max_pp and algorithm play no part: a machine is as it is offered.
    """
    options = options or Provisioning()
    if ask.classes:
        raise PlanError("classes are given; mixes of machines are judged by one SLO, leave them out")
    with pool_of(ask.processes) as pool:
        arrivals = Arrivals(
            source=workload,
            draw="replay" if ask.is_replay else "apart" if options.apart else "together",
            seconds=options.seconds,
            min_requests=options.min_requests,
            burstiness=ask.burstiness,
        )
        scene = Scene(arrivals=arrivals, slo=options.slowdowns or ask.slo, rules=options.rules)
        began_s = used_cpu_s()
        runs = Runs(scene=scene, pool=pool, on_progress=on_progress)
        return Provisioner(ask, machines, options, runs).plan(began_s)


class Provisioner:
    """The steps of one plan."""

    def __init__(self, ask: PlanQuestion, machines: Sequence[MachineType], options: Provisioning, runs: Runs) -> None:
        self.ask = ask
        self.options = options
        self.runs = runs
        self.scene = runs.scene
        self.refused: dict[str, str] = {}
        self.resource = RESOURCES[ask.objective]
        designs = all_designs(machines, options.designs)
        self.designs = [one for one in designs if ask.colocated or not one.is_baseline]
        if not self.designs:
            raise PlanError("designs are baselines alone, and colocated is off; give a design with two kinds of pools")
        self._check_units()
        self.seeds = tuple(ask.seed + i for i in range(options.seeds))
        self.interval_seeds = tuple(ask.seed + i for i in range(max(options.seeds, options.interval_seeds)))

    def _check_units(self) -> None:
        wanted = {self.resource} if self.ask.rate else set(self._budgets())
        for resource, what in (("usd_per_hour", "price per hour"), ("power", "power")):
            for machine in {m.name: m for design in self.designs for m in design.machines}.values():
                if resource in wanted and not getattr(machine, resource):
                    raise PlanError(f"{machine.name} has no {what}, which what is asked needs; give it")

    def _budgets(self) -> dict[Resource, float]:
        given: dict[Resource, float | None] = {
            "usd_per_hour": self.ask.budget_usd_per_hour,
            "gpus": self.ask.num_gpus,
            "power": self.options.budget_power,
        }
        budgets = {resource: limit for resource, limit in given.items() if limit is not None and math.isfinite(limit)}
        if not budgets and not self.ask.rate:
            raise PlanError("the budget is infinite; give one in USD per hour, GPUs or power")
        return budgets

    def plan(self, began_s: float) -> Plan:
        able = [design for design in self.designs if self._is_able(design)]
        tried = self._for_rate(able, self.ask.rate) if self.ask.rate else self._within_budget(able)
        if not tried:
            raise PlanError(self._why_nothing())
        tried = self._looked_at(tried)
        tried.sort(key=self._rank)
        other_rules = self._other_rules(tried[0])
        return answer(
            self.ask,
            self._asked(),
            self.runs,
            tried,
            resource=self.resource,
            refused=self.refused,
            other_rules=other_rules,
            cpu_s=used_cpu_s() - began_s,
        )

    def _asked(self) -> dict[str, Any]:
        ask, options, arrivals = self.ask, self.options, self.scene.arrivals
        machines = {machine.name: machine for design in self.designs for machine in design.machines}.values()
        return {
            "model": self.designs[0].prompt.model,
            "hardware": ", ".join(machine.name for machine in machines),
            "workload": arrivals.source.name,
            "requests": len(arrivals.source),
            "num_gpus": ask.num_gpus,
            "rate": ask.rate,
            "budget_usd_per_hour": ask.budget_usd_per_hour,
            "budget_power": options.budget_power,
            "objective": ask.objective,
            "designs": [design.name for design in self.designs],
            "rules": options.rules,
            "draw": arrivals.draw,
            "burstiness": ask.burstiness,
            "seed": ask.seed,
            "seeds": options.seeds,
            **slo_asked(self.scene.slo),
        }

    def _is_able(self, design: Design) -> bool:
        """Whether requests alone meet the SLO on its machines."""
        first, second = design.machines
        best = alone(first.latency, second.latency, self.scene.arrivals.source.first(SAMPLE))
        slo = self.scene.slo
        ratios = ratios_of(best, slo)
        worst = max(ratios, key=lambda name: ratios[name])
        if ratios[worst] >= 1:
            reason = f"{spoken(worst)} is {ratios[worst]:.2f} times its limit"
        elif isinstance(slo, Slo) and (share := best.attainment(slo.ttft_s, slo.tpot_s)) < slo.attainment:
            reason = f"only {share:.1%} meet both targets, of {slo.attainment:.0%} wanted,"
        else:
            return True
        self.refused[design.name] = f"{reason} for requests that are alone on a machine"
        return False

    def _why_nothing(self) -> str:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.refused.items())
        return f"no design does what is asked ({reasons}); give a looser SLO, other machines or a larger budget"

    # searches

    def _for_rate(self, designs: Sequence[Design], rate: float) -> list[Tried]:
        steps = max(1, round(rate / self.options.rate_step)) if self.options.rate_step else RATE_STEPS
        step = rate / steps
        return self._find(
            designs, step, [cheapest(self.space(design, rate), steps) for design in designs], "mixes for the rate"
        )

    def _within_budget(self, designs: Sequence[Design]) -> list[Tried]:
        limits = {design.name: self._limits(design) for design in designs}
        rates = {design.name: self._rate_within(design, limits[design.name]) for design in designs}
        step = self.options.rate_step or _nice(max(rates.values(), default=1.0) / RATE_STEPS)
        questions = [
            fastest(self.space(design, rates[design.name]), limits[design.name], max(1, int(rates[design.name] / step)))
            for design in designs
        ]
        return self._find(designs, step, questions, "mixes within the budget")

    def _find(self, designs: Sequence[Design], step: float, questions: Sequence[Questions], what: str) -> list[Tried]:
        searches = [
            Search(design=design, step=step, seeds=self.seeds, questions=asked)
            for design, asked in zip(designs, questions, strict=True)
        ]
        tried = []
        for design, found in zip(designs, self.runs.find(what, searches), strict=True):
            if found is None:
                self.refused[design.name] = self._why_not_found()
            else:
                tried.append(Tried(mix=_mix(design, found), step=step, rate=found.rate * step))
        return tried

    def _why_not_found(self) -> str:
        if self.ask.rate:
            return "64 times the machines that the work asks for did not keep the SLO"
        return "what the budget buys keeps the SLO at no rate"

    def _limits(self, design: Design) -> list[Limit]:
        return [Limit(unit_costs=design.unit_costs(key), at_most=most) for key, most in self._budgets().items()]

    def _guess(self, design: Design, rate: float) -> tuple[float, float]:
        slo = self.scene.slo
        tbt_s = slo.max_tbt_s if isinstance(slo, SlowdownSlo) else slo.tpot_s
        asked = work(design, self.scene.arrivals.source, tbt_s)
        if design.is_baseline:
            return rate * (asked.prompt_s + 0.3 * asked.token_s) / BUSY, 0.0
        return rate * asked.prompt_s / BUSY, rate * asked.token_s / BUSY

    def _rate_within(self, design: Design, limits: Sequence[Limit]) -> float:
        prompt, token = self._guess(design, 1.0)
        return min(one.at_most / (one.unit_costs[0] * prompt + one.unit_costs[1] * token) for one in limits)

    def space(self, design: Design, rate: float) -> Space:
        """Where to look for mixes that hold the rate. Under Splitwise's rules either kind may do the other's work, so
        only the work of prompts on a baseline, and of both by the live rules, bounds the counts."""
        prompt, token = self._guess(design, rate)
        least = work(design, self.scene.arrivals.source)
        floor = (1, 1)
        if design.is_baseline or self.scene.rules == "live":
            floor = (
                max(1, math.ceil(rate * least.prompt_s / OVERLOAD)),
                max(1, math.ceil(rate * least.token_s / OVERLOAD)),
            )
        return Space(
            guess=(max(1, math.ceil(prompt)), 0 if design.is_baseline else max(1, math.ceil(token))),
            floor=(floor[0], 0) if design.is_baseline else floor,
            unit_costs=design.unit_costs(self.resource),
            is_baseline=design.is_baseline,
        )

    # what is said of the mixes found

    def _looked_at(self, tried: Sequence[Tried]) -> list[Tried]:
        """Each one's highest rate on every seed."""
        searches = [
            Search(
                design=one.mix.design,
                step=one.step,
                seeds=(seed,),
                questions=headroom(one.mix.num_prompt, one.mix.num_token, round(one.rate / one.step)),
            )
            for one in tried
            for seed in self.interval_seeds
        ]
        found = iter(self.runs.find("highest rates", searches))
        return [replace(one, rates=tuple(_rate(next(found), one.step) for _ in self.interval_seeds)) for one in tried]

    def _rank(self, one: Tried) -> tuple[float, float, str]:
        taken = one.mix.total(self.resource)
        rate = sum(one.rates) / len(one.rates)
        return (taken, -rate, one.mix.design.name) if self.ask.rate else (-rate, taken, one.mix.design.name)

    def _other_rules(self, chosen: Tried) -> float | None:
        """The chosen mix's highest rate by the other rules, on the first seed; None where it is not asked for or the
        other rules cannot be."""
        if not self.options.compare_rules or chosen.mix.design.is_baseline:
            return None
        other: Rules = "live" if self.scene.rules == "splitwise" else "splitwise"
        runs = Runs(scene=replace(self.scene, rules=other), pool=self.runs.pool, on_progress=self.runs.on_progress)
        mix, step = chosen.mix, chosen.step
        search = Search(
            design=mix.design,
            step=step,
            seeds=self.seeds[:1],
            questions=headroom(mix.num_prompt, mix.num_token, round(chosen.rate / step)),
        )
        try:
            found = runs.find("by the other rules", [search])[0]
        except PlanError:
            return None
        self.runs.cpu_s += runs.cpu_s
        self.runs.num_simulated += runs.num_simulated
        return _rate(found, step)


def _mix(design: Design, found: Found) -> Mix:
    return Mix(design=design, num_prompt=found.num_prompt, num_token=found.num_token)


def _rate(found: Found | None, step: float) -> float:
    return found.rate * step if found else 0.0


def _nice(step: float) -> float:
    """1, 2 or 5 times a power of ten, at most `step`."""
    power = 10.0 ** math.floor(math.log10(step))
    return max(factor * power for factor in (1, 2, 5) if factor * power <= step * (1 + 1e-9))
