"""MemoryKills: whether the kernel has killed processes for lack of memory, in this process' cgroups or on the machine.
One that it kills leaves no word, so that only its counts say why.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from engine.limits.cgroups import CGROUPS, PROC, groups, memory_limit_bytes

GIB = 1 << 30


class MemoryKills:
    """Since it was made, or last asked."""

    def __init__(self, proc: Path = PROC, cgroups: Path = CGROUPS) -> None:
        self._proc, self._cgroups = proc, cgroups
        self._known = self._counts()

    def news(self) -> str:
        """One sentence; empty where there were none."""
        known, self._known = self._known, self._counts()
        for place, count in self._known.items():  # the innermost group first: it is the nearest to the cause
            if (number := count - known.get(place, count)) > 0:
                limit_bytes = memory_limit_bytes(self._proc, self._cgroups) if place != str(self._proc) else None
                limit = "" if limit_bytes is None else f" (its cgroup may have {limit_bytes / GIB:.1f} GiB)"
                noun = "process" if number == 1 else "processes"
                return (
                    f"the kernel has killed {number} {noun} here for lack of memory{limit}; give more memory, a "
                    "smaller kv_memory or fewer workers"
                )
        return ""

    def _counts(self) -> dict[str, int]:
        return dict(_counts(self._proc, self._cgroups))


def _counts(proc: Path, cgroups: Path) -> Iterator[tuple[str, int]]:
    for group in groups("memory", proc, cgroups):
        yield from _count(str(group.folder), group.folder / ("memory.events" if group.is_v2 else "memory.oom_control"))
    yield from _count(str(proc), proc / "vmstat")


def _count(place: str, path: Path) -> Iterator[tuple[str, int]]:
    try:
        fields = dict(line.split()[:2] for line in path.read_text().splitlines())
    except (OSError, ValueError):
        return
    if "oom_kill" in fields:
        yield place, int(fields["oom_kill"])
