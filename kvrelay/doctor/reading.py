"""What this machine's kernel says of it, read once and judged elsewhere. Nothing is changed, and nothing needs root."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import time
from dataclasses import dataclass, field
from pathlib import Path

from engine.pages.host_memory import FreeMemory, free_memory

LOOK_S = 0.5  # over which shares of the cores' time are taken
TIMEX_BYTES = 512  # more than the kernel's struct timex
TIME_ERROR = 5  # of adjtimex(2): nobody keeps the clock right
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    cpu: str = ""
    flags: frozenset[str] = frozenset()
    family_model: tuple[int, int] = (0, 0)
    open_files: tuple[int, int] = (-1, -1)  # soft, hard; -1: no limit
    locked_bytes: int = -1
    huge_pages: str = ""
    clock_source: str = ""
    is_clock_set: bool | None = None
    stolen: float = 0.0  # shares of all cores' time
    busy: float = 0.0
    free: FreeMemory = field(default_factory=lambda: FreeMemory(0, ""))
    shm_bytes: int = 0  # that /dev/shm may hold; 0: there is none


def read_host() -> Host:
    cpu = _cpu()
    stolen, busy = _shares()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Host(
        cpu=cpu.get("model name") or platform.processor() or platform.machine(),
        flags=frozenset((cpu.get("flags") or cpu.get("Features", "")).split()),
        family_model=(int(cpu.get("cpu family", 0)), int(cpu.get("model", 0))),
        open_files=(soft, hard),
        locked_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        huge_pages=_text("/sys/kernel/mm/transparent_hugepage/enabled"),
        clock_source=_text("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
        is_clock_set=_is_clock_set(),
        stolen=stolen,
        busy=busy,
        free=free_memory(),
        shm_bytes=_size(SHARED_MEMORY),
    )


def _cpu() -> dict[str, str]:
    """Of the first core."""
    lines = (line.partition(":") for line in _text("/proc/cpuinfo").split("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in lines}


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _size(folder: Path) -> int:
    try:
        stat = os.statvfs(folder)
    except OSError:
        return 0
    return stat.f_blocks * stat.f_frsize


def _is_clock_set() -> bool | None:
    try:
        state = int(ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(TIMEX_BYTES)))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != TIME_ERROR


def _shares() -> tuple[float, float]:
    """Stolen, and busy with anything."""
    before = _ticks()
    time.sleep(LOOK_S)
    passed = [after - then for then, after in zip(before, _ticks(), strict=True)]
    idle, stolen, total = sum(passed[3:5]), passed[7], max(1, sum(passed[:8]))
    return stolen / total, (total - idle - stolen) / total


def _ticks() -> list[int]:
    """user, nice, system, idle, iowait, irq, softirq, steal, ... of all cores."""
    return [int(word) for word in _text("/proc/stat").splitlines()[0].split()[1:]]
