"""The limits of this process' control groups (cgroups), which a container, a pod or a service has and `nproc` and
/proc/meminfo do not tell. What cannot be read is no limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Group:
    folder: Path
    is_v2: bool


def groups(controller: str, proc: Path = PROC, cgroups: Path = CGROUPS) -> Iterator[Group]:
    """Of version 2, one hierarchy, and of version 1, one for the controller. A limit holds for all groups below it."""
    for line in _text(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = cgroups / controllers
        group = root / path.strip("/")
        for folder in (group, *group.parents):
            yield Group(folder, is_v2=not controllers)
            if folder == root:
                break


def memory_limit_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """The least of all; None: there is none."""
    names = {True: "memory.max", False: "memory.limit_in_bytes"}
    limits = (number_in(group.folder / names[group.is_v2]) for group in groups("memory", proc, cgroups))
    return min((limit for limit in limits if limit is not None), default=None)


def core_limit(proc: Path = PROC, cgroups: Path = CGROUPS) -> float | None:
    """Cores' worth of time, on whichever cores: docker's --cpus, a pod's limit, systemd's CPUQuota."""
    names = {True: ("cpu.max",), False: ("cpu.cfs_quota_us", "cpu.cfs_period_us")}
    limits = []
    for group in groups("cpu", proc, cgroups):
        quota, *period = " ".join(_text(group.folder / name) for name in names[group.is_v2]).split() or ["max"]
        if quota not in ("max", "-1") and period:
            limits.append(int(quota) / int(period[0]))
    return min(limits, default=None)


def number_in(path: Path) -> int | None:
    """None: "max", or it cannot be read."""
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
