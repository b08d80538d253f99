"""Flat is how much each process of a cluster has grown between its first sights and its last: what a leak shows in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from kvrelay.chaos.targets.base import ProcessState
from kvrelay.client.types import ClusterStatus

ALLOWED = {"descriptors": 64.0, "threads": 16.0, "tasks": 32.0, "memory_mb": 256.0}  # that one may grow while it lives
SIGHTS = 3  # the least of so many counts: tasks are told up to two seconds late, of a load that has ended since


@dataclass(frozen=True, slots=True, order=True)
class Grown:
    by: float = 0.0
    who: str = "a process"  # and from how many to how many


@dataclass(slots=True)
class Flat:
    seen: dict[int, list[ProcessState]] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)

    def see(self, states: Mapping[int, ProcessState], told: Mapping[int, tuple[str, int]]) -> None:
        """`told`: the names of processes, and tasks of their event loops, of those that say so."""
        for pid, bare in states.items():
            name, tasks = told.get(pid, ("", 0))
            self.names[pid] = name or self.names.get(pid, f"process {pid}")
            self.seen.setdefault(pid, []).append(replace(bare, tasks=tasks))

    def growth(self) -> dict[str, Grown]:
        """Of each kind, by how much which process has grown most."""
        return {kind.name: max(self._grown(kind.name), default=Grown()) for kind in fields(ProcessState)}

    def _grown(self, kind: str) -> Iterator[Grown]:
        for pid, states in self.seen.items():
            before, after = _least(states[:SIGHTS], kind), _least(states[-SIGHTS:], kind)
            yield Grown(
                after - before, f"{self.names[pid]}, seen {len(states)} times, from {before:.0f} to {after:.0f}"
            )


def _least(states: Sequence[ProcessState], kind: str) -> float:
    return float(min(getattr(state, kind) for state in states))


def told_of(status: ClusterStatus, pid_of: Callable[[str], int]) -> dict[int, tuple[str, int]]:
    """Names, and tasks of the event loops, of a router and its workers, by process."""
    router = status.router_id.partition("/")[0]  # then the start of its process
    counts = {each.name: each.num_tasks for each in status.workers} | {router: status.num_tasks}
    return {pid_of(name): (name, count) for name, count in counts.items()}
