"""What a router keeps of a flood: its memory, how soon health answers meanwhile, whether others are served, and what is
left a minute later.

    python -m bench.flood [--quick] [NAMES...]

The router, its workers, which do no work, the clients of the flood (bench/flood/attacks.py), a probe of health and a
client with a token of its own (onlookers.py) are processes of their own. The floods come one after another; --quick is
a tenth of each. All but the router stand for other machines, so that the router has a high priority, where one may
give it, the probe a higher one, whose own delay shall not count, and the clients of the flood a low one. Beside how
long health took stands how late the router's own loop was. Writes bench/results/flood.json, if all floods were made.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from typing import Any

import psutil

from bench.common import CpuWatch, about, save
from bench.flood.attacks import FLOODS
from bench.router import Child

MOST_RSS_MB = 1000
MOST_CHECK_MS = 100
MORE_RSS_MB = 50  # than before, a minute later
SETTLE_S = 60.0
QUIET_S = 5.0
ROUTER_NICE = -8
RSS_GAP_S = 0.05
FLOOD_TIMEOUT_S = 180.0
TOKEN, OTHER_TOKEN = "flood-0123456789abcdef", "other-0123456789abcdef"
SETTINGS = {"auth": True, "tokens": f"flood:{TOKEN}\nother:{OTHER_TOKEN}"}
UNDOCUMENTED = {"INTERNAL", "UNKNOWN", "hangs"}


def give_priority(pid: int) -> bool:
    """Over all but the probe; False where we may not."""
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.setpriority(os.PRIO_PROCESS, int(thread), ROUTER_NICE)
    except PermissionError:
        return False
    return True


class Memory:
    """The most that a process had since the last look."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._most = 0.0
        threading.Thread(target=self._forever, daemon=True).start()

    def _forever(self) -> None:
        while self._process.is_running():
            self._most = max(self._most, self.now_mb())
            time.sleep(RSS_GAP_S)

    def now_mb(self) -> float:
        try:
            return float(self._process.memory_info().rss) / 2**20
        except psutil.Error:
            return 0.0

    def most_mb(self) -> float:
        most, self._most = max(self._most, self.now_mb()), 0.0
        return round(most, 1)


class Scene:
    """The processes, and what all of them saw since the last look."""

    def __init__(self, stack: ExitStack) -> None:
        workers = Child("workers", "0.05")
        stack.callback(workers.stop)
        self.router = Child(json.dumps(workers.ready["workers"]), json.dumps(SETTINGS), module="bench.flood.router")
        stack.callback(self.router.stop)
        self.has_priority = give_priority(self.router.pid)
        self.address = f"127.0.0.1:{self.router.ready['port']}"
        self.memory = Memory(self.router.pid)
        self._probe = Child("probe", self.address, "", module="bench.flood.onlookers")
        stack.callback(self._probe.stop)
        self._other = Child("client", self.address, OTHER_TOKEN, module="bench.flood.onlookers")
        stack.callback(self._other.stop)
        self._cpu_s = 0.0

    def seen(self) -> dict[str, Any]:
        probe, other, router = self._probe.asked(), self._other.asked(), self.router.asked()
        cpu_s, self._cpu_s = router["cpu_s"] - self._cpu_s, router["cpu_s"]
        return {
            "most_rss_mb": self.memory.most_mb(),
            "router_cpu_s": round(cpu_s, 2),
            "check_ms": probe["ms"],
            "check_codes": probe["codes"],
            **router["loop"],
            "other_client": {"ttft_ms": other["ms"], "codes": other["codes"]},
        }

    def baseline(self) -> dict[str, Any]:
        kept: dict[str, Any] = self.router.asked("settle")["kept"]
        return kept | {"rss_mb": round(self.memory.now_mb(), 1)}

    def flood(self, name: str, count: int) -> dict[str, Any]:
        self.seen()
        command = [sys.executable, "-m", "bench.flood.attacks", name, self.address, TOKEN, str(count)]
        began_s = time.monotonic()
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=FLOOD_TIMEOUT_S)
        wall_s = round(time.monotonic() - began_s, 1)
        return {"count": count, "codes": json.loads(done.stdout), "wall_s": wall_s} | self.seen()


def measured(names: list[str], share: float, settle_s: float) -> dict[str, Any]:
    with ExitStack() as stack:
        scene = Scene(stack)
        scene.flood("requests_at_once", 20)  # what is made at first use
        time.sleep(QUIET_S)
        scene.seen()
        time.sleep(QUIET_S)
        quiet, before = scene.seen(), scene.baseline()
        watch = CpuWatch(lambda: {"router": [scene.router.pid]})
        watch.begin()
        parts = {}
        for name in names:
            parts[name] = scene.flood(name, max(1, round(FLOODS[name][1] * share)))
            print(f"{name}: {json.dumps(parts[name])}", flush=True)
        cpu = watch.end()
        time.sleep(settle_s)
        told = {"router_has_priority": scene.has_priority, "quiet": quiet}
        return told | {"parts": parts, "before": before, "after": scene.baseline(), "cpu": cpu}


def verdicts(result: dict[str, Any]) -> dict[str, bool]:
    parts, before, after = result["parts"].values(), result["before"], result["after"]
    counted = ("calls", "watches", "requests", "unread_bytes", "tasks", "threads", "system_threads", "files")
    return {
        f"below {MOST_RSS_MB} MB": max(part["most_rss_mb"] for part in parts) < MOST_RSS_MB,
        f"health within {MOST_CHECK_MS} ms": max(part["check_ms"]["max"] for part in parts) < MOST_CHECK_MS,
        "health always answers": all(part["check_codes"].keys() == {"OK"} for part in parts),
        "the other client is served": all(part["other_client"]["codes"].keys() == {"OK"} for part in parts),
        "documented codes only": not any(UNDOCUMENTED & part["codes"].keys() for part in parts),
        "back within a minute": after["rss_mb"] < before["rss_mb"] + MORE_RSS_MB,
        "nothing kept": all(after[name] <= before[name] + SLACK.get(name, 0) for name in counted),
    }


# the other client's own request may be there at one look and not at the other; gRPC's threads come and go, and asyncio
# keeps some for what blocks
SLACK = {"calls": 1, "requests": 1, "unread_bytes": 1 << 16, "tasks": 4, "threads": 4, "system_threads": 8, "files": 2}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.flood", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of it, and 10 s until the end; writes no file")
    parser.add_argument("names", nargs="*", choices=[[], *FLOODS], help="of the floods; all when none is given")
    arguments = parser.parse_args()
    share, settle_s = (0.1, SETTLE_S / 6) if arguments.quick else (1.0, SETTLE_S)
    result = about() | {"share": share} | measured(arguments.names or list(FLOODS), share, settle_s)
    result["kept"] = verdicts(result)
    print(json.dumps({key: result[key] for key in ("quiet", "before", "after", "cpu", "kept")}, indent=1))
    if not arguments.quick and not arguments.names:
        print(save("flood", result))
    return 0 if all(result["kept"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
