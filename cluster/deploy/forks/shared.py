"""What the fork server has for the workers of a spec: a model that most of them load by the same options."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cluster.deploy.forks.preload import Preload
from cluster.spec.model import ClusterSpec
from cluster.spec.resolve import workers_of
from engine.loading.ready_made import alike
from engine.options import EngineOptions
from engine.weights.files import folder_of, weight_bytes, why_incomplete

MAX_WEIGHT_BYTES = 4 << 30  # of a shared model: ten seconds to load, and Ray gives a worker a minute to come
NODES = Path("/sys/devices/system/node")  # of memory


def preload_of(spec: ClusterSpec) -> Preload:
    """Of a resolved spec, whose workers are on CPUs."""
    return Preload(num_light=1 + spec.router.replicas, engine=_shared_engine(spec))


def _shared_engine(spec: ClusterSpec) -> dict[str, Any] | None:
    """None where the model is too large to be waited for, or the machine has several memories, each near some cores."""
    if len([*NODES.glob("node[0-9]*")]) > 1:
        return None
    counts = Counter(alike(EngineOptions(**plan.engine)) for plan in workers_of(spec))
    return next((asdict(options) for options, _ in counts.most_common() if _is_small(options)), None)


def _is_small(options: EngineOptions) -> bool:
    """One process's, of files that are here."""
    folder = folder_of(options.model)
    if options.num_processes > 1 or options.speculative_model or why_incomplete(folder):
        return False
    return weight_bytes(folder) <= MAX_WEIGHT_BYTES
