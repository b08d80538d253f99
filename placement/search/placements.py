"""Placements says which whole clusters are worth simulating, from what their workers are worth alone.

Algorithm 1 (high node-affinity: KV may leave over any link) takes each phase's goodput apart; the replicas of each
follow from a rate or from a number of GPUs by division. Algorithm 2 (low: KV stays within a node) searches pairs of a
prefill and a decode worker whose stages stand side by side in the nodes; whole pairs are repeated. Colocation stands
beside.

What is found of phases apart is only a promise: two phases that each keep the SLO for 90% of requests need not keep it
together, and workers share a router. So whoever asks simulates the whole cluster (placement/search/planner.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from placement.build.from_offers import OfferOf, assemble, pair_of
from placement.catalogs.base import Degrees
from placement.goodput.bounds import link_bound
from placement.goodput.estimate import Effort
from placement.goodput.runner import Runner
from placement.goodput.search import GoodputProblem, Knee, find_goodput
from placement.latency.roofline import narrowed
from placement.plan import Candidate, Slo
from placement.search.problem import PlacementProblem, SearchLog, WorkerGoodput
from placement.search.screening import ROUND, SCREENING
from placement.simulator.systems import System

MOST_UNLIKE = 1.05  # times as many workers as another pool may one lack in a cell


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A whole cluster to simulate. `promised`: requests/s, from its workers alone. `copies`: so many clusters of one
    pair each, among which requests go by chance, as Algorithm 2 has it. `is_paired`: a pair's stages stand side by side
    in the nodes."""

    candidate: Candidate
    promised: float
    gpus_per_node: int
    copies: int = 1
    is_paired: bool = False

    @property
    def within_node(self) -> bool:
        """KV leaves over the fast link only."""
        return self.is_paired or self.candidate.gpus <= self.gpus_per_node


def with_candidate(placement: Placement, candidate: Candidate) -> Placement:
    """The same kind of placement of another candidate."""
    copies = candidate.pools[0].replicas if placement.copies > 1 else 1
    is_paired = placement.is_paired and all(pool.replicas == copies for pool in candidate.pools)
    return replace(placement, candidate=candidate, copies=copies, is_paired=is_paired)


def system_of(placement: Placement, offer_of: OfferOf, slo: Slo, cell: int) -> tuple[System, float]:
    """What is simulated of it, with all that so many workers or more can stand for; and how many of that it is."""
    one, copies = placement.candidate.one_of(placement.copies), float(placement.copies)
    if placement.copies == 1:
        one, copies = cell_of(one, cell)
    return assemble(one, offer_of, within_node=placement.within_node, slo=slo), copies


