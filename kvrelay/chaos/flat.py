"""Flat is how much each process of a cluster has grown between its first sight and its last: what a leak shows in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace

from kvrelay.chaos.targets.base import ProcessState
from kvrelay.client.types import ClusterStatus

ALLOWED = {"descriptors": 64.0, "threads": 16.0, "tasks": 32.0, "memory_mb": 256.0}  # that one may grow while it lives


@dataclass(slots=True)
class Flat:
    first: dict[int, ProcessState] = field(default_factory=dict)
    last: dict[int, ProcessState] = field(default_factory=dict)

    def see(self, states: Mapping[int, ProcessState], tasks: Mapping[int, int]) -> None:
        """`tasks`: of the event loops of those that have one."""
        for pid, bare in states.items():
            state = replace(bare, tasks=tasks.get(pid, 0))
            self.first.setdefault(pid, state)
            self.last[pid] = state

    def growth(self) -> dict[str, float]:
        """Of each kind, the most that a process has grown by."""
        pairs = [(self.first[pid], self.last[pid]) for pid in self.last]
        kinds = [each.name for each in fields(ProcessState)]
        return {kind: max((getattr(b, kind) - getattr(a, kind) for a, b in pairs), default=0.0) for kind in kinds}


def tasks_of(status: ClusterStatus, pid_of: Callable[[str], int]) -> dict[int, int]:
    """Tasks of the event loops of a router and its workers, by process."""
    router = status.router_id.partition("/")[0]  # then the start of its process
    return {pid_of(each.name): each.num_tasks for each in status.workers} | {pid_of(router): status.num_tasks}
