"""From a cluster's spec to what is simulated: the workers that `kvrelay up` would start, with the limits it would give.

    ClusterSpec + WorkerSource -> SimCluster          the live policies, with every key that the live system gives them
                               -> ColocatedCluster    as many alike workers that do both, for comparison

A WorkerSource says how fast a pool's workers are and what they hold: RooflineWorkers from a model's shape and a
machine's figures, ProfileWorkers from what was measured of kvrelay's own. It decides nothing and simulates nothing;
`not_simulated` says in sentences what of a spec the simulation leaves out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from cluster.router.policy import PolicyOptions
from cluster.spec.model import ClusterSpec, PoolSpec
from decode_worker.policy import DecodeLimits
from engine.pages.layout import KvLayout, LayerKv
from kv_transfer.plan import MAX_GROUPS, layer_groups
from placement.build.from_profile import shared_hosts
from placement.catalogs.base import Degrees, PlanError
from placement.catalogs.roofline import RooflineCatalog
from placement.latency.base import LatencyModel
from placement.latency.hardware import Hardware
from placement.latency.model_shape import ModelShape
from placement.latency.profile import Profile, ProfileLatency
from placement.latency.roofline import narrowed
from placement.simulator.cluster import SimCluster, SimWorker
from placement.simulator.colocated import ColocatedCluster, Sharing
from prefill_worker.policy import PrefillLimits

MIN_REPORT_GAP_S = 0.05  # worker/router_streams.py: how often a worker that changes reports, at most
MESSAGE_S = 0.0005  # one way, between two processes
TYPICAL_PROMPT_TOKENS = 1024  # a prompt is cut into layer groups by its own length; the simulator has one number
LAYOUT_DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16", "float8": "float8_e4m3fn"}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerModel:
    """What the workers of one pool are. `error`: by how much the latency model may be wrong, as a share of a time."""

    latency: LatencyModel
    num_pages: int
    step_overhead_s: float = 0.0
    error: float = 0.0


class WorkerSource(Protocol):
    @property
    def message_s(self) -> float: ...

    @property
    def layers(self) -> tuple[LayerKv, ...]:
        """Shape of each layer's KV; empty where it is not known."""

    def worker(self, spec: ClusterSpec, index: int) -> WorkerModel:
        """Of spec.pools[index]. Raises PlanError: why such a worker cannot be."""


class RooflineWorkers:
    """By first principles. Pools whose GPUs do not fit in one node send KV over the link between nodes."""

    def __init__(self, shape: ModelShape, hardware: Hardware) -> None:
        self.shape = shape
        self.hardware = hardware

    @property
    def message_s(self) -> float:
        return MESSAGE_S

    @property
    def layers(self) -> tuple[LayerKv, ...]:
        shape = self.shape
        return (LayerKv(shape.kv_heads, shape.k_dim, shape.v_dim),) * shape.num_layers

    def worker(self, spec: ClusterSpec, index: int) -> WorkerModel:
        pool = spec.pools[index]
        catalog = self._catalog(spec, pool)
        offer = catalog.offer(_degrees(pool), within_node=self.is_one_node(spec))
        if isinstance(offer, str):
            raise PlanError(f"pools[{index}] ({pool.label}): {offer}")
        pages = offer.num_pages
        if isinstance(pool.kv_memory, int):
            pages = self._asked_pages(catalog, spec, index, offer.num_pages)
        return WorkerModel(latency=offer.latency, num_pages=pages, error=offer.error)

    def is_one_node(self, spec: ClusterSpec) -> bool:
        gpus = sum(_degrees(pool).gpus * pool.replicas for pool in spec.pools)
        return gpus <= self.hardware.gpus_per_node

    def _catalog(self, spec: ClusterSpec, pool: PoolSpec) -> RooflineCatalog:
        return RooflineCatalog(
            self.shape.with_dtype(spec.dtype),
            self.hardware,
            page_size=spec.page_size,
            max_batch_tokens=pool.max_batch_tokens if pool.role == "prefill" else pool.max_batch_size,
            max_batch_size=pool.max_batch_size if pool.role == "decode" else pool.max_prefill_requests,
        )

    def _asked_pages(self, catalog: RooflineCatalog, spec: ClusterSpec, index: int, most: int) -> int:
        """kv_memory is a worker's, over all of its GPUs."""
        pool = spec.pools[index]
        assert isinstance(pool.kv_memory, int)
        page_bytes = catalog.kv_bytes_per_token(_degrees(pool)) * _degrees(pool).gpus * spec.page_size
        pages = int(pool.kv_memory / page_bytes)
        if pages < 1:
            raise PlanError(
                f"pools[{index}].kv_memory is {pool.kv_memory}, less than one page; give at least {int(page_bytes)}"
            )
        if pages > most and self.hardware.unit == "GPU":
            raise PlanError(
                f"pools[{index}].kv_memory is {pool.kv_memory}; beside the weights of {self.shape.name} "
                f"{self.hardware.name} has room for {int(most * page_bytes)}, so give that or less, or auto"
            )
        return pages