def cell_of(candidate: Candidate, least: int) -> tuple[Candidate, float]:
    """At least so many of its workers, and less than twice as many, that stand for all of a larger cluster: its pools
    in nearly the same proportion, or all there are. And how many of that it is: a number for which no worker of the
    cell has less to do than one of the whole. What is found of a cell is not too good, either, as fewer workers share a
    queue."""
    counts = [pool.replicas for pool in candidate.pools]
    found, unlike = (candidate, 1.0), MOST_UNLIKE
    for size in range(least, min(2 * least, sum(counts) // 2 + 1)):
        cell = [max(1, round(count * size / sum(counts))) for count in counts]
        times = [count / each for count, each in zip(counts, cell, strict=True)]
        if (ratio := max(times) / min(times)) < unlike:
            pools = tuple(replace(pool, replicas=each) for pool, each in zip(candidate.pools, cell, strict=True))
            found, unlike = (replace(candidate, pools=pools), min(times)), ratio
    return found


def goodput_problem(
    problem: PlacementProblem, placement: Placement, *, effort: Effort, precision: float = 0.02, factor: float = 1.0
) -> GoodputProblem:
    """The goodput of a whole cluster."""
    system, copies = system_of(placement, problem.offer_of, problem.targets.loosest, problem.cell)
    return GoodputProblem(
        system=system,
        traffic=problem.traffic,
        targets=problem.targets,
        copies=copies,
        top=1.1 * placement.promised,
        effort=effort.times(problem.thoroughness),
        precision=precision,
        seed=problem.seed,
        factor=factor,
    )


def replicas_for(rate: float, goodput: float) -> int:
    """n = ceil(R / goodput), as both algorithms have it."""
    return max(1, math.ceil(rate / goodput - 1e-9))


def placements_for_gpus(
    problem: PlacementProblem, prefills: Sequence[WorkerGoodput], decodes: Sequence[WorkerGoodput], num_gpus: int
) -> list[Placement]:
    """Of each pair of degrees the best split of the GPUs, most promised first; fewest GPUs where they promise alike."""
    placements = []
    is_wide = num_gpus > problem.catalog.gpus_per_node
    for prefill in prefills:
        for decode in decodes:
            rate_p, rate_d = _linked(problem, prefill, decode) if is_wide else _unlinked(prefill, decode)
            options = [
                (min(n * rate_p, m * rate_d), -(n * prefill.gpus + m * decode.gpus), n, m)
                for n in range(1, num_gpus // prefill.gpus + 1)
                for m in {(num_gpus - n * prefill.gpus) // decode.gpus}
                if m >= 1
            ]
            if options:
                promised, _, n, m = max(options)
                n, m = replicas_for(promised, rate_p), replicas_for(promised, rate_d)
                placements.append(_pair_placement(problem, (prefill, n), (decode, m), promised))
    return sorted(placements, key=lambda placement: (-placement.promised, placement.candidate.gpus))


def placements_for_rate(
    problem: PlacementProblem, prefills: Sequence[WorkerGoodput], decodes: Sequence[WorkerGoodput], rate: float
) -> list[Placement]:
    """Of each pair of degrees the replicas that the rate asks for, fewest GPUs first."""
    placements = []
    for prefill in prefills:
        for decode in decodes:
            for rates in (_unlinked(prefill, decode), _linked(problem, prefill, decode)):
                n, m = (replicas_for(rate, worth) for worth in rates)
                placement = _pair_placement(problem, (prefill, n), (decode, m), rate)
                if placement.within_node:
                    break
            placements.append(placement)
    return sorted(placements, key=lambda placement: placement.candidate.gpus)


def _unlinked(prefill: WorkerGoodput, decode: WorkerGoodput) -> tuple[float, float]:
    return prefill.goodput.value, decode.goodput.value


def _linked(problem: PlacementProblem, prefill: WorkerGoodput, decode: WorkerGoodput) -> tuple[float, float]:
    """What a worker of each can be worth where KV leaves its node."""
    near, far = (problem.offer_of(worker.offer.degrees, False) for worker in (prefill, decode))
    link = link_bound(replace(near, latency=narrowed(near.latency, [far.latency])), problem.traffic.source)
    return min(link, prefill.goodput.value), min(link, decode.goodput.value)


def _pair_placement(
    problem: PlacementProblem, prefill: tuple[WorkerGoodput, int], decode: tuple[WorkerGoodput, int], promised: float
) -> Placement:
    candidate = pair_of((prefill[0].offer, prefill[1]), (decode[0].offer, decode[1]), problem.hardware)
    return Placement(candidate=candidate, promised=promised, gpus_per_node=problem.catalog.gpus_per_node)


def colocated_placements(
    problem: PlacementProblem, alone: Sequence[WorkerGoodput], count_of: Callable[[WorkerGoodput], int]
) -> list[Placement]:
    """Whole colocated clusters; `count_of` says how many workers of each."""
    placements = []
    for worker in alone:
        count = count_of(worker)
        if count and worker.unit is not None:
            pool = replace(worker.unit.pools[0], replicas=count)
            candidate = replace(worker.unit, pools=(pool,))
            promised, gpus_per_node = count * worker.goodput.value, problem.catalog.gpus_per_node
            placements.append(Placement(candidate=candidate, promised=promised, gpus_per_node=gpus_per_node))
    return placements


def find_pairs(
    problem: PlacementProblem,
    runner: Runner,
    prefills: Sequence[WorkerGoodput],
    decodes: Sequence[WorkerGoodput],
    max_gpus: int,
    log: SearchLog,
) -> list[tuple[Placement, Knee]]:
    """Algorithm 2: one prefill and one decode worker whose stages stand in the same nodes, the best per GPU first.

    Stages are spread over as many nodes in both, so that each hands its KV over within its node: a node holds
    1 / nodes of both workers. `promised` is the goodput of the pair.
    """
    placements = [
        placement
        for prefill in prefills
        for decode in decodes
        if any(
            _share_a_node(problem, prefill.offer.degrees, decode.offer.degrees, nodes)
            for nodes in range(1, prefill.offer.degrees.pp + 1)
        )
        for placement in [
            _pair_placement(problem, (prefill, 1), (decode, 1), min(prefill.goodput.value, decode.goodput.value))
        ]
        if placement.candidate.gpus <= max_gpus
    ]
    placements.sort(key=lambda placement: -placement.promised / placement.candidate.gpus)
    pairs: list[tuple[Placement, Knee]] = []
    best = 0.0
    while placements and placements[0].promised / placements[0].candidate.gpus >= max(best, 1e-12):
        now, placements = placements[:ROUND], placements[ROUND:]
        searches = [
            goodput_problem(problem, replace(placement, is_paired=True), effort=SCREENING, precision=0.04)
            for placement in now
        ]
        for placement, result in zip(now, runner.map(find_goodput, searches, "pairs within nodes"), strict=True):
            log.count(result)
            kept = replace(placement, promised=result.goodput.value, is_paired=True)
            pairs.append((kept, result))
            best = max(best, result.goodput.value / placement.candidate.gpus)
    pairs = [(placement, result) for placement, result in pairs if placement.promised]
    return sorted(pairs, key=lambda pair: -pair[0].promised / pair[0].candidate.gpus)


def _share_a_node(problem: PlacementProblem, prefill: Degrees, decode: Degrees, nodes: int) -> bool:
    if prefill.pp % nodes or decode.pp % nodes:
        return False
    return (prefill.gpus + decode.gpus) // nodes <= problem.catalog.gpus_per_node
