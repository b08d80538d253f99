"""What the benchmarks share: where results go, what machine this is, and how much of it others used meanwhile.

A figure means little when other work took the cores: `CpuWatch` tells how much of the machine each part of what is
measured used, and how much was used by anything else, so that a result carries its own noise.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from engine import process

REPO = Path(__file__).resolve().parent.parent
RESULTS = REPO / "bench" / "results"
MODELS = REPO / ".bench"
LOOK_S = 3.0
# By what matters to bfloat16 on a CPU: Intel's tiles; the same where the host keeps them from its guests; AMD's with
# AVX512-BF16, Zen 5 and before it Zen 4, which computes it in halves of 256 bits; those that compute it in float32.
KINDS_OF_CPU = {
    "amx_bf16": "_amx",
    "avx512_fp16": "_avx512_fp16",
    "avx512_vp2intersect": "",
    "avx512_bf16": "_zen4",
    "avx2": "_avx2",
}


def about() -> dict[str, Any]:
    """When, which commit, on what: the head of each result."""
    import torch

    changes = _git("status", "--porcelain", "--untracked-files=no")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "has_uncommitted_changes": None if changes is None else bool(changes),
        "machine": {
            "cpu": _cpu_name(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "python": sys.version.split()[0],
            "torch": torch.__version__,
        },
    }


def on_this_cpu(name: str) -> str:
    """What a result or a drawing is called that has a file for each kind of CPU."""
    flags = next((line.split() for line in _lines("/proc/cpuinfo") if line.startswith("flags")), [])
    return name + kind_of_cpu(flags)


def kind_of_cpu(flags: Sequence[str]) -> str:
    """The first of KINDS_OF_CPU that it has; nothing for a CPU with none of them."""
    return next((kind for flag, kind in KINDS_OF_CPU.items() if flag in flags), "")


def save(name: str, result: Mapping[str, Any]) -> Path:
    """Write bench/results/NAME.json and return its path."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def demo_model(size: Any) -> Path:
    """The random model that all benchmarks use, made once in .bench/."""
    from kvrelay.demo_model import make_demo_model

    return make_demo_model(MODELS / f"demo-{size}", size=size)


def end_with_parent() -> None:
    """Called first in a child: a stopped process would outlive whoever was to let it go on."""
    process.end_with_parent(os.getppid())


def commit() -> str | None:
    """Of this checkout; None for a copy without its history, or where there is no git."""
    return _git("rev-parse", "--short", "HEAD")


def _git(*args: str) -> str | None:
    """What it says, which may be nothing; None where it cannot say."""
    try:
        done = subprocess.run(["git", *args], cwd=REPO, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_name() -> str:
    names = [line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


class CpuWatch:
    """CPU seconds between `begin` and `end`, by part; `parts` gives the processes of each, and is asked at both ends.

    What a process used before `begin` does not count; one that ended in between is counted as other work.
    """

    def __init__(self, parts: Callable[[], Mapping[str, list[int]]]) -> None:
        self._parts = parts
        self._before: dict[int, float] = {}

    def begin(self) -> None:
        self._before = {pid: _cpu_s(pid) for pids in self._parts().values() for pid in pids}
        self._busy_s, self._stolen_s = _machine_s()
        self._at_s = time.monotonic()

    def end(self) -> dict[str, Any]:
        """{"wall_s", "cpu_s": {part: seconds}, "other_cores", "stolen_cores"}."""
        wall_s = time.monotonic() - self._at_s
        busy_s, stolen_s = _machine_s()
        used = {
            part: round(sum(max(0.0, _cpu_s(pid) - self._before.get(pid, 0.0)) for pid in pids), 3)
            for part, pids in self._parts().items()
        }
        other_s = busy_s - self._busy_s - sum(used.values())
        return {
            "wall_s": round(wall_s, 3),
            "cpu_s": used,
            "other_cores": round(max(0.0, other_s) / wall_s, 3),
            "stolen_cores": round((stolen_s - self._stolen_s) / wall_s, 3),
        }


def _cpu_s(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def _machine_s() -> tuple[float, float]:
    """CPU seconds used since boot on all cores, and those that the hypervisor took."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + times.irq + times.softirq, times.steal


def other_cores(look_s: float = LOOK_S) -> float:
    """How many cores are busy now, looked at for `look_s`."""
    busy_s, _ = _machine_s()
    time.sleep(look_s)
    return (_machine_s()[0] - busy_s) / look_s