class ProfileWorkers:
    """As they were measured. `shape`: to turn kv_memory into pages; without it a worker holds what was measured."""

    def __init__(self, profile: Profile, shape: ModelShape | None = None) -> None:
        self.profile = profile
        self.shape = shape
        self._latency = ProfileLatency(profile)

    @property
    def message_s(self) -> float:
        return self.profile.message_s

    @property
    def layers(self) -> tuple[LayerKv, ...]:
        shape = self.shape
        return (LayerKv(shape.kv_heads, shape.k_dim, shape.v_dim),) * shape.num_layers if shape else ()

    def worker(self, spec: ClusterSpec, index: int) -> WorkerModel:
        pool, profile = spec.pools[index], self.profile
        measured = Degrees(profile.tp, profile.pp)
        if _degrees(pool) != measured:
            raise PlanError(
                f"pools[{index}] ({pool.label}) has {_degrees(pool)}, but {profile.name} was measured at {measured}; "
                "calibrate a cluster that runs it, or give a hardware file"
            )
        if spec.page_size != profile.page_size:
            raise PlanError(
                f"page_size is {spec.page_size}, but {profile.name} was measured with {profile.page_size}; "
                f"give {profile.page_size}, or calibrate again"
            )
        facts = profile.prefill_pool if pool.role == "prefill" else profile.decode_pool
        pages = facts.num_pages
        if isinstance(pool.kv_memory, int) and self.shape is not None:
            token_bytes = self.shape.with_dtype(spec.dtype).kv_bytes_per_token
            pages = max(1, pool.kv_memory // (token_bytes * spec.page_size))
        error = profile.error.prefill if pool.role == "prefill" else profile.error.decode
        return WorkerModel(latency=self._latency, num_pages=pages, error=error)  # its steps hold their overhead


def sim_cluster(spec: ClusterSpec, source: WorkerSource) -> SimCluster:
    """What `kvrelay up` would run from this spec. Raises PlanError."""
    models = _models(spec, source)
    workers = [
        _worker(spec, pool, number, model)
        for pool, model in zip(spec.pools, models, strict=True)
        for number in range(pool.replicas)
    ]
    return SimCluster(
        workers=tuple(workers),
        router=router_options(spec),
        message_s=source.message_s,
        report_gap_s=MIN_REPORT_GAP_S,
        layer_groups=_layer_groups(spec, source),
        handoff_s=source.profile.handoff_s if isinstance(source, ProfileWorkers) else 0.0,
        hosts=shared_hosts(source.profile, workers) if isinstance(source, ProfileWorkers) else (),
    )


def colocated_cluster(spec: ClusterSpec, source: WorkerSource, sharing: Sharing) -> ColocatedCluster:
    """As many workers as the spec has, alike, each with the pages and the batch of a decode worker and the step's
    tokens of a prefill worker. Raises PlanError: workers that differ cannot all be one."""
    models = _models(spec, source)
    if len({_degrees(pool) for pool in spec.pools}) > 1:
        listed = ", ".join(f"{pool.label} {_degrees(pool)}" for pool in spec.pools)
        raise PlanError(f"pools have different degrees ({listed}); colocated workers are alike, so give one for all")
    decode = next(i for i, pool in enumerate(spec.pools) if pool.role == "decode")
    prefill = next(pool for pool in spec.pools if pool.role == "prefill")
    return ColocatedCluster(
        latency=models[decode].latency,
        num_workers=sum(pool.replicas for pool in spec.pools),
        num_pages=models[decode].num_pages,
        page_size=spec.page_size,
        sharing=sharing,
        max_batch_tokens=max(prefill.max_batch_tokens, spec.pools[decode].max_batch_size + 1),
        max_batch_size=spec.pools[decode].max_batch_size,
        watermark=spec.pools[decode].watermark,
        step_overhead_s=max(model.step_overhead_s for model in models),
        message_s=source.message_s,
    )


def latency_error(spec: ClusterSpec, source: WorkerSource) -> float:
    """By how much the times may be wrong: the worst of all pools'."""
    return max(model.error for model in _models(spec, source))


def latency_sources(spec: ClusterSpec, source: WorkerSource) -> list[str]:
    """Where the times come from, each said once."""
    return list(dict.fromkeys(model.latency.source for model in _models(spec, source)))


def not_simulated(spec: ClusterSpec) -> list[str]:
    """What of the spec makes no difference here though it would in life, in sentences."""
    said = []
    if spec.router.replicas > 1:
        said.append(f"router.replicas is {spec.router.replicas}; simulated as one router that sees every request")
    if spec.max_model_len is not None:
        said.append(f"max_model_len is {spec.max_model_len}; longer requests are served here, and refused in life")
    return said


def router_options(spec: ClusterSpec) -> PolicyOptions:
    """As cluster/front/server.py gives them to the policy."""
    router = spec.router
    return PolicyOptions(
        max_queued_requests=router.max_queued_requests,
        max_queued_tokens=router.max_queued_tokens,
        max_backlog_tokens=router.max_backlog_tokens,
        overcommit=router.overcommit,
        max_attempts=router.max_attempts,
        unavailable_grace_s=router.unavailable_grace_s,
    )


def prefill_limits(pool: PoolSpec) -> PrefillLimits:
    """As prefill_worker/driver.py gives them to the policy."""
    return PrefillLimits(
        max_batch_tokens=pool.max_batch_tokens,
        max_requests=pool.max_prefill_requests,
        pack_tokens=pool.pack_tokens,
        short_prompt_tokens=pool.short_prompt_tokens,
        short_share=pool.short_share,
    )


def decode_limits(pool: PoolSpec) -> DecodeLimits:
    """As decode_worker/driver.py gives them to the policy."""
    return DecodeLimits(max_batch_size=pool.max_batch_size, admission=pool.admission, watermark=pool.watermark)


def _worker(spec: ClusterSpec, pool: PoolSpec, number: int, model: WorkerModel) -> SimWorker:
    return SimWorker(
        name=f"{pool.label}-{number}",
        role=pool.role,
        latency=model.latency,
        num_pages=model.num_pages,
        page_size=spec.page_size,
        prefill=prefill_limits(pool),
        decode=decode_limits(pool),
        step_overhead_s=model.step_overhead_s,
        prefix_cache=pool.prefix_cache,
    )


def _models(spec: ClusterSpec, source: WorkerSource) -> list[WorkerModel]:
    """One for each pool. KV leaves as fast as the narrowest pair of prefill and decode pools lets it."""
    models = [source.worker(spec, index) for index in range(len(spec.pools))]
    decodes = [m.latency for m, pool in zip(models, spec.pools, strict=True) if pool.role == "decode"]
    return [
        replace(model, latency=narrowed(model.latency, decodes)) if pool.role == "prefill" else model
        for pool, model in zip(spec.pools, models, strict=True)
    ]


def _degrees(pool: PoolSpec) -> Degrees:
    return Degrees(pool.tensor_parallel, pool.pipeline_parallel)


def _layer_groups(spec: ClusterSpec, source: WorkerSource) -> int:
    """In how many parts a prompt's KV leaves while it is computed."""
    layers = source.layers
    if not layers:
        return MAX_GROUPS
    shape = getattr(source, "shape", None)
    dtype = LAYOUT_DTYPES[shape.with_dtype(spec.dtype).dtype] if shape is not None else "bfloat16"
    layout = KvLayout(spec.page_size, dtype, layers, 1)
    pages = -(-TYPICAL_PROMPT_TOKENS // spec.page_size)
    return len(layer_groups(layout, pages, spec.transfer.layers_per_group))
