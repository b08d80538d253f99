"""Whole clusters are simulated here: each placement's goodput, those of its neighbours where they may be better, and
those of hybrids of the best two pools and the best colocated placement. Where a request says who may guess tokens
ahead, the best of each kind are simulated so, too.

    a quick look at all -> a first answer -> hybrids, and workers moved between pools as long as that helps
                        -> the best of each kind by a search and longer runs, until those that are best have been

For a number of GPUs a worker is moved to the pool that binds; for a rate each placement is sized until it keeps the SLO
there (placement/search/sizing.py), and hybrids of the best are cut down as far as they keep it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from placement.build.from_offers import guessing_ahead
from placement.catalogs.base import Degrees
from placement.goodput.estimate import Effort, Estimate
from placement.goodput.search import GoodputProblem, Knee, find_goodput
from placement.latency.scaled import factors_of
from placement.plan import Candidate, Goodput, Interval, Kind
from placement.search.hybrids import hybrids_of, shifted, shifts_of
from placement.search.placements import Placement, goodput_problem, with_candidate
from placement.search.problem import PlanSearch
from placement.search.sizing import SizedPlacement, binding_index, binding_pool, size_for_rate, sizing_job, with_more

HYBRIDS_OF = 3  # placements, no two of the same degrees
CLIMBS_FROM = 0.85  # of the best, what may become better than it
MOST_MOVES = 4  # of a worker from one pool to the other
NEAR = 0.95  # of what a quick look has seen: where a search begins, and it ends as far above
HEADROOM = 0.12  # precision of a quick look at it: one rate between that asked for and 1.25 of it
MOST_GROWN = 3  # workers that what was sized for a rate turns out to lack
QUICK = Effort(first_requests=400, max_requests=1200, half_width=0.03, decides=True, e2e_times=4)
JOINT = Effort(first_requests=1500, max_requests=6000, half_width=0.015, decides=True)
SIZING = Effort(first_requests=2000, max_requests=12_000, half_width=0.01, decides=True)
LONG = Effort(first_requests=16_000, max_requests=16_000, half_width=0.01, decides=True)  # fewer seldom decide


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedCluster:
    placement: Placement
    knee: Knee
    goodput: Goodput


Clusters = list[SimulatedCluster]


# for a number of GPUs


def simulate_for_gpus(search: PlanSearch, placements: Sequence[Placement]) -> Clusters:
    """Each one's goodput, the best of each kind by a search."""
    clusters = _looked_at(search, placements, "whole clusters")
    search.tell_first([cluster.goodput for cluster in clusters])
    two_pools = [cluster for cluster in clusters if cluster.placement.candidate.kind == "two pools"]
    clusters += _climbed(search, two_pools, partial(_relieved, search), "neighbours of the best")
    hybrids = _looked_at(search, _hybrids(search, clusters), "hybrids")
    clusters += hybrids + _climbed(search, hybrids, partial(_either_way, search), "hybrids beside the best")
    return _surely(search, clusters, partial(_searched, search))


def _climbed(
    search: PlanSearch, clusters: Clusters, next_to: Callable[[SimulatedCluster], Sequence[Candidate]], what: str
) -> Clusters:
    """What the best of them become when a worker moves from one pool to the other, as long as that is better: of each
    degrees the best, as one whose workers are smaller may yet find a proportion that others cannot have. `next_to`:
    what it may become."""
    found = list(clusters)
    for _ in range(MOST_MOVES if clusters else 0):
        best = _best_of_each_degrees(search, found)
        least = CLIMBS_FROM * search.score(best[0].goodput)[0]
        done = {cluster.placement.candidate for cluster in found}
        moved = {
            candidate: with_candidate(each.placement, candidate)
            for each in best
            if search.score(each.goodput)[0] >= least
            for candidate in next_to(each)
            if candidate not in done
        }
        if not moved:
            break
        found += _looked_at(search, list(moved.values()), what)
    return found[len(clusters) :]


def _best_of_each_degrees(search: PlanSearch, clusters: Clusters) -> Clusters:
    """The best of all first."""
    best: dict[tuple[Degrees, ...], SimulatedCluster] = {}
    for cluster in sorted(clusters, key=lambda cluster: search.score(cluster.goodput), reverse=True):
        best.setdefault(tuple(pool.degrees for pool in cluster.placement.candidate.pools), cluster)
    return list(best.values())


