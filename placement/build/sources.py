"""WorkerSource says how fast a pool's workers are and what they hold: RooflineWorkers from a model's shape and a
machine's figures, ProfileWorkers from what was measured of kvrelay's own.
"""

from __future__ import annotations

from typing import Protocol

from cluster.spec.model import ClusterSpec
from cluster.spec.pool import PoolSpec
from decode_worker.options import DecodeOptions
from engine.pages.layout import PAGE_SIZE, LayerKv
from placement.build.worker import WorkerModel
from placement.catalogs.base import Degrees, PlanError
from placement.catalogs.guesses import Guesses, guesses_by
from placement.catalogs.roofline import RooflineCatalog
from placement.latency.hardware import Hardware
from placement.latency.model_shape import ModelShape
from placement.latency.profile import Profile
from placement.latency.profile_latency import ProfileLatency
from prefill_worker.options import PrefillOptions
from worker.roles import PHASES, kind_of

MESSAGE_S = 0.0005  # one way, between two processes


def degrees_of(pool: PoolSpec) -> Degrees:
    return Degrees(pool.tensor_parallel, pool.pipeline_parallel)


def shape_in(pool: PoolSpec, spec: ClusterSpec, shape: ModelShape) -> ModelShape:
    """The model as the pool's workers have it, its KV and its weights in few bits where the spec says so."""
    return shape.with_dtype(spec.dtype).in_few_bits(kv_dtype=pool.kv_dtype, quantization=spec.quantization)


def largest_step(pool: PoolSpec) -> tuple[int, int]:
    """Tokens and requests of the largest step that a worker of the pool computes."""
    phases = kind_of(pool.role).phases
    batch = pool.options(DecodeOptions).max_batch_size if "decode" in phases else 0
    if "prefill" not in phases:
        return batch, batch
    options = pool.options(PrefillOptions)
    return max(batch, options.max_batch_tokens), batch + options.max_prefill_requests


def num_guesses(pool: PoolSpec) -> int:
    """That its workers run ahead of a request in a step, at most."""
    decodes = "decode" in kind_of(pool.role).phases
    return pool.options(DecodeOptions).num_speculative_tokens if decodes else 0


def guesses_of(pool: PoolSpec, shape: ModelShape | None, acceptance: float | None) -> Guesses | None:
    """None: it makes none, or how often they are right is not said. Raises PlanError."""
    num_tokens = num_guesses(pool)
    if not num_tokens or acceptance is None:
        return None
    return guesses_by(pool.options(DecodeOptions).speculative_model, num_tokens, acceptance, shape)


class WorkerSource(Protocol):
    @property
    def shape(self) -> ModelShape | None:
        """None: the model's config is not known."""

    @property
    def message_s(self) -> float: ...

    @property
    def layers(self) -> tuple[LayerKv, ...]:
        """Shape of each layer's KV; empty where it is not known."""

    @property
    def acceptance(self) -> float | None:
        """How often a guess of a pool that guesses ahead is right; None: that is not simulated."""

    def worker(self, spec: ClusterSpec, index: int) -> WorkerModel:
        """Of spec.pools[index]. Raises PlanError: why such a worker cannot be."""


