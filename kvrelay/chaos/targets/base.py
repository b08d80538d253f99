"""Target is a cluster that faults are put into: real processes, by name. ProcessCluster keeps them itself, and more can
be done to it (processes.py); RayCluster has `kvrelay up` keep them, as a user would (ray.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import psutil

ROUTER = "router-0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a cluster of the suite is made of."""

    name: str = "pools"
    prefill: int = 2
    decode: int = 2
    mixed: int = 0
    ranks: int = 1  # processes of decode-0
    num_pages: int = 256  # of each worker
    under_ray: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """What must stay flat while a process lives."""

    descriptors: int
    threads: int
    tasks: int = 0  # of its event loop, where it has one
    memory_mb: float


class Target(Protocol):
    endpoint: str
    watch_endpoint: str  # the same router, by a way that no fault cuts
    start_s: float  # that a process takes from its end to the ready of its successor

    @property
    def settings(self) -> Mapping[str, float]:
        """Of the cluster, those that are numbers: the bounds are made of them."""

    async def start(self) -> None:
        """Returns when all are ready. Raises TimeoutError."""

    async def stop(self) -> list[int]:
        """End it; returns the ids of its processes that are left."""

    def names(self, role: str) -> list[str]:
        """prefill, decode, mixed, router, controller: those that there are, in order. Mixed ones are of all three."""

    def pid(self, name: str) -> int:
        """Of the process that runs under the name now; 0 while there is none."""

    def ended_s(self, name: str) -> float:
        """When its process last ended, on the monotonic clock; 0: never yet."""

    def is_ready(self, name: str) -> bool: ...

    def signal(self, name: str, number: int) -> None: ...

    def heal(self) -> None:
        """Undo all that was done to links and inside workers, and wake who was stopped."""

    def states(self) -> dict[int, ProcessState]:
        """Of every process of a worker or router, by its id."""


def states_of(processes: Iterable[psutil.Process]) -> dict[int, ProcessState]:
    states = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            states[process.pid] = ProcessState(
                descriptors=process.num_fds(),
                threads=process.num_threads(),
                memory_mb=process.memory_info().rss / 1e6,
            )
    return states
