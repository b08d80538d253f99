"""plan answers how many workers of which kind to run: what was tried, what is best, how sure that is, and what binds.

    offers -> each phase alone (Algorithm 1) or pairs within nodes (Algorithm 2), colocated workers beside
           -> whole clusters simulated, a worker moved or added where one pool binds -> the best by the objective
           -> that one again with the latency model's error, relieved, and at the rate asked for

Whoever cannot wait is told a first answer: the best pure placement by a quick look at all of them.

It decides by simulation alone; arithmetic only leaves out what cannot win. PlanError says why nothing can be planned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from placement.build.from_offers import offers_of
from placement.catalogs.base import Catalog, Offer, PlanError
from placement.goodput.runner import Progress, open_runner, used_cpu_s
from placement.goodput.targets import Targets
from placement.plan import Plan
from placement.search.answer import PlanAnswer
from placement.search.clusters import (
    SimulatedCluster,
    simulate_for_gpus,
    simulate_for_rate,
    simulate_guessing,
)
from placement.search.infeasible import raise_if_nothing_fits, why_nothing
from placement.search.placements import (
    Placement,
    colocated_placements,
    find_pairs,
    placements_for_gpus,
    placements_for_rate,
    replicas_for,
)
from placement.search.problem import OnFirst, PlacementProblem, PlanSearch, SearchLog, WorkerGoodput
from placement.search.question import PlanQuestion
from placement.search.screening import screen_colocated, screen_phase, usable_offers
from placement.workload.requests import Workload
from placement.workload.traffic import Traffic, with_classes

WHOLE_CLUSTERS = 8  # of two pools, simulated as a whole: two phases keep less together than each promises alone
SIZED_CLUSTERS = 4  # likewise, for a rate
COLOCATED_CLUSTERS = 2
Phases = Mapping[str, Sequence[WorkerGoodput]]


def plan(
    question: PlanQuestion,
    catalog: Catalog,
    workload: Workload,
    *,
    on_progress: Progress | None = None,
    on_first: OnFirst | None = None,
) -> Plan:
    """The best placement for what is asked. `on_first` is told a coarse answer long before, if there is one. Raises
    PlanError in one sentence where there is none."""
    began_s = used_cpu_s()
    problem = PlacementProblem(
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
    log, num_gpus = SearchLog(), _num_gpus(question, catalog)
    offers = usable_offers(problem, num_gpus, log)
    raise_if_nothing_fits(problem, offers, log, num_gpus)
    with open_runner(question.processes, on_progress) as runner:
        search = PlanSearch(
            question=question, problem=problem, runner=runner, log=log, num_gpus=num_gpus, on_first=on_first
        )
        clusters, phases, colocated = _simulated(search, offers)
        clusters += simulate_guessing(search, clusters)
        tried = [cluster.goodput for cluster in clusters if cluster.goodput.goodput.value]
        if not tried:
            raise PlanError(why_nothing(problem, offers, log, num_gpus, phases["prefill"], phases["decode"], colocated))
        placements = [cluster.placement for cluster in clusters]
        answered = PlanAnswer(search, placements).plan(tried, phases)
    own_s = used_cpu_s() - began_s if question.processes != 0 else 0.0  # the jobs, done here, have counted it
    return replace(answered, cpu_s=log.cpu_s + own_s)


def _simulated(
    search: PlanSearch, offers: Sequence[Offer]
) -> tuple[list[SimulatedCluster], Phases, list[WorkerGoodput]]:
    """Whole clusters; and of single workers each phase, and colocated ones. A burst that comes to one worker alone is
    shared by several, so that what each is worth among them lies between what it keeps of bursts and of arrivals that
    are spread: the clusters that either promises are simulated."""
    question = search.question
    alone = _screened(search, search.problem, offers)
    placements = _placements(search, alone)
    if search.problem.traffic.is_bursty:
        spread = replace(search.problem, traffic=search.problem.traffic.spread())
        known = {placement.candidate for placement in placements}
        promised = _placements(search, _screened(search, spread, offers))
        placements += [placement for placement in promised if placement.candidate not in known]
    if question.rate:
        clusters = simulate_for_rate(search, placements, question.rate)
    else:
        clusters = simulate_for_gpus(search, placements)
    return clusters, {"prefill": alone.prefills, "decode": alone.decodes}, alone.colocated


@dataclass(frozen=True, slots=True, kw_only=True)
class _Alone:
    """What single workers keep, the best per GPU first."""

    prefills: list[WorkerGoodput]
    decodes: list[WorkerGoodput]
    colocated: list[WorkerGoodput]


def _screened(search: PlanSearch, problem: PlacementProblem, offers: Sequence[Offer]) -> _Alone:
    runner, log = search.runner, search.log
    apart = offers if problem.traffic.source.has_decode else ()  # a decode worker would have nothing to do
    return _Alone(
        prefills=screen_phase(problem, runner, "prefill", apart, log),
        decodes=screen_phase(problem, runner, "decode", apart, log),
        colocated=screen_colocated(problem, runner, offers, log) if search.question.colocated else [],
    )


def _placements(search: PlanSearch, alone: _Alone) -> list[Placement]:
    two_pools = _two_pools(search, alone.prefills, alone.decodes)
    return _promising(search.question, two_pools) + _colocated(search, alone.colocated)


def _num_gpus(question: PlanQuestion, catalog: Catalog) -> int:
    """At most; for a rate, what a single worker may take."""
    price, hardware = catalog.cost.usd_per_gpu_hour, catalog.hardware
    if question.num_gpus is not None:
        return question.num_gpus
    if question.budget_usd_per_hour is None:
        return catalog.gpus_per_node * question.max_pp
    if not price:
        raise PlanError(f"budget needs the price of a {hardware}; give usd_per_gpu_hour in a hardware file")
    count = int(question.budget_usd_per_hour / price + 1e-9)
    if count < 1:
        raise PlanError(
            f"budget is {question.budget_usd_per_hour:g} USD an hour and one {hardware} costs {price:g}; give more"
        )
    return count


# what to simulate as a whole


def _two_pools(
    search: PlanSearch, prefills: Sequence[WorkerGoodput], decodes: Sequence[WorkerGoodput]
) -> list[Placement]:
    algorithm = search.question.algorithm
    high = _high(search, prefills, decodes) if algorithm != "low" else []
    is_one_node = bool(high) and all(placement.within_node for placement in high)
    if algorithm == "high" or (is_one_node and algorithm == "auto"):
        return high
    return high + _low(search, prefills, decodes)


def _high(search: PlanSearch, prefills: Sequence[WorkerGoodput], decodes: Sequence[WorkerGoodput]) -> list[Placement]:
    """Algorithm 1: each phase by itself."""
    if search.question.rate:
        placements = placements_for_rate(search.problem, prefills, decodes, search.question.rate)
        return [p for p in placements if p.candidate.gpus <= 1.4 * placements[0].candidate.gpus][:SIZED_CLUSTERS]
    placements = placements_for_gpus(search.problem, prefills, decodes, search.num_gpus)
    return [p for p in placements if p.promised >= 0.65 * placements[0].promised][:WHOLE_CLUSTERS]


def _low(search: PlanSearch, prefills: Sequence[WorkerGoodput], decodes: Sequence[WorkerGoodput]) -> list[Placement]:
    """Algorithm 2: whole pairs, repeated."""
    pairs = find_pairs(search.problem, search.runner, prefills, decodes, search.num_gpus, search.log)
    placements = []
    for pair, _ in pairs[:2]:
        count = _count(search, pair.promised, pair.candidate.gpus)
        if count:
            pools = tuple(replace(pool, replicas=count) for pool in pair.candidate.pools)
            candidate = replace(pair.candidate, pools=pools)
            promised = count * pair.promised
            placements.append(replace(pair, candidate=candidate, promised=promised, copies=count))
    return placements


def _count(search: PlanSearch, goodput: float, gpus: int) -> int:
    """How many of what has this goodput and takes so many GPUs."""
    rate = search.question.rate
    return replicas_for(rate, goodput) if rate else search.num_gpus // gpus


def _promising(question: PlanQuestion, placements: Sequence[Placement]) -> list[Placement]:
    """Without those that promise far less than the best, or want far more GPUs."""
    if question.rate:
        fewest = min((placement.candidate.gpus for placement in placements), default=0)
        return [placement for placement in placements if placement.candidate.gpus <= 1.5 * fewest]
    most = max((placement.promised for placement in placements), default=0.0)
    return [placement for placement in placements if placement.promised >= 0.65 * most]


def _colocated(search: PlanSearch, workers: Sequence[WorkerGoodput]) -> list[Placement]:
    placements = colocated_placements(
        search.problem, workers, lambda worker: _count(search, worker.goodput.value, worker.gpus)
    )
    if search.question.rate:
        placements.sort(key=lambda placement: placement.candidate.gpus)
    else:
        placements.sort(key=lambda placement: -placement.promised)
    if not any(worker.offer.slowdown for worker in workers):
        return placements[:COLOCATED_CLUSTERS]
    best = {placement.candidate.pools[0].degrees: placement for placement in reversed(placements)}
    return list(best.values())  # what many of one host cost each other shows only together
