"""Target is a cluster that faults are put into: real processes, by name. ProcessCluster keeps them itself (cluster.py);
RayCluster has `kvrelay up` keep them, as a user would (ray_cluster.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a cluster of the suite is made of."""

    name: str = "pools"
    prefill: int = 2
    decode: int = 2
    ranks: int = 1  # processes of decode-0
    num_pages: int = 256  # of each worker


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """What must stay flat while a process lives."""

    descriptors: int
    threads: int
    memory_bytes: int


class Target(Protocol):
    shape: Shape
    endpoint: str
    settings: Mapping[str, float]  # what the bounds are made of: the cluster's settings and the measures

    async def start(self) -> None: ...

    async def stop(self) -> list[int]:
        """End it; returns the ids of its processes that are left."""

    def names(self, role: str) -> list[str]:
        """prefill, decode, router, controller; those that there are, in order."""

    def pid(self, name: str) -> int:
        """Of the process that runs under the name now; 0 while there is none."""

    def is_ready(self, name: str) -> bool: ...

    def states(self) -> dict[int, ProcessState]:
        """Of every process of a worker or router, by its id."""
