"""The clusters that the suite plays on: their shapes, and settings small enough that a bound is seconds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.front.options import FrontOptions
from cluster.router.options import RouterOptions
from cluster.spec.model import ClusterSpec, TransferSpec
from cluster.spec.pool import PoolSpec, roles_of
from engine.knobs import knobs_of
from kv_transfer.options import TransferOptions
from kvrelay.chaos.targets.base import Shape, Target
from kvrelay.chaos.targets.processes import ProcessCluster
from kvrelay.chaos.targets.ray import NAME, RayCluster
from worker.options import WorkerOptions

SHAPES = {
    shape.name: shape
    for shape in (
        Shape(),
        Shape(name="small", num_pages=48),
        Shape(name="ranks", prefill=1, ranks=2),
        Shape(name="ray", under_ray=True),
        Shape(name="mixed", prefill=1, decode=0, mixed=2, num_pages=40),
    )
}
DEPLOYMENT = {"liveness_timeout_s": 5.0}
SECRET = "chaos"
ENGINE = {"dtype": "float32", "page_size": 16, "max_model_len": 512, "threads": 1, "parity_check": False}
WORKER: dict[str, Any] = {
    "max_batch_tokens": 48,
    "short_prompt_tokens": 32,
    "chunk_tokens": 24,
    "timeout_s": 1.0,
    "connect_timeout_s": 1.0,
    "peer_silent_s": 2.0,
    "lease_ttl_s": 2.0,
    "fence_timeout_s": 1.0,
    "queued_reservation_s": 5.0,
    "step_timeout_s": 2.0,
    "drop_router_after_s": 3.0,
}
ROUTER_SETTINGS: dict[str, Any] = {
    "dead_after_s": 1.0,
    "unavailable_grace_s": 15.0,
    "max_backlog_tokens": 2048,
    "keepalive_s": 2.0,
}


def make_cluster(shape: Shape, folder: Path, model: str, seed: int) -> Target:
    if shape.under_ray:
        return RayCluster(shape, folder, _spec(shape, model), {**WORKER, **ROUTER_SETTINGS, **DEPLOYMENT})
    return ProcessCluster(
        shape,
        folder,
        engine={**ENGINE, "model": model},
        worker={**WORKER, "secret": SECRET},
        router={**ROUTER_SETTINGS, "secret": SECRET, "model": model},
        seed=seed,
    )


def values_of(cluster: Target, measures: Mapping[str, float]) -> dict[str, float]:
    """Every setting of the cluster that is a number, and the measures."""
    defaults = {
        name: float(knob.default)
        for kind in (RouterOptions, FrontOptions, TransferOptions, WorkerOptions)
        for name, knob in knobs_of(kind).items()
        if isinstance(knob.default, int | float)
    }
    return {**defaults, **cluster.settings, **measures, "start_s": cluster.start_s}


def _spec(shape: Shape, model: str) -> dict[str, Any]:
    """The same settings, as `kvrelay up` is given them."""
    return {
        "name": NAME,
        "model": model,
        **{key: ENGINE[key] for key in ENGINE.keys() & ClusterSpec.model_fields.keys()},
        **DEPLOYMENT,
        "router": {**ROUTER_SETTINGS, "port": 0, "auth": False},
        "transfer": {key: WORKER[key] for key in WORKER.keys() & TransferSpec.model_fields.keys()},
        "pools": [
            {"role": role, "replicas": count, "threads": 1, "num_cpus": 0.5, **_knobs(role)}
            for role, count in (("prefill", shape.prefill), ("decode", shape.decode))
        ],
    }


def _knobs(role: str) -> dict[str, Any]:
    keys = WORKER.keys() & PoolSpec.model_fields.keys()
    return {key: WORKER[key] for key in keys if role in roles_of(key)}
