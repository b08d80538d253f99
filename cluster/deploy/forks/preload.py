"""What a fork server has before its first fork: modules, from its start on, and a model that workers share.

Imports nothing but the standard library: `kvrelay up` starts the fork server before it knows anything else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RAY_MODULES = (
    "ray._private.workers.default_worker",  # what Ray's script for a worker imports
    "ray.actor",
    "ray.util.scheduling_strategies",
)
COMMON_MODULES = (
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
LIGHT_MODULES = (*COMMON_MODULES, "cluster.deploy.router_service")
MODULES = (*COMMON_MODULES, "worker.driver", "mixed_worker.driver")  # the latter of the parts of the two others


@dataclass(frozen=True, slots=True, kw_only=True)
class Imports:
    """`light`: what the controller and the routers have; `all`: what workers have; `ray`: what each has of Ray's,
    imported when somebody asks."""

    light: Sequence[str] = LIGHT_MODULES
    all: Sequence[str] = MODULES
    ray: Sequence[str] = RAY_MODULES


ACTORS = Imports()


@dataclass(frozen=True, slots=True, kw_only=True)
class Preload:
    """`num_light`: forks, the first, that are no workers; `engine`: keyword arguments of EngineOptions, by which most
    workers load; None: each for itself."""

    num_light: int = 0
    engine: Mapping[str, Any] | None = None
