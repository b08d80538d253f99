"""Preload says what a fork server has before its first fork: modules, and a model that workers share."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cluster.spec.model import ClusterSpec
from cluster.spec.resolve import workers_of
from engine.loading.ready_made import alike
from engine.options import EngineOptions
from engine.weights.files import weight_bytes

RAY_MODULES = (
    "ray._private.workers.default_worker",  # what Ray's script for a worker imports
    "ray.actor",
    "ray.util.scheduling_strategies",
)
LIGHT_MODULES = (
    "cluster.deploy.router_service",
    "cluster.deploy.changes.rolling",  # the controller's class, which Ray has all who call it import
    "worker.log_file",
    "worker.process",
    "google.protobuf.json_format",  # what Ray imports
    "jsonschema",
    "msgpack",
    "pdb",
    "pydantic.v1",
    "requests",
    "starlette.datastructures",
)
MODULES = (
    "worker.driver",
    "mixed_worker.driver",  # of the parts of the two others
)
MAX_WEIGHT_BYTES = 1 << 30  # of a shared model: some seconds to load, and Ray gives a worker a minute to come
NODES = Path("/sys/devices/system/node")  # of memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Preload:
    """`threads`: a worker's; `light_modules`: what all have, and the first `num_light` forks need no more; `modules`:
    what workers have; `ray_modules`: what all have of Ray's, imported when somebody asks; `engine`: keyword arguments
    of EngineOptions, by which most workers load; None: each for itself."""

    threads: int
    light_modules: Sequence[str] = LIGHT_MODULES
    num_light: int = 0
    modules: Sequence[str] = MODULES
    ray_modules: Sequence[str] = RAY_MODULES
    engine: Mapping[str, Any] | None = None


def preload_of(spec: ClusterSpec) -> Preload:
    """Of a resolved spec, whose workers are on CPUs."""
    return Preload(
        threads=max(int(pool.threads) for pool in spec.pools),
        num_light=1 + spec.router.replicas,
        engine=_shared_engine(spec),
    )


def _shared_engine(spec: ClusterSpec) -> dict[str, Any] | None:
    """None where the model is too large to be waited for, or the machine has several memories, each near some cores."""
    if len([*NODES.glob("node[0-9]*")]) > 1:
        return None
    counts = Counter(alike(EngineOptions(**plan.engine)) for plan in workers_of(spec))
    return next((asdict(options) for options, _ in counts.most_common() if _is_small(options)), None)


def _is_small(options: EngineOptions) -> bool:
    """One process's, from a directory."""
    if options.num_processes > 1 or options.speculative_model or not os.path.isdir(options.model):
        return False
    return weight_bytes(Path(options.model)) <= MAX_WEIGHT_BYTES
