"""together asks whether several models should share their GPUs or have their own (AlpaServe's question: Li et al., OSDI
2023): bursts of one use what others leave, and all have less memory, and one waits for another's steps.

Shared, each group of GPUs holds a mixed worker of every model, which computes by turns with the others
(simulator/machines/host.py); each model has its own router policy over its workers. The fewest groups are searched that
keep every model's targets at its rate, all simulated on one clock; and by how much all rates may grow then.

Memory beside the weights is divided by what each model's requests hold (rate times tokens times the bytes of each),
once each has room for its longest request and for a step.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from placement.build.from_offers import assemble, mixed_of, offers_of
from placement.catalogs.base import Degrees, Offer
from placement.catalogs.roofline import RooflineCatalog
from placement.goodput.bounds import decode_bound, prefill_bound
from placement.goodput.estimate import Estimate, estimate_of
from placement.goodput.runner import Runner
from placement.goodput.targets import Targets
from placement.plan import Candidate, PoolPlan, RatePoint
from placement.search.problem import PlacementProblem
from placement.search.screening import chunk_sizes
from placement.simulator.cluster import SimCluster
from placement.simulator.simulate import simulate_together
from placement.simulator.systems import LiveSystem
from placement.workload.traffic import Traffic

LEAST_REQUESTS = 600  # of the model with the lowest rate, where all have no more than MOST_REQUESTS then
MOST_REQUESTS = 30_000  # of all of them in one run
PROCESS_BYTES = 2.6 * (
    1 << 30
)  # of a worker beside weights, KV and a step: context, workspaces, graphs (engine/loading)
GROWTHS = 5  # looks for how far rates may grow, once it is known within a factor of two
MOST_GROWTH = 1024.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A model and what is asked of it."""

    name: str
    catalog: RooflineCatalog
    traffic: Traffic
    targets: Targets
    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Of a tenant: its workers, one in each group; the share of a GPU's memory that each takes; how requests fare."""

    name: str
    pool: PoolPlan
    memory: float
    point: RatePoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """`growth`: all rates may be so many times as high on `growth_gpus`."""

    degrees: Degrees
    groups: int
    shares: tuple[Share, ...]
    growth: float
    growth_gpus: int

    @property
    def gpus(self) -> int:
        return self.groups * self.degrees.gpus


def find_together(
    tenants: Sequence[Tenant], most_gpus: int, runner: Runner, seed: int = 0, tps: Collection[int] = ()
) -> Together | str:
    """The fewest GPUs, `most_gpus` at most, on which all keep their targets together; or why there are none. `tps`:
    the degrees to try; none: all."""
    known = tenants[0].catalog.degrees(most_gpus)
    sizes = [degrees for degrees in known if degrees.pp == 1 and (not tps or degrees.tp in tps)]
    groups = [group for degrees in sizes if (group := _group(tenants, degrees)) is not None]
    if not groups:
        weights = sum(tenant.catalog.shape.weight_bytes for tenant in tenants) / 1e9
        what = f"the weights of all, {weights:.3g} GB, with KV beside them"
        return f"{what} do not fit on a group of {most_gpus} {tenants[0].catalog.hardware} or fewer"
    found = runner.map(_sized, [_Job(tuple(tenants), group, most_gpus, seed) for group in groups], "models together")
    held = [each for each in found if each is not None]
    if not held:
        unit = "GPU" if most_gpus == 1 else "GPUs"
        return f"on {most_gpus} {unit}, as many as they take apart, they miss their targets together"
    return min(held, key=lambda each: (each.gpus, -each.growth))


@dataclass(frozen=True, slots=True)
class _Worker:
    """Of one tenant in a group."""

    offer: Offer
    chunk_tokens: int
    memory: float


@dataclass(frozen=True, slots=True)
class _Job:
    tenants: tuple[Tenant, ...]
    group: tuple[_Worker, ...]
    most_gpus: int
    seed: int


def _group(tenants: Sequence[Tenant], degrees: Degrees) -> tuple[_Worker, ...] | None:
    """A worker of each on so many GPUs; None where they do not fit."""
    offers = [tenant.catalog.offer(degrees) for tenant in tenants]
    weights = sum(tenant.catalog.weight_bytes(degrees) for tenant in tenants)
    steps = [tenant.catalog.step_bytes(degrees) for tenant in tenants]
    machine = tenants[0].catalog.machine
    least = [_least_bytes(tenant, degrees) for tenant in tenants]
    left = (
        machine.memory_bytes * machine.memory_share - weights - sum(steps) - len(tenants) * PROCESS_BYTES - sum(least)
    )
    if left < 0:
        return None
    held = [_held_bytes(tenant, degrees) for tenant in tenants]
    workers = []
    for tenant, offer, step, floor, own in zip(tenants, offers, steps, least, held, strict=True):
        if isinstance(offer, str):
            return None
        catalog, kv_bytes = tenant.catalog, floor + left * own / sum(held)
        pages = int(kv_bytes / (catalog.kv_bytes_per_token(degrees) * catalog.page_size))
        problem = PlacementProblem(
            catalog=catalog, offer_of=offers_of(catalog), traffic=tenant.traffic, targets=tenant.targets
        )
        memory = (catalog.weight_bytes(degrees) + step + PROCESS_BYTES + kv_bytes) / machine.memory_bytes
        workers.append(_Worker(replace(offer, num_pages=pages), chunk_sizes(problem, offer)[0], memory))
    return tuple(workers)


