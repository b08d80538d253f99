"""assemble makes what can be simulated out of what can be bought: a candidate's pools, as the live cluster would run
them.

It also makes each phase alone, as DistServe's first algorithm wants them: prefill whose requests end with their first
token, and decode behind a prefill that takes no time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from cluster.router.options import RouterOptions
from decode_worker.options import DecodeOptions
from mixed_worker.options import MixedOptions
from placement.build.from_profile import hosts_of
from placement.build.worker import RolePolicy, WorkerModel, sim_worker
from placement.catalogs.base import Catalog, Degrees, Offer, PlanError
from placement.latency.base import DecodeLine
from placement.latency.roofline import narrowed
from placement.plan import Candidate, PoolPlan, PoolRole, Slo
from placement.simulator.cluster import SimCluster, SimWorker
from placement.simulator.systems import LiveSystem, System
from placement.workload.requests import Workload
from prefill_worker.options import PrefillOptions
from worker.options import report_gap_s

PLENTY = 1 << 40
SIZED_FOR_BURSTS = RouterOptions(max_queued_requests=1 << 30, max_queued_tokens=PLENTY, max_backlog_tokens=PLENTY)
OfferOf = Callable[[Degrees, bool], Offer]  # degrees, within_node


@dataclass(frozen=True, slots=True, kw_only=True)
class NoTime:
    """A worker that computes and sends in no time, to leave the other phase alone."""

    source: str = "no time at all"
    stages: int = 1

    def prefill_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        return 1e-9

    def decode_line(self, batch_size: int, context_tokens: int) -> DecodeLine:
        return DecodeLine(1e-9, 0.0)

    def mixed_s(self, chunks: Sequence[tuple[int, int]], batch_size: int, context_tokens: int) -> float:
        return 1e-9

    def transfer_s(self, num_tokens: int) -> float:
        return 0.0


def offers_of(catalog: Catalog) -> OfferOf:
    """The catalogue's offers, each asked for once. Raises PlanError with the reason where there is none."""
    known: dict[tuple[Degrees, bool], Offer | str] = {}

    def offer_of(degrees: Degrees, within_node: bool) -> Offer:
        key = (degrees, within_node)
        if key not in known:
            known[key] = catalog.offer(degrees, within_node=within_node)
        offer = known[key]
        if isinstance(offer, str):
            raise PlanError(offer)
        return offer

    return offer_of


def pool_of(role: PoolRole, offer: Offer, replicas: int, hardware: str, chunk_tokens: int = 0) -> PoolPlan:
    return PoolPlan(
        role=role,
        degrees=offer.degrees,
        replicas=replicas,
        hardware=hardware,
        num_pages=offer.num_pages,
        page_size=offer.page_size,
        max_batch_tokens=offer.max_batch_tokens,
        max_batch_size=offer.max_batch_size,
        pack_tokens=offer.pack_tokens if role != "decode" else None,
        chunk_tokens=chunk_tokens,
    )


def pair_of(prefill: tuple[Offer, int], decode: tuple[Offer, int], hardware: str) -> Candidate:
    return Candidate(pools=(pool_of("prefill", *prefill, hardware), pool_of("decode", *decode, hardware)))


def mixed_of(offer: Offer, replicas: int, hardware: str, chunk_tokens: int) -> Candidate:
    return Candidate(pools=(pool_of("mixed", offer, replicas, hardware, chunk_tokens),))


def guessing_ahead(candidate: Candidate, offer_of: OfferOf) -> Candidate | None:
    """The same, all workers that decode guessing tokens ahead; None where one has no room for who guesses, or is in
    stages, which serve none."""
    pools = []
    for pool in candidate.pools:
        offer = offer_of(pool.degrees, True)
        if pool.role != "prefill":
            if offer.speculation is None or pool.degrees.pp > 1:
                return None
            num_tokens, num_pages = offer.speculation.num_tokens, offer.speculative_pages
            pool = replace(pool, num_speculative_tokens=num_tokens, num_pages=num_pages)
        pools.append(pool)
    return replace(candidate, pools=tuple(pools))


