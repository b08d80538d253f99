"""measured makes of a profile what is simulated: the cluster that was measured, or one with more or fewer workers.

Values only; it measures and simulates nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from cluster.router.policy import PolicyOptions
from decode_worker.policy import DecodeLimits
from placement.latency.profile import PoolFacts, Profile, ProfileError, ProfileLatency
from placement.simulator.cluster import SharedHost, SimCluster, SimWorker
from prefill_worker.policy import PrefillLimits

REPORT_GAP_S = 0.05  # worker/router_streams.py: how often a worker that changes reports, at most
T = TypeVar("T")


def sim_cluster(profile: Profile, num_prefill: int | None = None, num_decode: int | None = None) -> SimCluster:
    """As many workers as were measured unless told otherwise. Raises ProfileError."""
    latency = ProfileLatency(profile)
    prefill, decode = profile.prefill_pool, profile.decode_pool

    def worker(name: str, facts: PoolFacts, **limits: Any) -> SimWorker:
        return SimWorker(
            name=name,
            role="prefill" if "prefill" in limits else "decode",
            latency=latency,
            num_pages=facts.num_pages,
            page_size=profile.page_size,
            prefix_cache=bool(facts.options.get("prefix_cache", True)),
            **limits,
        )

    prefill_limits = _made(PrefillLimits, prefill.options, "prefill_pool", max_requests="max_prefill_requests")
    decode_limits = _made(DecodeLimits, decode.options, "decode_pool")
    workers = (
        *(worker(f"prefill-{i}", prefill, prefill=prefill_limits) for i in range(num_prefill or prefill.count)),
        *(worker(f"decode-{i}", decode, decode=decode_limits) for i in range(num_decode or decode.count)),
    )
    return SimCluster(
        workers=workers,
        router=_made(PolicyOptions, profile.router, "router"),
        message_s=profile.message_s,
        report_gap_s=REPORT_GAP_S,
        handoff_s=profile.handoff_s,
        hosts=shared_hosts(profile, workers),
    )


def shared_hosts(profile: Profile, workers: Iterable[SimWorker]) -> tuple[SharedHost, ...]:
    """Where the profile was measured on one host: hosts with as many workers of each role as were measured there, the
    last ones with what is left. Else none."""
    rows = tuple((point.batch_size, point.prefill, point.decode) for point in profile.slowdown)
    return hosts_of(rows, workers, (profile.prefill_pool.count, profile.decode_pool.count)) if rows else ()


def hosts_of(
    rows: tuple[tuple[int, float, float], ...], workers: Iterable[SimWorker], per_host: tuple[int, int] = (1, 1)
) -> tuple[SharedHost, ...]:
    """`rows`: SharedHost.by_batch; `per_host`: prefill and decode workers of a host. In the order of the workers."""
    names: dict[str, list[str]] = {"prefill": [], "decode": []}
    for worker in workers:
        names[worker.role].append(worker.name)
    count = max(-(-len(names[role]) // most) for role, most in zip(names, per_host, strict=True))
    shared = [
        [name for role, most in zip(names, per_host, strict=True) for name in names[role][i * most : (i + 1) * most]]
        for i in range(count)
    ]
    return tuple(SharedHost(workers=tuple(together), by_batch=rows) for together in shared)


def _made(kind: type[T], options: Mapping[str, Any], where: str, **renamed: str) -> T:
    """A policy's options from those of the profile that it knows by name; the others have their defaults."""
    names = {field.name: renamed.get(field.name, field.name) for field in fields(kind)}  # type: ignore[arg-type]
    given = {name: options[known] for name, known in names.items() if options.get(known, "None") != "None"}
    if kind is PrefillLimits:
        given.setdefault("max_batch_tokens", 512)
    if kind is DecodeLimits:
        given.setdefault("max_batch_size", 64)
    try:
        return kind(**given)
    except (TypeError, ValueError) as error:
        raise ProfileError(f"{where}: {error}; measure again with kvrelay calibrate") from None
