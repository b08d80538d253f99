"""sizing finds how big a cluster a rate needs: simulate the whole, and give one more worker to the pool that binds till
the SLO is kept; then see whether the other pool can do with less. It says which pool that is, from where requests were
late.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from placement.catalogs.base import Degrees, Offer
from placement.goodput.estimate import Effort, Estimate, estimate
from placement.goodput.targets import Targets
from placement.plan import Candidate, Pool, RatePoint
from placement.search.placements import Placement, system_of, with_candidate
from placement.search.problem import PlacementProblem
from placement.simulator.systems import System
from placement.workload.traffic import Traffic

MOST_ADDED = 12  # times
AT_ONCE = 16  # of so many workers of a pool one is added, or taken away, in one go; one at a time in the end
FULL = 0.9  # of the decode pages held: prompts wait for them


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateJob:
    system: System
    traffic: Traffic
    rate: float
    targets: Targets
    effort: Effort
    seed: int
    error: float = 0.0
    copies: float = 1.0


def estimate_job(job: EstimateJob) -> Estimate:
    return estimate(
        job.system,
        job.traffic,
        job.rate,
        job.targets,
        effort=job.effort,
        seed=job.seed,
        error=job.error,
        copies=job.copies,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingJob:
    """`offers`: by degrees of its pools, and by whether KV stays within a node. `may_grow`: more workers than it has
    are tried, too."""

    placement: Placement
    offers: Mapping[tuple[Degrees, bool], Offer]
    rate: float
    traffic: Traffic
    targets: Targets
    effort: Effort
    seed: int
    cell: int
    may_grow: bool = True


def sizing_job(problem: PlacementProblem, placement: Placement, rate: float, effort: Effort) -> SizingJob:
    kinds = [(pool.degrees, is_near) for pool in placement.candidate.pools for is_near in (True, False)]
    return SizingJob(
        placement=placement,
        offers={kind: problem.offer_of(*kind) for kind in kinds},
        rate=rate,
        traffic=problem.traffic,
        targets=problem.targets,
        effort=effort,
        seed=problem.seed,
        cell=problem.cell,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedPlacement:
    placement: Placement
    at_rate: Estimate
    num_simulated: int
    cpu_s: float


def binding_pool(point: RatePoint, missed_ttft: float, missed_tpot: float) -> Pool:
    """Which pool makes requests late. A first token is late for prefill's sake, unless decode has no pages for it or
    the link is full."""
    busy = point.busy
    if busy.get("link", 0.0) > FULL:
        return "link"
    if missed_tpot >= missed_ttft:
        return "decode"
    is_waiting_for_pages = point.phases_s.get("handoff", 0.0) > point.phases_s.get("prefill", 0.0)
    if busy.get("decode_kv", 0.0) > FULL or (is_waiting_for_pages and busy.get("prefill", 1.0) < FULL):
        return "decode"
    return "prefill"


def size_for_rate(job: SizingJob) -> SizedPlacement:
    def offer_of(degrees: Degrees, within_node: bool) -> Offer:
        return job.offers[degrees, within_node]

    log = [0, 0.0]
    looked_at: dict[Candidate, Estimate] = {}

    def look(candidate: Candidate) -> Estimate:
        if candidate in looked_at:
            return looked_at[candidate]
        placement = with_candidate(job.placement, candidate)
        system, copies = system_of(placement, offer_of, job.targets.loosest, job.cell)
        estimated = estimate(
            system,
            job.traffic,
            job.rate,
            job.targets,
            effort=job.effort,
            seed=job.seed,
            copies=copies,
        )
        log[0] += estimated.num_simulated
        log[1] += estimated.cpu_s
        looked_at[candidate] = estimated
        return estimated

    candidate = job.placement.candidate
    estimated = look(candidate)
    for _ in range(MOST_ADDED if job.may_grow else 0):
        if estimated.keeps_slo:
            break
        index = binding_index(candidate, estimated)
        candidate = with_more(job.placement, candidate, index, _at_once(candidate, index))
        estimated = look(candidate)
    if estimated.keeps_slo:
        candidate = _trimmed(job.placement, candidate, look)
    placement = replace(with_candidate(job.placement, candidate), promised=job.rate)
    at_rate = looked_at[candidate]
    return SizedPlacement(placement=placement, at_rate=at_rate, num_simulated=int(log[0]), cpu_s=log[1])


def binding_index(candidate: Candidate, now: Estimate) -> int:
    """Of its pools, the number of the one that binds."""
    if len(candidate.pools) == 1:
        return 0
    return 1 if binding_pool(now.point, now.missed_ttft, now.missed_tpot) == "decode" else 0


def _at_once(candidate: Candidate, index: int) -> int:
    """So many workers of that pool are added, or taken away, in one go."""
    return max(1, candidate.pools[index].replicas // AT_ONCE)


def few_more(candidate: Candidate, index: int) -> int:
    """So many workers more of that pool that a difference can be told: one, of a pool that is not large."""
    return max(1, 2 * candidate.pools[index].replicas // AT_ONCE)


def with_more(placement: Placement, candidate: Candidate, index: int, count: int = 1) -> Candidate:
    """So many workers more in that pool; so many whole pairs, where those are repeated."""
    pools = (
        replace(p, replicas=p.replicas + count) if i == index or placement.copies > 1 else p
        for i, p in enumerate(candidate.pools)
    )
    return replace(candidate, pools=tuple(pools))


def _trimmed(placement: Placement, candidate: Candidate, look: Callable[[Candidate], Estimate]) -> Candidate:
    """Less of any pool, many workers at a time and then fewer, as long as the SLO is kept."""
    for index in range(len(candidate.pools)):
        count = _at_once(candidate, index)
        while count:
            less = with_more(placement, candidate, index, -count)
            if any(p.replicas < 1 for p in less.pools) or not look(less).keeps_slo:
                count //= 2
            else:
                candidate = less
    return candidate