def _held_bytes(tenant: Tenant, degrees: Degrees) -> float:
    source = tenant.traffic.source
    tokens = float(source.prompt_len.mean() + source.output_len.mean() / 2)
    return tenant.rate * tokens * float(source.output_len.mean()) * tenant.catalog.kv_bytes_per_token(degrees)


def _least_bytes(tenant: Tenant, degrees: Degrees) -> float:
    """Of the longest request, and of a step's tokens."""
    source, catalog = tenant.traffic.source, tenant.catalog
    tokens = max(catalog.max_batch_tokens, int((source.prompt_len + source.output_len).max())) + catalog.page_size
    return tokens * catalog.kv_bytes_per_token(degrees)


def _sized(job: _Job) -> Together | None:
    """The fewest groups, by halving; None where the most that there may be do not do."""
    degrees = job.group[0].offer.degrees
    most = job.most_gpus // degrees.gpus
    least = min(most, max(1, math.ceil(sum(map(_load, job.tenants, job.group)))))
    best = _played(job, most, 1.0)
    if not _keep(best):
        return None
    low, high = least - 1, most  # `low` does not do, as far as is known
    while high - low > 1:
        middle = (low + high) // 2
        played = _played(job, middle, 1.0)
        if _keep(played):
            high, best = middle, played
        else:
            low = middle
    shares = tuple(
        Share(
            name=tenant.name, pool=_candidate(tenant, worker, high).pools[0], memory=worker.memory, point=played.point
        )
        for tenant, worker, played in zip(job.tenants, job.group, best, strict=True)
    )
    return Together(
        degrees=degrees, groups=high, shares=shares, growth=_growth(job, most), growth_gpus=most * degrees.gpus
    )


def _load(tenant: Tenant, worker: _Worker) -> float:
    """Groups that its requests take at least, by arithmetic."""
    source, offer = tenant.traffic.source, worker.offer
    reads, writes = prefill_bound(offer, source), decode_bound(offer, source, tenant.targets.loosest.tpot_s)
    return tenant.rate * (1 / reads + 1 / writes)


def _growth(job: _Job, groups: int) -> float:
    """By how much all rates may grow, between what is known to do and what does not."""
    low, high = 1.0, 2.0
    while high < MOST_GROWTH and _keep(_played(job, groups, high)):
        low, high = high, 2 * high
    for _ in range(GROWTHS):
        middle = math.sqrt(low * high)
        if _keep(_played(job, groups, middle)):
            low = middle
        else:
            high = middle
    return low


def _keep(played: Sequence[Estimate]) -> bool:
    return all(estimate.keeps_slo for estimate in played)


def _played(job: _Job, groups: int, growth: float) -> list[Estimate]:
    rates = [tenant.rate * growth for tenant in job.tenants]
    seconds = min(LEAST_REQUESTS / min(rates), MOST_REQUESTS / sum(rates))
    workloads = [
        tenant.traffic.during(seconds, rate, job.seed + number)
        for number, (tenant, rate) in enumerate(zip(job.tenants, rates, strict=True))
    ]
    clusters = [
        _cluster(tenant, worker, groups, number)
        for number, (tenant, worker) in enumerate(zip(job.tenants, job.group, strict=True))
    ]
    outcomes = simulate_together(list(zip(clusters, workloads, strict=True)))
    return [
        estimate_of(LiveSystem(cluster), outcome, tenant.targets, rate)
        for cluster, outcome, tenant, rate in zip(clusters, outcomes, job.tenants, rates, strict=True)
    ]


def _candidate(tenant: Tenant, worker: _Worker, groups: int) -> Candidate:
    return mixed_of(worker.offer, groups, tenant.catalog.hardware, worker.chunk_tokens)


def _cluster(tenant: Tenant, worker: _Worker, groups: int, number: int) -> SimCluster:
    """Its worker in each group; `number` tells its workers from other models'."""
    candidate = _candidate(tenant, worker, groups)
    system = assemble(
        candidate, lambda degrees, within_node: worker.offer, within_node=True, slo=tenant.targets.loosest
    )
    assert isinstance(system, LiveSystem), "live policies serve it"
    workers = tuple(
        replace(each, name=f"{number}-{each.name}", device=f"group-{group}")
        for group, each in enumerate(system.cluster.workers)
    )
    return replace(system.cluster, workers=workers)