def _relieved(search: PlanSearch, cluster: SimulatedCluster) -> list[Candidate]:
    """Of two pools, with a worker more in that which binds."""
    placement, miss = cluster.placement, cluster.knee.first_miss
    if placement.copies > 1 or miss is None:
        return []
    binding = binding_pool(miss.point, miss.missed_ttft, miss.missed_tpot)
    more = shifted(placement.candidate, 1 if binding == "decode" else 0, search.num_gpus)
    return [] if more is None else [more]


def _either_way(search: PlanSearch, cluster: SimulatedCluster) -> list[Candidate]:
    """Of a hybrid, with a worker more in either pool: mixed workers need others to help them less than pure ones do,
    and the more GPUs there are, the further that goes."""
    return shifts_of(cluster.placement.candidate, search.num_gpus) if cluster.goodput.goodput.value else []


def _hybrids(search: PlanSearch, clusters: Sequence[SimulatedCluster]) -> list[Placement]:
    """Of the best placements; two of them may become the same."""
    if not search.question.colocated:
        return []
    able = [each for each in clusters if each.placement.copies == 1 and each.goodput.goodput.value]
    hybrids: dict[Candidate, Placement] = {}
    for cluster in _best_of_each_degrees(search, able)[:HYBRIDS_OF]:
        for candidate in hybrids_of(cluster.placement.candidate):
            hybrids.setdefault(candidate, with_candidate(cluster.placement, candidate))
    return list(hybrids.values())


# for a rate


def simulate_for_rate(search: PlanSearch, placements: Sequence[Placement], rate: float) -> Clusters:
    """Each one sized until it keeps the SLO at the rate, and how much more it keeps; the best of each kind by longer
    runs."""
    sized = _sized(search, placements, rate, QUICK, "clusters for the rate")
    fewest = min((placement.candidate.gpus for placement in sized), default=0)
    first = {placement: at for placement, at in sized.items() if placement.candidate.gpus == fewest}
    clusters = _headrooms(search, first, rate)
    search.tell_first([cluster.goodput for cluster in clusters])
    clusters += _headrooms(search, {each: at for each, at in sized.items() if each not in first}, rate)
    hybrids = _sized(search, _hybrids(search, clusters), rate, QUICK, "hybrids for the rate", may_grow=False)
    clusters += _headrooms(search, hybrids, rate)
    return _surely(search, clusters, partial(_sized_again, search, rate=rate))


def _sized_again(search: PlanSearch, clusters: Clusters, rate: float) -> Clusters:
    """By longer runs, and larger where the longest miss the rate."""
    sized = _sized(search, [cluster.placement for cluster in clusters], rate, SIZING, "the best for the rate")
    known = {cluster.placement.candidate: cluster for cluster in clusters}
    as_before = [known[placement.candidate] for placement in sized if placement.candidate in known]
    others = {placement: at for placement, at in sized.items() if placement.candidate not in known}
    searched = _searched(search, as_before + _headrooms(search, others, rate))
    found = list(searched)
    for _ in range(MOST_GROWN):
        if not (grown := _grown(searched, found, rate)):
            break
        searched = _searched(search, _headrooms(search, dict.fromkeys(grown), rate))
        found += searched
    return found


def _grown(clusters: Clusters, found: Clusters, rate: float) -> list[Placement]:
    """Each that misses the rate, with one worker more in the pool that binds; none that is there, nor larger than what
    keeps it."""
    most = min([each.goodput.candidate.gpus for each in found if each.goodput.goodput.value >= rate], default=1 << 30)
    grown = {}
    for each in clusters:
        if 0 < each.goodput.goodput.value < rate and (miss := each.knee.first_miss) is not None:
            candidate = each.goodput.candidate
            larger = with_more(each.placement, candidate, binding_index(candidate, miss))
            grown[larger] = with_candidate(each.placement, larger)
    known = {each.goodput.candidate for each in found}
    return [each for candidate, each in grown.items() if candidate not in known and candidate.gpus <= most]


def _sized(
    search: PlanSearch,
    placements: Sequence[Placement],
    rate: float,
    effort: Effort,
    what: str,
    *,
    may_grow: bool = True,
) -> dict[Placement, Estimate]:
    """Those that keep the SLO at the rate, with as many workers as that takes; and how they keep it."""
    effort = effort.times(search.question.thoroughness)
    jobs = [replace(sizing_job(search.problem, each, rate, effort), may_grow=may_grow) for each in placements]
    by_candidate: dict[Candidate, SizedPlacement] = {}
    for sized in search.done(size_for_rate, jobs, what):
        if sized.at_rate.keeps_slo:
            by_candidate.setdefault(sized.placement.candidate, sized)
    return {sized.placement: sized.at_rate for sized in by_candidate.values()}


