"""How many more processes and threads this process' user may start: `ulimit -u` and the pids limit of its cgroups, each
of which counts threads. What cannot be read is no limit.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.limits.cgroups import CGROUPS, PROC, groups, number_in


@dataclass(frozen=True, slots=True)
class ProcessRoom:
    left: int
    where: str  # the limit, in words

    def __str__(self) -> str:
        return f"{self.left} more processes and threads may be started ({self.where})"


def process_room(proc: Path = PROC, cgroups: Path = CGROUPS) -> ProcessRoom | None:
    """The least of all limits; None: there is none."""
    rooms = [*_of_groups(proc, cgroups), *_of_user(proc)]
    return min(rooms, key=lambda room: room.left, default=None)


def _of_groups(proc: Path, cgroups: Path) -> Iterator[ProcessRoom]:
    for group in groups("pids", proc, cgroups):
        most, now = (number_in(group.folder / name) for name in ("pids.max", "pids.current"))
        if most is not None and now is not None:
            yield ProcessRoom(max(0, most - now), f"{now} run, and pids.max of the cgroup {group.folder} is {most}")


def _of_user(proc: Path) -> Iterator[ProcessRoom]:
    """The kernel lets root start any number."""
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if most == resource.RLIM_INFINITY or os.getuid() == 0:
        return
    now = sum(_threads_of(os.getuid(), status) for status in proc.glob("[0-9]*/status"))
    yield ProcessRoom(max(0, most - now), f"{now} run of this user, and `ulimit -u` is {most}")


def _threads_of(user: int, status: Path) -> int:
    """0 where the process is another user's, or has ended."""
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return 0
    fields = {key: words.split() for key, _, words in (line.partition(":") for line in lines)}
    is_ours = fields.get("Uid", [""])[0] == str(user)
    return int(fields["Threads"][0]) if is_ours and "Threads" in fields else 0