class RooflineWorkers:
    """By first principles. Pools whose GPUs do not fit in one node send KV over the link between nodes."""

    def __init__(self, shape: ModelShape, hardware: Hardware, acceptance: float | None = None) -> None:
        """`acceptance`: how often a guess of a pool that guesses ahead is right; None: that is not simulated."""
        self.shape = shape
        self.hardware = hardware
        self.acceptance = acceptance

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
        offer = catalog.offer(degrees_of(pool), within_node=self.is_one_node(spec))
        if isinstance(offer, str):
            raise PlanError(f"pools[{index}] ({pool.label}): {offer}")
        if catalog.guesses is not None and offer.speculation is None:
            raise PlanError(
                f"pools[{index}].speculative_model leaves no room for KV on {self.hardware.name}; give a smaller one"
            )
        pages = offer.num_pages if catalog.guesses is None else offer.speculative_pages
        if isinstance(pool.kv_memory, int):
            pages = self._asked_pages(catalog, spec, index, pages)
        return WorkerModel(
            latency=offer.latency,
            num_pages=pages,
            page_size=offer.page_size,
            error=offer.error,
            speculation=offer.speculation,
        )

    def is_one_node(self, spec: ClusterSpec) -> bool:
        gpus = sum(degrees_of(pool).gpus * pool.replicas for pool in spec.pools)
        return gpus <= self.hardware.gpus_per_node

    def _catalog(self, spec: ClusterSpec, pool: PoolSpec) -> RooflineCatalog:
        tokens, requests = largest_step(pool)
        shape = shape_in(pool, spec, self.shape)
        return RooflineCatalog(
            shape,
            self.hardware,
            page_size=spec.page_size or PAGE_SIZE,
            max_batch_tokens=tokens,
            max_batch_size=requests,
            max_sampled=requests,
            guesses=guesses_of(pool, shape, self.acceptance),
            expert_parallel=pool.expert_parallel,
        )

    def _asked_pages(self, catalog: RooflineCatalog, spec: ClusterSpec, index: int, most: int) -> int:
        """kv_memory is a worker's, over all of its GPUs."""
        pool = spec.pools[index]
        assert isinstance(pool.kv_memory, int)
        token_bytes = catalog.kv_bytes_per_token(degrees_of(pool)) * degrees_of(pool).gpus
        token_bytes += catalog.guesses.kv_bytes_per_token if catalog.guesses is not None else 0.0
        page_bytes = token_bytes * catalog.page_size
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

    def __init__(self, profile: Profile, shape: ModelShape | None = None, acceptance: float | None = None) -> None:
        self.profile = profile
        self.shape = shape
        self.acceptance = acceptance
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
        if degrees_of(pool) != measured:
            raise PlanError(
                f"pools[{index}] ({pool.label}) has {degrees_of(pool)}, but {profile.name} was measured at {measured}; "
                "calibrate a cluster that runs it, or give a hardware file"
            )
        if profile.threads and pool.threads not in ("auto", profile.threads):
            raise PlanError(
                f"pools[{index}].threads is {pool.threads}, but {profile.name} was measured with {profile.threads}; "
                "calibrate a cluster that has as many"
            )
        if profile.is_mixed and pool.role != "mixed":
            raise PlanError(
                f"pools[{index}] ({pool.label}) hands KV over, which {profile.name}, of a mixed worker, did not "
                "measure; calibrate a cluster with a prefill and a decode worker"
            )
        if spec.page_size not in (None, profile.page_size):
            raise PlanError(
                f"page_size is {spec.page_size}, but {profile.name} was measured with {profile.page_size}; "
                f"give {profile.page_size}, or calibrate again"
            )
        facts = profile.prefill_pool if pool.role == "prefill" else profile.decode_pool
        pages = facts.num_pages
        shape = shape_in(pool, spec, self.shape) if self.shape is not None else None
        guesses = guesses_of(pool, shape, self.acceptance)
        if isinstance(pool.kv_memory, int) and shape is not None:
            pages = max(1, pool.kv_memory // (shape.worker_kv_bytes_per_token(measured.tp) * profile.page_size))
        if guesses is not None:
            pages = max(1, int(pages * guesses.page_share(shape, measured.tp)))
        errors = dict(zip(PHASES, profile.wrong_by, strict=True))
        error = max(errors[phase] for phase in kind_of(pool.role).phases)
        # its steps hold their overhead
        return WorkerModel(
            latency=self._latency,
            num_pages=pages,
            page_size=profile.page_size,
            error=error,
            speculation=guesses.beside(self._latency, shape) if guesses else None,
        )