def _headrooms(search: PlanSearch, at_rate: Mapping[Placement, Estimate | None], rate: float) -> Clusters:
    """By how much each keeps more than the rate, at which it may have been simulated."""
    problems = [
        replace(_quickly(search, each, rate, 1.25 * rate), known=at, precision=HEADROOM) for each, at in at_rate.items()
    ]
    return _clusters(search, list(at_rate), problems, "headroom")


# with guesses ahead


def simulate_guessing(search: PlanSearch, clusters: Sequence[SimulatedCluster]) -> Clusters:
    """The best of each kind again, its workers guessing ahead; for a rate with as many of them, or with fewer."""
    guessing = [
        replace(with_candidate(cluster.placement, candidate), promised=cluster.goodput.goodput.value)
        for cluster in _best_of_each_kind(search, clusters)
        if (candidate := guessing_ahead(cluster.placement.candidate, search.problem.offer_of)) is not None
    ]
    if not guessing:
        return []
    if rate := search.question.rate:
        sized = _sized(search, guessing, rate, SIZING, "guessing ahead, for the rate", may_grow=False)
        return _searched(search, _headrooms(search, sized, rate))
    return _searched(search, _looked_at(search, guessing, "guessing ahead"))


# more surely


def _surely(
    search: PlanSearch, clusters: Sequence[SimulatedCluster], again: Callable[[Clusters], Clusters]
) -> Clusters:
    """The best of each kind simulated again, until those that are best then have been."""
    found = list(clusters)
    while now := [cluster for cluster in _best_of_each_kind(search, found) if cluster.goodput.is_rough]:
        surer = again(now)
        sure = {cluster.placement.candidate for cluster in surer}
        found = [each for each in found if each not in now and each.placement.candidate not in sure] + surer
    return found


def _best_of_each_kind(search: PlanSearch, clusters: Sequence[SimulatedCluster]) -> Clusters:
    """With guesses and without, the best first."""
    best: dict[tuple[Kind, bool], SimulatedCluster] = {}
    for cluster in sorted(clusters, key=lambda cluster: search.score(cluster.goodput), reverse=True):
        candidate = cluster.placement.candidate
        if cluster.goodput.goodput.value:
            best.setdefault((candidate.kind, candidate.num_guesses > 0), cluster)
    return list(best.values())


def _looked_at(search: PlanSearch, placements: Sequence[Placement], what: str) -> Clusters:
    """Each one's goodput by a quick look."""
    problems = [_quickly(search, placement) for placement in placements]
    return _clusters(search, placements, problems, what)


def _quickly(search: PlanSearch, placement: Placement, bottom: float = 0.0, top: float = 0.0) -> GoodputProblem:
    problem = goodput_problem(search.problem, placement, effort=QUICK, precision=0.08)
    return replace(problem, bottom=bottom, top=top or problem.top)


def _searched(search: PlanSearch, clusters: Clusters) -> Clusters:
    """From what a quick look has seen, and verified."""
    rate, longer = search.question.rate or 0.0, LONG.times(search.question.thoroughness)
    problems = []
    for cluster in clusters:
        value = cluster.goodput.goodput.value
        problem = goodput_problem(search.problem, cluster.placement, effort=JOINT, precision=0.03)
        problems.append(replace(problem, bottom=max(rate, NEAR * value), top=value / NEAR, longer=longer))
    placements = [cluster.placement for cluster in clusters]
    return _clusters(search, placements, problems, "the best of each kind", is_rough=False)


def _clusters(
    search: PlanSearch,
    placements: Sequence[Placement],
    problems: Sequence[GoodputProblem],
    what: str,
    *,
    is_rough: bool = True,
) -> Clusters:
    """With what their problems' searches find."""
    knees = search.done(find_goodput, problems, what)
    return [
        SimulatedCluster(placement=placement, knee=knee, goodput=_goodput(search, placement, knee, is_rough))
        for placement, knee in zip(placements, knees, strict=True)
    ]


def _goodput(search: PlanSearch, placement: Placement, knee: Knee, is_rough: bool) -> Goodput:
    candidate = placement.candidate
    cost, error = search.problem.catalog.cost, search.error_of(candidate)
    value, (slower, faster) = knee.goodput, factors_of(error)
    return Goodput(
        candidate=candidate,
        goodput=Interval(value.value, value.low / slower, value.high / faster),
        curve=tuple(estimate.point for estimate in knee.estimates),
        usd_per_hour=candidate.gpus * cost.usd_per_gpu_hour,
        watts=candidate.gpus * cost.watts_per_gpu,
        is_rough=is_rough,
        copies=placement.copies,
    )
