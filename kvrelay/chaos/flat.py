"""Flat is how much each process of a cluster has grown between its first sights and its last: what a leak shows in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from kvrelay.chaos.targets.base import ProcessState
from kvrelay.client.types import ClusterStatus

ALLOWED = {"descriptors": 64.0, "threads": 16.0, "tasks": 32.0, "memory_mb": 256.0}  # that one may grow while it lives
SIGHTS = 3  # the least of so many counts: tasks are told up to two seconds late, of a load that has ended since


@dataclass(slots=True)
class Flat:
    seen: dict[int, list[ProcessState]] = field(default_factory=dict)

    def see(self, states: Mapping[int, ProcessState], tasks: Mapping[int, int]) -> None:
        """`tasks`: of the event loops of those that have one."""
        for pid, bare in states.items():
            self.seen.setdefault(pid, []).append(replace(bare, tasks=tasks.get(pid, 0)))

    def growth(self) -> dict[str, float]:
        """Of each kind, the most that a process has grown by."""
        return {
            kind.name: max(
                (_least(s[-SIGHTS:], kind.name) - _least(s[:SIGHTS], kind.name) for s in self.seen.values()),
                default=0.0,
            )
            for kind in fields(ProcessState)
        }


def _least(states: Sequence[ProcessState], kind: str) -> float:
    return float(min(getattr(state, kind) for state in states))


def tasks_of(status: ClusterStatus, pid_of: Callable[[str], int]) -> dict[int, int]:
    """Tasks of the event loops of a router and its workers, by process."""
    router = status.router_id.partition("/")[0]  # then the start of its process
    return {pid_of(each.name): each.num_tasks for each in status.workers} | {pid_of(router): status.num_tasks}
