"""measured makes of a profile what is simulated: the cluster that was measured, or one with more or fewer workers.

Values only; it measures and simulates nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from cluster.router.options import RouterOptions
from decode_worker.options import DecodeOptions
from engine.knobs import read
from mixed_worker.options import MixedOptions
from placement.build.worker import RolePolicy, WorkerModel, sim_worker
from placement.latency.profile import PoolFacts, Profile, ProfileError
from placement.latency.profile_latency import ProfileLatency
from placement.simulator.cluster import SharedHost, SimCluster, SimWorker
from prefill_worker.options import PrefillOptions
from worker.options import report_gap_s

T = TypeVar("T")


def sim_cluster(profile: Profile, num_prefill: int | None = None, num_decode: int | None = None) -> SimCluster:
    """As many workers as were measured unless told otherwise. Raises ProfileError."""
    latency = ProfileLatency(profile)

    def pool(role: str, where: str, kind: type[RolePolicy], count: int | None = None) -> list[SimWorker]:
        facts: PoolFacts = getattr(profile, where)
        policy = _read(kind, facts.options, where)
        caches = bool(facts.options.get("prefix_cache", True))
        model = WorkerModel(latency=latency, num_pages=facts.num_pages, page_size=profile.page_size)
        names = [f"{role}-{i}" for i in range(count or facts.count)]
        return [sim_worker(name, role, model, policy, prefix_cache=caches) for name in names]

    if profile.is_mixed:
        workers = pool("mixed", "prefill_pool", MixedOptions)
    else:
        prefills = pool("prefill", "prefill_pool", PrefillOptions, num_prefill)
        workers = prefills + pool("decode", "decode_pool", DecodeOptions, num_decode)
    return SimCluster(
        workers=tuple(workers),
        router=_read(RouterOptions, profile.router, "router"),
        message_s=profile.message_s,
        report_gap_s=report_gap_s(len(workers)),
        handoff_s=profile.loaded_handoff_s,
        hosts=shared_hosts(profile, workers),
    )


def shared_hosts(profile: Profile, workers: Iterable[SimWorker]) -> tuple[SharedHost, ...]:
    """Where the profile was measured on one host: hosts with as many workers of each role as were measured there, the
    last ones with what is left. Else none."""
    rows = profile.by_batch
    return hosts_of(rows, workers, (profile.prefill_pool.count, profile.decode_pool.count)) if rows else ()


def hosts_of(
    rows: tuple[tuple[int, float, float], ...], workers: Iterable[SimWorker], per_host: tuple[int, int] = (1, 1)
) -> tuple[SharedHost, ...]:
    """`rows`: SharedHost.by_batch; `per_host`: prefill and decode workers of a host. In the order of the workers; those
    that are mixed stand where one is missing."""
    names: dict[str, list[str]] = {"prefill": [], "decode": []}
    for worker in sorted(workers, key=lambda worker: worker.role == "mixed"):
        fewest = min(names, key=lambda role: len(names[role]) / per_host[role == "decode"])
        names[worker.role if worker.role in names else fewest].append(worker.name)
    count = max(-(-len(names[role]) // most) for role, most in zip(names, per_host, strict=True))
    shared = [
        [name for role, most in zip(names, per_host, strict=True) for name in names[role][i * most : (i + 1) * most]]
        for i in range(count)
    ]
    return tuple(SharedHost(workers=tuple(together), by_batch=rows) for together in shared)


def _read(kind: type[T], options: Mapping[str, Any], where: str) -> T:
    """A policy's options from those of the profile that it knows by name; the others have their defaults."""
    try:
        return read(kind, options)
    except (TypeError, ValueError) as error:
        raise ProfileError(f"{where}: {error}; measure again with kvrelay calibrate") from None
