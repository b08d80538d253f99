"""Whole clusters are simulated here: each placement's goodput, those of its neighbours where they may be better, and
those of hybrids of the best two pools and the best colocated placement, of most by a quick look. Where a request says
who may guess tokens ahead, the best of each kind are simulated so, too.

For a number of GPUs a worker is moved from one pool to the other where the best one binds; for a rate each placement is
sized until it keeps the SLO there (placement/search/sizing.py), and hybrids of the best are cut down as far as they
keep it. The best are simulated again by longer runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from placement.build.from_offers import guessing_ahead
from placement.catalogs.base import Degrees
from placement.goodput.estimate import Effort
from placement.goodput.search import GoodputProblem, Knee, find_goodput, verify_goodput
from placement.latency.scaled import factors_of
from placement.plan import Candidate, Goodput, Interval, Kind
from placement.search.placements import Placement, goodput_problem
from placement.search.problem import PlanSearch
from placement.search.sizing import binding_pool, size_for_rate, sizing_job, with_one_more

CHUNKS_BESIDE = (128, 256, 512)  # tokens, of mixed workers that are there for answers first
HYBRIDS_OF = 3  # placements, no two of the same degrees
QUICK = 0.1  # of the requests: a quick look
NEAR = 0.9  # of the best by a quick look: what may be the best
LONG = Effort(first_requests=16_000, max_requests=32_000, half_width=0.01, decides=True)
JOINT = Effort(first_requests=2000, max_requests=12_000, half_width=0.01, decides=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedCluster:
    placement: Placement
    knee: Knee
    goodput: Goodput


def simulate_for_gpus(search: PlanSearch, placements: Sequence[Placement]) -> list[SimulatedCluster]:
    """Each one's goodput; then a worker moved from one pool to the other where that may help the best."""
    clusters = _goodputs(search, placements, "whole clusters")
    done = {placement.candidate for placement in placements}
    for _ in range(2):
        two_pools = [cluster for cluster in clusters if cluster.placement.candidate.kind == "two pools"]
        if not two_pools:
            break
        best = max(two_pools, key=lambda cluster: search.score(cluster.goodput))
        moved = _moved(search, best)
        if moved is None or moved.candidate in done:
            break
        done.add(moved.candidate)
        clusters += _goodputs(search, [moved], "neighbours of the best")
    hybrids = _hybrids(search, clusters)
    searches = [goodput_problem(search.problem, placement, effort=JOINT) for placement in hybrids]
    return clusters + _best_of(search, hybrids, searches, "hybrids")


def _hybrids(search: PlanSearch, clusters: Sequence[SimulatedCluster]) -> list[Placement]:
    """Of the best placements: of two pools those in which one or both do both, of colocated ones that in which some
    only read prompts."""
    if not (search.question.colocated and search.tries_hybrids):
        return []
    best: dict[tuple[Degrees, ...], Placement] = {}
    for cluster in sorted(clusters, key=lambda cluster: search.score(cluster.goodput), reverse=True):
        placement = cluster.placement
        if placement.copies == 1 and cluster.goodput.goodput.value:
            best.setdefault(tuple(pool.degrees for pool in placement.candidate.pools), placement)
    return [
        replace(placement, candidate=candidate)
        for placement in list(best.values())[:HYBRIDS_OF]
        for candidate in hybrids_of(placement.candidate)
    ]


