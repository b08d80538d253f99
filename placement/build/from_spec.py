"""From a cluster's spec to what is simulated: the workers that `kvrelay up` would start, with the options it gives.

    ClusterSpec + WorkerSource -> SimCluster     the live policies, with every key that the live system gives them
                -> mixed_spec -> ClusterSpec     as many workers that do both, for comparison

It decides nothing and simulates nothing; `not_simulated` says in sentences what of a spec the simulation leaves out.
"""

from __future__ import annotations

from dataclasses import replace

from cluster.router.options import RouterOptions
from cluster.spec.load import parse_spec
from cluster.spec.model import ClusterSpec
from engine.knobs import knobs_of
from engine.pages.layout import KvLayout
from kv_transfer.options import TransferOptions
from kv_transfer.plan import MAX_GROUPS, layer_groups
from placement.build.from_profile import shared_hosts
from placement.build.sources import ProfileWorkers, WorkerSource, degrees_of, num_guesses
from placement.build.worker import WorkerModel, sim_worker
from placement.catalogs.base import PlanError
from placement.latency.roofline import narrowed
from placement.simulator.cluster import SimCluster, check_simulated
from prefill_worker.options import PrefillOptions
from worker.options import WorkerOptions, report_gap_s
from worker.roles import PHASES, kind_of

TYPICAL_PROMPT_TOKENS = 1024  # a prompt is cut into layer groups by its own length; the simulator has one number
LAYOUT_DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16", "float8": "float8_e4m3fn"}


def sim_cluster(spec: ClusterSpec, source: WorkerSource) -> SimCluster:
    """What `kvrelay up` would run from this spec. Raises PlanError."""
    if spec.models:
        raise PlanError(f"models has {spec.models[0].name}, and a simulation is of one model; give a spec for each")
    models = _models(spec, source)
    workers = [
        sim_worker(
            f"{pool.label}-{number}",
            pool.role,
            model,
            pool.policy,
            prefix_cache=pool.knobs(WorkerOptions)["prefix_cache"],
            speculation=model.speculation,
        )
        for pool, model in zip(spec.pools, models, strict=True)
        for number in range(pool.replicas)
    ]
    return SimCluster(
        workers=tuple(workers),
        router=spec.router.options(RouterOptions),
        message_s=source.message_s,
        report_gap_s=report_gap_s(len(workers)),
        layer_groups=_layer_groups(spec, source, models[0].page_size),
        num_routers=spec.router.replicas,
        handoff_s=source.profile.loaded_handoff_s if isinstance(source, ProfileWorkers) else 0.0,
        hosts=shared_hosts(source.profile, workers) if isinstance(source, ProfileWorkers) else (),
    )


def mixed_spec(spec: ClusterSpec) -> ClusterSpec:
    """As many workers, all of them mixed: each with the pages and the batch of a decode worker, and with the steps of a
    prefill worker. Raises PlanError: workers that differ cannot all be one."""
    if len({degrees_of(pool) for pool in spec.pools}) > 1:
        listed = ", ".join(f"{pool.label} {degrees_of(pool)}" for pool in spec.pools)
        raise PlanError(f"pools have different degrees ({listed}); mixed workers are alike, so give one for all")
    prefill, decode = (
        next(pool for pool in spec.pools if phase in kind_of(pool.role).phases).model_dump(exclude_unset=True)
        for phase in PHASES
    )
    steps = {key: value for key, value in prefill.items() if key in knobs_of(PrefillOptions)}
    pool = decode | steps | {"role": "mixed", "name": "", "replicas": sum(pool.replicas for pool in spec.pools)}
    return parse_spec(spec.model_dump(exclude_unset=True) | {"pools": [pool]})


def latency_error(spec: ClusterSpec, source: WorkerSource) -> float:
    """By how much the times may be wrong: the worst of all pools'."""
    return max(model.error for model in _models(spec, source))


def latency_sources(spec: ClusterSpec, source: WorkerSource) -> list[str]:
    """Where the times come from, each said once."""
    return list(dict.fromkeys(model.latency.source for model in _models(spec, source)))


def not_simulated(spec: ClusterSpec, acceptance: float | None = None) -> list[str]:
    """What of the spec makes no difference here though it would in life, in sentences. `acceptance`: its source's."""
    said = []
    if spec.max_model_len is not None:
        said.append(f"max_model_len is {spec.max_model_len}; longer requests are served here, and refused in life")
    guessing = [pool.label for pool in spec.pools if num_guesses(pool)]
    if guessing and acceptance is None:
        said.append(
            f"{' and '.join(guessing)} would guess tokens ahead, but how often they are right is not said: here a step "
            "makes one token of a request; give --acceptance-rate"
        )
    return said


def _models(spec: ClusterSpec, source: WorkerSource) -> list[WorkerModel]:
    """One for each pool. KV leaves as fast as the narrowest pair of prefill and decode pools lets it. Raises SetupError
    for a role that is not simulated."""
    for pool in spec.pools:
        check_simulated(f"{pool.label}-0", pool.role)
    models = [source.worker(spec, index) for index in range(len(spec.pools))]
    phases = [kind_of(pool.role).phases for pool in spec.pools]
    decodes = [model.latency for model, computed in zip(models, phases, strict=True) if "decode" in computed]
    return [
        replace(model, latency=narrowed(model.latency, decodes)) if "prefill" in computed else model
        for computed, model in zip(phases, models, strict=True)
    ]


def _layer_groups(spec: ClusterSpec, source: WorkerSource, page_size: int) -> int:
    """In how many parts a prompt's KV leaves while it is computed."""
    layers = source.layers
    if not layers:
        return MAX_GROUPS
    shape = getattr(source, "shape", None)
    dtype = LAYOUT_DTYPES[shape.with_dtype(spec.dtype).dtype] if shape is not None else "bfloat16"
    layout = KvLayout(page_size, dtype, layers, 1)
    pages = -(-TYPICAL_PROMPT_TOKENS // page_size)
    return len(layer_groups(layout, pages, spec.transfer.options(TransferOptions).layers_per_group))
