"""plan answers how many workers of which kind to run: what was tried, what is best, how sure that is, and what binds.

    offers -> each phase alone (Algorithm 1) or pairs within nodes (Algorithm 2), colocated workers beside
           -> whole clusters simulated, a worker moved or added where one pool binds -> the best by the objective
           -> that one again with the latency model's error, relieved, and at the rate asked for

It decides by simulation alone; arithmetic only leaves out what cannot win. PlanError says why nothing can be planned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from placement.build.from_offers import offers_of
from placement.catalogs.base import Catalog, Offer, PlanError
from placement.goodput.estimate import Effort, Estimate
from placement.goodput.runner import Progress, Runner, open_runner, used_cpu_s
from placement.goodput.search import Knee, find_goodput, verify_goodput
from placement.goodput.targets import Targets
from placement.plan import Candidate, Goodput, Interval, Plan, Pool, RatePoint
from placement.search.advice import Findings, advise
from placement.search.infeasible import raise_if_nothing_fits, why_nothing
from placement.search.placements import (
    Alone,
    Market,
    Spent,
    Trial,
    colocated_trials,
    find_colocated,
    find_pairs,
    find_phase,
    goodput_problem,
    replicas_for,
    sized,
    splits,
    system_of,
    usable_degrees,
)
from placement.search.question import PlanQuestion
from placement.search.sizing import (
    EstimateJob,
    RateJob,
    Sized,
    binding_pool,
    estimate_job,
    size_for_rate,
    with_one_more,
)
from placement.workload.lengths import fit_arrivals
from placement.workload.requests import Workload
from placement.workload.traffic import Traffic, with_classes

WHOLE_CLUSTERS = 4  # of two pools, simulated as a whole
COLOCATED_CLUSTERS = 2
LONG = Effort(first_requests=16_000, max_requests=32_000, half_width=0.01, decides=True)
JOINT = Effort(first_requests=2000, max_requests=12_000, half_width=0.01, decides=True)
FINAL = Effort(first_requests=4000, max_requests=24_000, half_width=0.01)
CURVE_AT = (0.25, 0.5, 0.8, 1.2)  # of the goodput: points of each candidate's curve besides the search's
BEYOND = (1.1, 1.3, 1.6)  # of the goodput: where it is seen which pool binds, the first that misses the SLO
MANY = 100  # requests, whose arrivals say something
CURVES = 4  # candidates that get them
CURVE = Effort(first_requests=2000, max_requests=8000, half_width=0.02, decides=True)


def plan(question: PlanQuestion, catalog: Catalog, workload: Workload, *, on_progress: Progress | None = None) -> Plan:
    """The best placement for what is asked. Raises PlanError in one sentence where there is none."""
    began_s = used_cpu_s()
    market = Market(
        catalog=catalog,
        offer_of=offers_of(catalog),
        traffic=Traffic(
            source=with_classes(workload, question.classes, question.seed),
            burstiness=question.burstiness,
            is_replay=question.is_replay,
        ),
        targets=Targets(slo=question.slo, classes=question.classes),
        seed=question.seed,
        max_pp=question.max_pp,
        thoroughness=question.thoroughness,
    )
    planner = _Planner(question, market)
    planner.look_at_offers()
    with open_runner(question.processes, on_progress) as runner:
        return planner.plan(runner, began_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A whole cluster, simulated."""

    trial: Trial
    found: Knee
    goodput: Goodput


