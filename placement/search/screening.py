"""Screening finds the goodput of one worker alone: of each degree in one phase, as Algorithm 1 wants it, or colocated.

What cannot win is not simulated: a degree whose bound (placement/goodput/bounds.py) is far below the best found, or
that misses its target with nobody else there. Searches run side by side in rounds of a fixed size, and what is left out
is decided between rounds: the answer does not depend on the number of processes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from placement.build.from_offers import assemble, first_tokens_of, mixed_of, phase_alone
from placement.catalogs.base import Offer, PlanError
from placement.goodput.bounds import (
    decode_batch,
    decode_bound,
    floor_share,
    mean_context,
    prefill_bound,
    relaxed,
)
from placement.goodput.estimate import Effort
from placement.goodput.runner import Runner
from placement.goodput.search import GoodputProblem, find_goodput
from placement.plan import Candidate
from placement.search.infeasible import idle_reason, room_reason
from placement.search.problem import PhaseRole, PlacementProblem, SearchLog, WorkerGoodput
from placement.simulator.systems import LiveSystem

ROUND = 4  # searches between two looks at what can be left out
WORTH = 0.75  # of the best goodput per GPU: what is below is not used
CHUNKS = (128, 256, 512, 1024, 2048)
SCREENING = Effort(first_requests=400, max_requests=1200, half_width=0.03, decides=True, e2e_times=4)


def usable_offers(problem: PlacementProblem, max_gpus: int, log: SearchLog) -> list[Offer]:
    """The offers that can be had; the others' reasons are noted."""
    offers = []
    for degrees in problem.catalog.degrees(max_gpus):
        if degrees.pp > problem.max_pp or degrees.gpus > max_gpus:
            continue
        try:
            offers.append(problem.offer_of(degrees, True))
        except PlanError as error:
            log.refused[str(degrees)] = str(error)
    return offers


def screen_phase(
    problem: PlacementProblem, runner: Runner, role: PhaseRole, offers: Sequence[Offer], log: SearchLog
) -> list[WorkerGoodput]:
    """Each degree's goodput in one phase, the best per GPU first. Those that miss the target when idle, or lack room
    for requests that others hold, are refused."""
    contenders = []
    for offer in offers:
        reason = idle_reason(problem, role, offer) or room_reason(problem, role, offer, offers)
        if reason:
            log.refused[f"{role} {offer.degrees}"] = reason
        else:
            contenders.append(_Contender(offer=offer, search=_phase_search(problem, role, offer)))
    return _best_first(runner, contenders, log, f"{role} workers alone")


def _phase_search(problem: PlacementProblem, role: PhaseRole, offer: Offer) -> GoodputProblem:
    source, targets = problem.traffic.source, problem.targets
    if role == "prefill":
        traffic = replace(problem.traffic, source=first_tokens_of(source))
        targets, top = relaxed(targets, tpot=True), prefill_bound(offer, source)
    else:
        traffic = problem.traffic
        targets, top = relaxed(targets, ttft=True), decode_bound(offer, source, targets.loosest.tpot_s)
    return GoodputProblem(
        system=LiveSystem(phase_alone(role, offer)),
        traffic=traffic,
        targets=targets,
        top=top,
        effort=SCREENING.times(problem.thoroughness),
        precision=0.08,
        seed=problem.seed,
    )


def screen_colocated(
    problem: PlacementProblem, runner: Runner, offers: Sequence[Offer], log: SearchLog
) -> list[WorkerGoodput]:
    """One mixed worker of each degree, with each size of chunks, the best per GPU first."""
    contenders = []
    for offer in offers:
        if floor_share(offer, offer, problem.traffic.source, problem.targets) < 0:
            reason = idle_reason(problem, "prefill", offer) or idle_reason(problem, "decode", offer)
            log.refused[f"colocated {offer.degrees}"] = reason or "not enough requests meet both targets when idle"
            continue
        if reason := room_reason(problem, "decode", offer, offers):
            log.refused[f"colocated {offer.degrees}"] = reason
            continue
        for chunk_tokens in chunk_sizes(problem, offer):
            unit = mixed_of(offer, 1, problem.hardware, chunk_tokens)
            contenders.append(_Contender(offer=offer, search=_colocated_search(problem, offer, unit), unit=unit))
    return _best_first(runner, contenders, log, "colocated workers alone")


def chunk_sizes(problem: PlacementProblem, offer: Offer) -> list[int]:
    """The largest chunk beside which half of the largest batch keeps the TPOT target, and whole steps. With pipeline
    stages, each stage has a share of the batch, and chunks of its own."""
    source = problem.traffic.source
    tpot_s, context = problem.targets.loosest.tpot_s, mean_context(source)
    batch = math.ceil(max(1, decode_batch(offer, source, tpot_s) // 2) / offer.latency.stages)
    context_tokens = math.ceil(batch * context)
    sizes = [size for size in CHUNKS if size < offer.max_batch_tokens] or [offer.max_batch_tokens]
    fitting = [
        size
        for size in sizes
        if offer.latency.mixed_s([(size, 0)], batch, context_tokens) * offer.latency.stages <= tpot_s
    ]
    return sorted({max(fitting, default=sizes[0]), offer.max_batch_tokens})


def _colocated_search(problem: PlacementProblem, offer: Offer, unit: Candidate) -> GoodputProblem:
    source = problem.traffic.source
    most = (prefill_bound(offer, source), decode_bound(offer, source, problem.targets.loosest.tpot_s))
    return GoodputProblem(
        system=assemble(unit, problem.offer_of, within_node=True, slo=problem.targets.loosest),
        traffic=problem.traffic,
        targets=problem.targets,
        top=min(most),
        effort=SCREENING.times(problem.thoroughness),
        precision=0.08,
        seed=problem.seed,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Contender:
    """Something to simulate alone, and what it can be worth at most."""

    offer: Offer
    search: GoodputProblem
    unit: Candidate | None = None

    @property
    def bound_per_gpu(self) -> float:
        return self.search.top / self.offer.degrees.gpus


def _best_first(runner: Runner, contenders: list[_Contender], log: SearchLog, what: str) -> list[WorkerGoodput]:
    """Simulate the contenders that can be worth it, the most promising first."""
    contenders.sort(key=lambda contender: -contender.bound_per_gpu)
    screened: list[WorkerGoodput] = []
    best = 0.0
    while contenders and contenders[0].bound_per_gpu >= WORTH * best:
        now, contenders = contenders[:ROUND], contenders[ROUND:]
        for contender, result in zip(
            now, runner.map(find_goodput, [contender.search for contender in now], what), strict=True
        ):
            log.count(result)
            screened.append(WorkerGoodput(offer=contender.offer, goodput=result.goodput, unit=contender.unit))
            best = max(best, screened[-1].per_gpu)
    return sorted((worker for worker in screened if worker.goodput.value), key=lambda worker: -worker.per_gpu)
