"""Start-up: seconds from `kvrelay up` to ready, memory of each process, and the CPU that a cluster without work uses.

    python -m bench.startup [--quick] [--size 125m] [--model DIRECTORY] [--repeat 3]

Each start is a process of its own, from nothing; the first one warms the page cache and is reported apart. Also says
how much of a start is Ray's own (`ray.init` and nothing else, measured beside it), for that is what a ratio can be
made of on a shared machine. Writes bench/results/startup.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

from bench.common import about, save
from kvrelay.demo_model import make_demo_model

IDLE_S = 10.0
SETTLE_S = 2.0
RAY_ALONE = """
import time; began = time.monotonic()
from cluster.deploy.own_ray.local_ray import LocalRay
ray = LocalRay(); ray.start("bench", {"CPU": 2})
print(time.monotonic() - began)
ray.stop()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=("tiny", "125m"), default="125m")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--model", type=Path, help="another one, in this directory; writes no file")
    parser.add_argument("--quick", action="store_true", help="a tiny model, one start after the first; writes no file")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.size, arguments.repeat = "tiny", 1
    with tempfile.TemporaryDirectory(prefix="kvrelay-startup-") as directory:
        model = arguments.model or make_demo_model(Path(directory) / "model", size=arguments.size)
        runs = [_one_start(model, Path(directory)) for _ in range(arguments.repeat + 1)]
    ray_alone_s = [_ray_alone() for _ in range(arguments.repeat)]
    result = _summary(arguments.model.name if arguments.model else arguments.size, runs[0], runs[1:], ray_alone_s)
    if not arguments.quick and not arguments.model:
        save("startup", about() | result)
    _show(result)


def _one_start(model: Path, state_dir: Path) -> dict[str, Any]:
    """Start, look, wait idle, end."""
    command = [sys.executable, "-m", "kvrelay.cli.main", "up", "--model", str(model), "--port", "0", "--json"]
    began = time.monotonic()
    up = subprocess.Popen(command, env=os.environ | {"XDG_STATE_HOME": str(state_dir)}, stdout=subprocess.PIPE)
    assert up.stdout is not None
    ready = json.loads(up.stdout.readline())
    ready_s = time.monotonic() - began
    time.sleep(SETTLE_S)
    processes = [psutil.Process(up.pid), *psutil.Process(up.pid).children(recursive=True)]
    memory = _memory(processes)
    cpu_percent = _idle_cpu(processes)
    began = time.monotonic()
    up.terminate()
    code = up.wait(60)
    return {
        "ready_s": round(ready_s, 2),
        "ready_reported_s": ready["ready_s"],
        "stop_s": round(time.monotonic() - began, 2),
        "exit_code": code,
        "memory_mb": memory,
        "idle_cpu_percent": cpu_percent,
    }


def _name(process: psutil.Process) -> str:
    """ray::DecodeActor -> DecodeActor; else the program or the script."""
    words: list[str] = process.cmdline() or [process.name()]
    if words[0].startswith("ray::"):
        return words[0].removeprefix("ray::").partition(".")[0]
    if "cluster.deploy.forks.server" in words:
        return "fork server"
    if "kvrelay.cli.main" in words:
        return "up"
    return next((Path(word).stem for word in words if word.endswith(".py")), Path(words[0]).name)


def _memory(processes: list[psutil.Process]) -> dict[str, float]:
    """Proportional set size by name, in MB: pages that processes share are counted once in the sum."""
    return _summed((process, process.memory_full_info().pss / 1e6) for process in processes)


def _idle_cpu(processes: list[psutil.Process]) -> dict[str, float]:
    """Percent of one core over IDLE_S, by name."""
    before = [sum(process.cpu_times()[:2]) for process in processes]
    time.sleep(IDLE_S)
    after = [sum(process.cpu_times()[:2]) for process in processes]
    used = zip(processes, before, after, strict=True)
    return _summed((process, 100 * (end - begin) / IDLE_S) for process, begin, end in used)


def _summed(values: Iterable[tuple[psutil.Process, float]]) -> dict[str, float]:
    total: defaultdict[str, float] = defaultdict(float)
    for process, value in values:
        total[_name(process)] += value
    return {name: round(value, 2) for name, value in total.items()}


def _ray_alone() -> float:
    return float(subprocess.run([sys.executable, "-c", RAY_ALONE], capture_output=True, text=True, check=True).stdout)


def _summary(size: str, cold: dict[str, Any], warm: list[dict[str, Any]], ray_alone_s: list[float]) -> dict[str, Any]:
    ready_s = statistics.median(run["ready_s"] for run in warm)
    alone_s = statistics.median(ray_alone_s)
    last = warm[-1]
    return {
        "model": size,
        "workers": "1 prefill, 1 decode",
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "first_start_s": cold["ready_s"],
        "ready_s": ready_s,
        "ready_s_all": [run["ready_s"] for run in warm],
        "ray_alone_s": round(alone_s, 2),
        "share_that_is_ray": round(alone_s / ready_s, 2),
        "stop_s": statistics.median(run["stop_s"] for run in warm),
        "memory_mb": last["memory_mb"],
        "memory_total_mb": round(sum(last["memory_mb"].values()), 1),
        "idle_cpu_percent": last["idle_cpu_percent"],
        "idle_cpu_total_percent": round(sum(last["idle_cpu_percent"].values()), 2),
    }


def _show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"start-up, {result['model']} model, {result['workers']}")
    for column in ("process", "memory MB", "idle CPU %"):
        table.add_column(column, justify="left" if column == "process" else "right")
    for name, memory in result["memory_mb"].items():
        table.add_row(name, f"{memory:.0f}", f"{result['idle_cpu_percent'][name]:.1f}")
    table.add_row("all", f"{result['memory_total_mb']:.0f}", f"{result['idle_cpu_total_percent']:.1f}")
    console = Console()
    console.print(table)
    console.print(
        f"ready in {result['ready_s']:.1f} s (first start {result['first_start_s']:.1f} s), of which Ray alone takes "
        f"{result['ray_alone_s']:.1f} s ({result['share_that_is_ray']:.0%}); stopped in {result['stop_s']:.1f} s"
    )


if __name__ == "__main__":
    main()