def hybrids_of(candidate: Candidate) -> list[Candidate]:
    """Prompts are read in whole steps, and beside answers in chunks that keep a step short."""
    if candidate.kind == "one pool":
        (pool,) = candidate.pools
        readers = max(1, pool.replicas // 4)
        if pool.replicas < 2 or pool.role != "mixed":
            return []
        reading = replace(pool, role="prefill", replicas=readers, chunk_tokens=0)
        return [replace(candidate, pools=(reading, replace(pool, replicas=pool.replicas - readers)))]
    prefill, decode = candidate.pools
    whole = prefill.max_batch_tokens
    both = replace(prefill, role="mixed", chunk_tokens=whole)
    sizes = [size for size in CHUNKS_BESIDE if size < whole]
    writers = [replace(decode, role="mixed", chunk_tokens=size, pack_tokens=prefill.pack_tokens) for size in sizes]
    pairs = [(both, writer) for writer in writers] + [(prefill, writer) for writer in writers[-1:]]
    return [replace(candidate, pools=pair) for pair in pairs]


def simulate_for_rate(search: PlanSearch, placements: Sequence[Placement], rate: float) -> list[SimulatedCluster]:
    """Each one sized until it keeps the SLO at the rate, then its goodput; then hybrids of the best, of no use unless
    they do with as many workers or fewer."""
    sized = _sized(search, placements, rate, "clusters for the rate")
    clusters = _best_of(search, sized, _headrooms(search, sized, rate), "headroom")
    hybrids = _sized(search, _hybrids(search, clusters), rate, "hybrids for the rate", may_grow=False)
    fewest = min((placement.candidate.gpus for placement in [*sized, *hybrids]), default=0)
    hybrids = [placement for placement in hybrids if placement.candidate.gpus == fewest]
    return clusters + _best_of(search, hybrids, _headrooms(search, hybrids, rate), "headroom")


def simulate_guessing(search: PlanSearch, clusters: Sequence[SimulatedCluster]) -> list[SimulatedCluster]:
    """The best of each kind again, its workers guessing ahead; for a rate with as many of them, or with fewer."""
    best = _best_of_each_kind(search, clusters).values()
    guessing = [
        replace(cluster.placement, candidate=candidate, promised=cluster.goodput.goodput.value)
        for cluster in best
        if (candidate := guessing_ahead(cluster.placement.candidate, search.problem.offer_of)) is not None
    ]
    if not guessing:
        return []
    if rate := search.question.rate:
        guessing = _sized(search, guessing, rate, "guessing ahead, for the rate", may_grow=False)
        searches = _headrooms(search, guessing, rate)
    else:
        searches = [goodput_problem(search.problem, placement, effort=JOINT) for placement in guessing]
    return _best_of(search, guessing, searches, "guessing ahead")


def _headrooms(search: PlanSearch, placements: Sequence[Placement], rate: float) -> list[GoodputProblem]:
    """What is searched for each: by how much it keeps more than the rate."""
    searches = [goodput_problem(search.problem, placement, effort=JOINT, precision=0.03) for placement in placements]
    return [replace(each, bottom=rate, top=1.25 * rate) for each in searches]


def _best_of(
    search: PlanSearch, placements: Sequence[Placement], searches: Sequence[GoodputProblem], what: str
) -> list[SimulatedCluster]:
    """Each one's goodput: by a quick look, and searched where that sees it near the best."""
    quick = [replace(each, effort=each.effort.times(QUICK)) for each in searches]
    clusters = _clusters(search, placements, search.done(find_goodput, quick, f"{what}, a quick look"))
    near = _near_the_best(search, clusters)
    again = []
    for at in near:
        value = clusters[at].goodput.goodput.value
        again.append(replace(searches[at], bottom=max(searches[at].bottom, NEAR * value), top=value / NEAR))
    found = _clusters(search, [placements[at] for at in near], search.done(find_goodput, again, what))
    return found + [cluster for at, cluster in enumerate(clusters) if at not in near]


def _near_the_best(search: PlanSearch, clusters: Sequence[SimulatedCluster]) -> list[int]:
    """Which of them may be the best: for a rate none with more than the fewest GPUs."""
    gpus = [cluster.goodput.candidate.gpus for cluster in clusters if cluster.goodput.goodput.value]
    most = min(gpus, default=0) if search.question.rate else max(gpus, default=0)
    worths = [search.worth(each.goodput) if each.goodput.candidate.gpus <= most else 0.0 for each in clusters]
    return [at for at, worth in enumerate(worths) if worth >= NEAR * max(worths) > 0]


def _sized(
    search: PlanSearch, placements: Sequence[Placement], rate: float, what: str, *, may_grow: bool = True
) -> list[Placement]:
    """Those that keep the SLO at the rate, with as many workers as that takes."""
    effort = JOINT.times(search.question.thoroughness)
    jobs = [replace(sizing_job(search.problem, each, rate, effort), may_grow=may_grow) for each in placements]
    by_candidate: dict[Candidate, Placement] = {}
    for sized in search.done(size_for_rate, jobs, what):
        if sized.keeps_slo:
            by_candidate.setdefault(sized.placement.candidate, sized.placement)
    return list(by_candidate.values())


def verify_best(search: PlanSearch, clusters: Sequence[SimulatedCluster]) -> list[SimulatedCluster]:
    """The best of each kind by longer runs, until those that are best are verified."""
    clusters = list(clusters)
    done: set[Candidate] = set()
    while True:
        best = _best_of_each_kind(search, clusters)
        now = [cluster for cluster in best.values() if cluster.placement.candidate not in done]
        if not now:
            return clusters
        placements = [cluster.placement for cluster in now]
        searches = [
            replace(goodput_problem(search.problem, cluster.placement, effort=LONG), earlier=cluster.knee.estimates)
            for cluster in now
        ]
        knees = search.done(verify_goodput, searches, "the best again, longer")
        done |= {placement.candidate for placement in placements}
        others = [cluster for cluster in clusters if cluster not in now]
        clusters = others + _clusters(search, placements, knees)


def _best_of_each_kind(
    search: PlanSearch, clusters: Sequence[SimulatedCluster]
) -> dict[tuple[Kind, bool], SimulatedCluster]:
    """With guesses and without, the best first."""
    best: dict[tuple[Kind, bool], SimulatedCluster] = {}
    for cluster in sorted(clusters, key=lambda cluster: search.score(cluster.goodput), reverse=True):
        candidate = cluster.placement.candidate
        if cluster.goodput.goodput.value:
            best.setdefault((candidate.kind, candidate.num_guesses > 0), cluster)
    return best


def _goodputs(search: PlanSearch, placements: Sequence[Placement], what: str) -> list[SimulatedCluster]:
    searches = [goodput_problem(search.problem, placement, effort=JOINT) for placement in placements]
    return _clusters(search, placements, search.done(find_goodput, searches, what))


def _clusters(search: PlanSearch, placements: Sequence[Placement], knees: Sequence[Knee]) -> list[SimulatedCluster]:
    return [
        SimulatedCluster(placement=placement, knee=knee, goodput=_goodput(search, placement.candidate, knee))
        for placement, knee in zip(placements, knees, strict=True)
    ]


def _goodput(search: PlanSearch, candidate: Candidate, knee: Knee) -> Goodput:
    cost, error = search.problem.catalog.cost, search.error_of(candidate)
    value, (slower, faster) = knee.goodput, factors_of(error)
    return Goodput(
        candidate=candidate,
        goodput=Interval(value.value, value.low / slower, value.high / faster),
        curve=tuple(estimate.point for estimate in knee.estimates),
        usd_per_hour=candidate.gpus * cost.usd_per_gpu_hour,
        watts=candidate.gpus * cost.watts_per_gpu,
    )


def _moved(search: PlanSearch, cluster: SimulatedCluster) -> Placement | None:
    """One worker more where it binds, one or more less in the other pool, within the GPUs there are."""
    placement, miss = cluster.placement, cluster.knee.first_miss
    if placement.candidate.is_colocated or placement.copies > 1 or miss is None:
        return None
    binding = binding_pool(miss.point, miss.missed_ttft, miss.missed_tpot)
    more = with_one_more(placement.candidate, "decode" if binding == "decode" else "prefill")
    other = 0 if binding == "decode" else 1
    while more.gpus > search.num_gpus:
        pool = more.pools[other]
        if pool.replicas < 2:
            return None
        pools = list(more.pools)
        pools[other] = replace(pool, replicas=pool.replicas - 1)
        more = replace(more, pools=tuple(pools))
    return replace(placement, candidate=more)