class _Planner:
    """The steps of one plan."""

    def __init__(self, question: PlanQuestion, market: Market) -> None:
        self.question = question
        self.market = market
        self.spent = Spent()
        self.num_gpus = self._num_gpus()
        self.offers: list[Offer] = []
        self.trials: dict[Candidate, Trial] = {}

    def _num_gpus(self) -> int:
        """At most; for a rate, what a single worker may take."""
        question, cost = self.question, self.market.catalog.cost
        if question.num_gpus is not None:
            return question.num_gpus
        if question.budget_usd_per_hour is not None:
            if not cost.usd_per_gpu_hour:
                raise PlanError(
                    f"budget needs the price of a {self.market.hardware}; give usd_per_gpu_hour in a hardware file"
                )
            count = int(question.budget_usd_per_hour / cost.usd_per_gpu_hour + 1e-9)
            if count < 1:
                raise PlanError(
                    f"budget is {question.budget_usd_per_hour:g} USD an hour and one {self.market.hardware} costs "
                    f"{cost.usd_per_gpu_hour:g}; give more"
                )
            return count
        return self.market.catalog.gpus_per_node * question.max_pp

    def look_at_offers(self) -> None:
        """Whether anything can be had at all, by arithmetic."""
        self.offers = usable_degrees(self.market, self.num_gpus, self.spent)
        raise_if_nothing_fits(self.market, self.offers, self.spent, self.num_gpus)

    def plan(self, runner: Runner, began_s: float) -> Plan:
        self.runner, offers = runner, self.offers
        prefills, decodes = self._phases(offers)
        colocated = find_colocated(self.market, runner, offers, self.spent) if self.question.colocated else []
        trials = self._promising(self._trials(prefills, decodes)) + self._colocated(colocated)
        if not trials:
            raise PlanError(why_nothing(self.market, offers, self.spent, self.num_gpus, prefills, decodes, colocated))
        runs = self._verified(self._for_rate(trials) if self.question.rate else self._for_gpus(trials))
        self.trials = {run.trial.candidate: run.trial for run in runs}
        tried = self._best_first([run.goodput for run in runs])
        if not tried:
            raise PlanError(why_nothing(self.market, offers, self.spent, self.num_gpus, prefills, decodes, colocated))
        return self._answer(tried, {"prefill": prefills, "decode": decodes}, began_s)

    def _phases(self, offers: Sequence[Offer]) -> tuple[list[Alone], list[Alone]]:
        return (
            find_phase(self.market, self.runner, "prefill", offers, self.spent),
            find_phase(self.market, self.runner, "decode", offers, self.spent),
        )

    # what to simulate as a whole

    def _trials(self, prefills: Sequence[Alone], decodes: Sequence[Alone]) -> list[Trial]:
        high = self._high(prefills, decodes) if self.question.algorithm != "low" else []
        is_one_node = bool(high) and all(trial.within_node for trial in high)
        if self.question.algorithm == "high" or (is_one_node and self.question.algorithm == "auto"):
            return high
        return high + self._low(prefills, decodes)

    def _high(self, prefills: Sequence[Alone], decodes: Sequence[Alone]) -> list[Trial]:
        if self.question.rate:
            trials = sized(self.market, prefills, decodes, self.question.rate)
            return [t for t in trials if t.candidate.gpus <= 1.4 * trials[0].candidate.gpus][:WHOLE_CLUSTERS]
        trials = splits(self.market, prefills, decodes, self.num_gpus)
        return [t for t in trials if t.promised >= 0.75 * trials[0].promised][:WHOLE_CLUSTERS]

    def _promising(self, trials: Sequence[Trial]) -> list[Trial]:
        """Without those that promise far less than the best, or want far more GPUs."""
        if self.question.rate:
            fewest = min((trial.candidate.gpus for trial in trials), default=0)
            return [trial for trial in trials if trial.candidate.gpus <= 1.5 * fewest]
        most = max((trial.promised for trial in trials), default=0.0)
        return [trial for trial in trials if trial.promised >= 0.65 * most]

    def _low(self, prefills: Sequence[Alone], decodes: Sequence[Alone]) -> list[Trial]:
        """Whole pairs, repeated."""
        pairs = find_pairs(self.market, self.runner, prefills, decodes, self.num_gpus, self.spent)
        trials = []
        for pair, _ in pairs[:2]:
            rate = self.question.rate
            count = replicas_for(rate, pair.promised) if rate else self._room(pair.candidate)
            if count:
                pools = tuple(replace(pool, replicas=count) for pool in pair.candidate.pools)
                candidate = replace(pair.candidate, pools=pools)
                promised = count * pair.promised
                trials.append(replace(pair, candidate=candidate, promised=promised, copies=count))
        return trials

    def _room(self, unit: Candidate) -> int:
        return self.num_gpus // unit.gpus

    def _colocated(self, alone: Sequence[Alone]) -> list[Trial]:
        def count_of(one: Alone) -> int:
            rate = self.question.rate
            return replicas_for(rate, one.goodput.value) if rate else self.num_gpus // one.gpus

        trials = colocated_trials(self.market, alone, count_of)
        if self.question.rate:
            trials.sort(key=lambda trial: trial.candidate.gpus)
        else:
            trials.sort(key=lambda trial: -trial.promised)
        return trials[:COLOCATED_CLUSTERS]

    # whole clusters

    def _for_gpus(self, trials: Sequence[Trial]) -> list[_Run]:
        """Each one's goodput; then a worker moved from one pool to the other where that may help the best."""
        runs = self._goodputs(trials, "whole clusters")
        done = {trial.candidate for trial in trials}
        for _ in range(2):
            two_pools = [run for run in runs if not run.trial.candidate.is_colocated]
            if not two_pools:
                break
            best = max(two_pools, key=lambda run: self._score(run.goodput))
            moved = [trial for trial in self._moved(best.trial, best.found) if trial.candidate not in done]
            if not moved:
                break
            done |= {trial.candidate for trial in moved}
            runs += self._goodputs(moved, "neighbours of the best")
        return runs

    def _goodputs(self, trials: Sequence[Trial], what: str) -> list[_Run]:
        problems = [goodput_problem(self.market, trial, effort=JOINT) for trial in trials]
        return self._runs(trials, self.runner.map(find_goodput, problems, what))

    def _runs(self, trials: Sequence[Trial], found: Sequence[Knee]) -> list[_Run]:
        for one in found:
            self.spent.count(one)
        return [
            _Run(trial=trial, found=one, goodput=self._goodput(trial.candidate, one))
            for trial, one in zip(trials, found, strict=True)
        ]

    def _verified(self, runs: list[_Run]) -> list[_Run]:
        """The best of two pools and the best colocated one by longer runs, until those that are best are verified."""
        done: set[Candidate] = set()
        while True:
            best: dict[bool, _Run] = {}
            for run in sorted(runs, key=lambda run: self._score(run.goodput), reverse=True):
                if run.goodput.goodput.value:
                    best.setdefault(run.trial.candidate.is_colocated, run)
            now = [run for run in best.values() if run.trial.candidate not in done]
            if not now:
                return runs
            problems = [
                replace(goodput_problem(self.market, run.trial, effort=LONG), earlier=run.found.estimates)
                for run in now
            ]
            found = self.runner.map(verify_goodput, problems, "the best again, longer")
            done |= {run.trial.candidate for run in now}
            others = [run for run in runs if run not in now]
            runs = others + self._runs([run.trial for run in now], found)

    def _goodput(self, candidate: Candidate, found: Knee) -> Goodput:
        cost, error = self.market.catalog.cost, self._error_of(candidate)
        value = found.goodput
        return Goodput(
            candidate=candidate,
            goodput=Interval(value.value, value.low / (1 + error), value.high / (1 - min(error, 0.9))),
            curve=tuple(one.point for one in found.estimates),
            usd_per_hour=candidate.gpus * cost.usd_per_gpu_hour,
            watts=candidate.gpus * cost.watts_per_gpu,
        )

    def _error_of(self, candidate: Candidate) -> float:
        return max(self.market.offer_of(pool.degrees, True).error for pool in candidate.pools)

    def _moved(self, trial: Trial, found: Knee) -> list[Trial]:
        """One worker more where it binds, one or more less in the other pool, within the GPUs there are."""
        miss = found.first_miss
        if trial.candidate.is_colocated or trial.copies > 1 or miss is None:
            return []
        binding = binding_pool(miss.point, miss.missed_ttft, miss.missed_tpot)
        more = with_one_more(trial.candidate, "decode" if binding == "decode" else "prefill")
        other = 0 if binding == "decode" else 1
        while more.gpus > self.num_gpus:
            pool = more.pools[other]
            if pool.replicas < 2:
                return []
            pools = list(more.pools)
            pools[other] = replace(pool, replicas=pool.replicas - 1)
            more = replace(more, pools=tuple(pools))
        return [replace(trial, candidate=more)]

    def _for_rate(self, trials: Sequence[Trial]) -> list[_Run]:
        """Each one grown until it keeps the SLO at the rate, then its goodput."""
        assert self.question.rate is not None
        jobs = [
            RateJob(
                trial=trial,
                offers=tuple(self.market.offer_of(pool.degrees, trial.within_node) for pool in trial.candidate.pools),
                rate=self.question.rate,
                traffic=self.market.traffic,
                targets=self.market.targets,
                effort=JOINT.times(self.question.thoroughness),
                seed=self.market.seed,
                gpus_per_node=self.market.catalog.gpus_per_node,
            )
            for trial in trials
        ]
        grown: list[Sized] = self.runner.map(size_for_rate, jobs, "clusters for the rate")
        for one in grown:
            self.spent.num_simulated += one.num_simulated
            self.spent.cpu_s += one.cpu_s
        kept = [one.trial for one in grown if one.keeps_slo]
        kept = [trial for i, trial in enumerate(kept) if trial.candidate not in [t.candidate for t in kept[:i]]]
        rate = self.question.rate
        problems = [
            replace(goodput_problem(self.market, trial, effort=JOINT), bottom=rate, top=1.25 * rate) for trial in kept
        ]
        return self._runs(kept, self.runner.map(find_goodput, problems, "headroom"))

    # the best

    def _score(self, goodput: Goodput) -> tuple[float, float]:
        gpus = goodput.candidate.gpus
        if self.question.rate:
            return (-gpus if goodput.goodput.value else -math.inf, goodput.goodput.value)
        if self.question.objective == "goodput":
            return (goodput.goodput.value, -gpus)
        return (goodput.per_gpu, goodput.goodput.value)

    def _best_first(self, tried: Sequence[Goodput]) -> list[Goodput]:
        return sorted((one for one in tried if one.goodput.value), key=self._score, reverse=True)

    def _answer(self, tried: list[Goodput], phases: Mapping[str, Sequence[Alone]], began_s: float) -> Plan:
        chosen = self._with_error(tried[0])
        tried = self._with_curves([chosen, *tried[1:]])
        chosen = tried[0]
        rate = self.question.rate or chosen.goodput.value
        at_rate, knee = self._estimates(
            [
                (chosen.candidate, rate, self._error_of(chosen.candidate)),
                (chosen.candidate, BEYOND[0] * chosen.goodput.value, 0),
            ],
            FINAL,
        )
        for factor in BEYOND[1:]:
            if knee.keeps_slo:  # what binds shows only where something is late
                (knee,) = self._estimates([(chosen.candidate, factor * chosen.goodput.value, 0)], FINAL)
        binding, relief = self._relieved(chosen, knee)
        headroom = max(0.0, 1 - rate / chosen.goodput.value)
        return Plan(
            asked=self._asked(),
            slo=self.question.slo,
            objective=self.question.objective,
            chosen=chosen,
            at_rate=at_rate.point,
            binding=binding,
            headroom=headroom,
            tried=tuple(tried),
            refused=dict(sorted(self.spent.refused.items())),
            advice=tuple(
                advise(
                    Findings(
                        chosen=chosen,
                        tried=tried,
                        binding=binding,
                        relief=relief,
                        headroom=headroom,
                        rate=self.question.rate,
                        copies=self._trial_of(chosen.candidate).copies,
                        error=self._error_of(chosen.candidate),
                        asked_colocated=self.question.colocated,
                        arrivals=self._arrivals(),
                    )
                )
            ),
            sources=self._sources(chosen),
            phase_goodput={
                name: tuple((str(one.offer.degrees), one.per_gpu) for one in found) for name, found in phases.items()
            },
            cpu_s=self.spent.cpu_s + (used_cpu_s() - began_s if self.question.processes != 0 else 0.0),
            num_simulated=self.spent.num_simulated,
        )

    def _with_error(self, chosen: Goodput) -> Goodput:
        """Its interval, searched at times so much longer and shorter as the latency model may be wrong."""
        error = self._error_of(chosen.candidate)
        if not error:
            return chosen
        value = chosen.goodput.value
        trial = self._trial_of(chosen.candidate)
        factors = (1 + error, 1 - min(error, 0.9))
        problems = [
            replace(
                goodput_problem(self.market, trial, effort=JOINT, precision=0.03, factor=factor),
                top=1.05 * value / factor,
            )
            for factor in factors
        ]
        slow, fast = self.runner.map(find_goodput, problems, "with the latency model's error")
        for one in (slow, fast):
            self.spent.count(one)
        low, high = min(value, slow.goodput.low), max(value, fast.goodput.high)
        return replace(chosen, goodput=Interval(value, low, high))

    def _trial_of(self, candidate: Candidate) -> Trial:
        """How it was tried; with one worker more, how its like was."""
        if candidate in self.trials:
            return self.trials[candidate]
        degrees = [pool.degrees for pool in candidate.pools]
        like = next(t for one, t in self.trials.items() if [pool.degrees for pool in one.pools] == degrees)
        return replace(like, candidate=candidate)

    def _with_curves(self, tried: list[Goodput]) -> list[Goodput]:
        """A few more points for each, so that its curve can be drawn from an idle cluster to an overloaded one."""
        shown = tried[:CURVES]
        wanted = [(one.candidate, share * one.goodput.value, 0.0) for one in shown for share in CURVE_AT]
        found = iter(self._estimates(wanted, CURVE))
        curves = [[*one.curve, *(next(found).point for _ in CURVE_AT)] for one in shown]
        curves += [list(one.curve) for one in tried[CURVES:]]
        return [replace(one, curve=_falling(curve)) for one, curve in zip(tried, curves, strict=True)]

    def _estimates(self, wanted: Sequence[tuple[Candidate, float, float]], effort: Effort) -> list[Estimate]:
        jobs = []
        for candidate, rate, error in wanted:
            trial = self._trial_of(candidate)
            jobs.append(
                EstimateJob(
                    system=system_of(trial, self.market.offer_of),
                    copies=trial.copies,
                    traffic=self.market.traffic,
                    rate=rate,
                    targets=self.market.targets,
                    effort=effort.times(self.question.thoroughness),
                    seed=self.market.seed,
                    error=error,
                )
            )
        found = self.runner.map(estimate_job, jobs, "curves")
        for one in found:
            self.spent.num_simulated += one.num_simulated
            self.spent.cpu_s += one.cpu_s
        return found

    def _relieved(self, chosen: Goodput, knee: Estimate) -> tuple[Pool, Mapping[str, float]]:
        """Which pool binds: where one worker more helps most just above the goodput. Attainment by what was added."""
        candidate = chosen.candidate
        if candidate.is_colocated:
            return "none", {"": knee.point.attainment.value}
        if self._trial_of(candidate).copies > 1:
            return binding_pool(knee.point, knee.missed_ttft, knee.missed_tpot), {"": knee.point.attainment.value}
        variants = {role: with_one_more(candidate, role) for role in ("prefill", "decode")}
        found = self._estimates([(one, knee.point.rate, 0.0) for one in variants.values()], CURVE)
        relief = {role: one.point.attainment.value for role, one in zip(variants, found, strict=True)}
        binding: Pool = binding_pool(knee.point, knee.missed_ttft, knee.missed_tpot)
        if abs(relief["prefill"] - relief["decode"]) > 0.02 and binding != "link":
            binding = "prefill" if relief["prefill"] > relief["decode"] else "decode"
        return binding, {"": knee.point.attainment.value, **relief}

    def _arrivals(self) -> str:
        """What drawn arrivals leave out of the trace's own."""
        source = self.market.traffic.source
        if self.question.is_replay or len(source) < MANY or not source.duration_s:
            return ""
        return fit_arrivals(source).warning

    def _asked(self) -> dict[str, Any]:
        question, catalog = self.question, self.market.catalog
        keys = (
            "num_gpus",
            "rate",
            "budget_usd_per_hour",
            "max_pp",
            "colocated",
            "algorithm",
            "burstiness",
            "thoroughness",
        )
        asked = {key: getattr(question, key) for key in (*keys, "is_replay", "seed", "objective")}
        return {
            "model": catalog.model,
            "hardware": catalog.hardware,
            "workload": self.market.traffic.source.name,
            "requests": len(self.market.traffic.source),
            "slo": question.slo,
            "classes": question.classes,
            **asked,
        }

    def _sources(self, chosen: Goodput) -> dict[str, str]:
        offer = self.market.offer_of(chosen.candidate.pools[0].degrees, True)
        drawn = f"gamma arrivals of burstiness {self.question.burstiness:g}"
        arrivals = "its own arrivals" if self.question.is_replay else drawn
        return {
            "latency": offer.latency.source,
            "hardware": self.market.hardware,
            "workload": f"{self.market.traffic.source.name}: lengths drawn from it, {arrivals}",
        }


def _falling(curve: Sequence[RatePoint]) -> tuple[RatePoint, ...]:
    """By rate, without the points that a run too short to settle has flattered: more of them cannot be in time than at
    a lower rate."""
    kept: list[RatePoint] = []
    for point in sorted(curve, key=lambda point: point.rate):
        least = min((one.attainment.value for one in kept), default=1.0)
        if point.is_settled or point.attainment.value <= least + 0.02:
            kept.append(point)
    return tuple(kept)