def targets_told(candidate: Candidate, slo: Slo | None) -> dict[str, Any]:
    """The router's options by which it places requests: set where there are workers of both phases."""
    if slo is None or candidate.kind == "two pools":
        return {}
    wanted_ms = {"slo_ttft_ms": 1e3 * slo.ttft_s, "slo_tpot_ms": 1e3 * slo.tpot_s}
    return {key: ms for key, ms in wanted_ms.items() if ms < math.inf}


def assemble(candidate: Candidate, offer_of: OfferOf, *, within_node: bool, slo: Slo | None = None) -> System:
    """The candidate as it would run. `within_node`: KV leaves over the fast link only. `slo`: what a request wants
    that does not say; None: nothing."""
    workers: list[SimWorker] = []
    offers = [offer_of(pool.degrees, within_node) for pool in candidate.pools]
    takers = [offer.latency for offer, pool in zip(offers, candidate.pools, strict=True) if pool.role != "prefill"]
    for offer, pool in zip(offers, candidate.pools, strict=True):
        if pool.role != "decode":
            offer = replace(offer, latency=narrowed(offer.latency, takers))
        first = sum(worker.role == pool.role for worker in workers)
        names = [f"{pool.role}-{first + i}" for i in range(pool.replicas)]
        speculation = offer.speculation if pool.num_speculative_tokens else None
        if speculation is not None:
            offer = replace(offer, num_pages=pool.num_pages)
        workers += [sim_worker(name, pool.role, offer, _policy(pool), speculation=speculation) for name in names]
    hosts = hosts_of(offers[0].slowdown, workers) if offers[0].slowdown else ()
    cluster = SimCluster(
        workers=tuple(workers),
        router=RouterOptions(**targets_told(candidate, slo)),
        message_s=max(offer.message_s for offer in offers),
        report_gap_s=report_gap_s(len(workers)),
        handoff_s=max(offer.handoff_s for offer in offers),
        max_len=offers[0].max_len,
        hosts=hosts,
    )
    return LiveSystem(cluster)


def _policy(pool: PoolPlan) -> RolePolicy:
    if pool.role == "prefill":
        return PrefillOptions(max_batch_tokens=pool.max_batch_tokens, pack_tokens=pool.pack_tokens)
    if pool.role == "decode":
        return DecodeOptions(max_batch_size=pool.max_batch_size, num_speculative_tokens=pool.num_speculative_tokens)
    return MixedOptions(
        max_batch_tokens=pool.max_batch_tokens,
        pack_tokens=pool.pack_tokens,
        max_batch_size=pool.max_batch_size,
        chunk_tokens=pool.chunk_tokens,
        num_speculative_tokens=pool.num_speculative_tokens,
    )


def phase_alone(role: Literal["prefill", "decode"], offer: Offer) -> SimCluster:
    """One worker of a phase, the other phase taking no time and having room for all."""
    other = "decode" if role == "prefill" else "prefill"
    nothing = WorkerModel(latency=NoTime(), num_pages=1 << 30, page_size=offer.page_size)
    policies: dict[str, RolePolicy] = {
        "prefill": PrefillOptions(max_batch_tokens=1 << 30, max_prefill_requests=1 << 20, pack_tokens=None),
        "decode": DecodeOptions(max_batch_size=1 << 20),
    }
    worker = sim_worker(role, role, offer, _policy(pool_of(role, offer, 1, "")))
    beside = sim_worker(other, other, nothing, policies[other], prefix_cache=False)  # its pages are a number only
    return SimCluster(workers=(worker, beside), router=SIZED_FOR_BURSTS, max_len=offer.max_len)


def first_tokens_of(workload: Workload) -> Workload:
    """The same requests, ended by their first token."""
    return replace(workload, output_len=workload.output_len * 0 + 1)
