"""RayCluster is what a user has: `kvrelay up`, with Ray and the controller that keep its processes. Faults come from
outside, by signals. A restart takes seconds here, so that few cells go to it: those that are the deployment's to mend.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import yaml

from cluster.deploy.own_ray.local_ray import is_there
from kvrelay.chaos.targets.base import ProcessState, Shape, states_of

COMMAND = (sys.executable, "-m", "kvrelay.cli.main")
START_S, STOP_S, GONE_S = 240.0, 60.0, 5.0
TITLES = {"prefill": "PrefillActor", "decode": "DecodeActor", "router": "RouterActor", "controller": "Controller"}
NAME = "chaos"


class RayCluster:
    """`spec` is what `kvrelay up` is given."""

    def __init__(self, shape: Shape, folder: Path, spec: Mapping[str, Any], settings: Mapping[str, float]) -> None:
        self.endpoint = self.watch_endpoint = ""
        self.start_s = 0.0
        self.settings: Mapping[str, float] = settings
        self._counts = {"prefill": shape.prefill, "decode": shape.decode, "router": 1, "controller": 1}
        self._folder = folder
        self._spec = spec
        self._daemon: psutil.Process | None = None
        self._pids: dict[str, int] = {}  # as last looked up
        self._ended_s: dict[str, float] = {}
        self._seen: dict[int, psutil.Process] = {}

    async def start(self) -> None:
        path = self._folder / "cluster.yaml"
        path.write_text(yaml.safe_dump(dict(self._spec)))
        began_s = time.monotonic()
        up = await asyncio.to_thread(self._command, "up", str(path), "--detach", "--json", timeout_s=START_S)
        if up.returncode:
            raise TimeoutError(f"kvrelay up ended {up.returncode}: {up.stderr.strip() or up.stdout.strip()}")
        self.endpoint = self.watch_endpoint = str(json.loads(up.stdout)["endpoints"][0])
        state = json.loads((self._folder / "kvrelay" / "clusters" / f"{NAME}.json").read_text())
        self.start_s = time.monotonic() - began_s  # of all at once and of Ray: one alone takes no longer
        self._daemon = psutil.Process(state["pid"])
        self._look()

    async def stop(self) -> list[int]:
        self._look()
        self.heal()
        await asyncio.to_thread(self._command, "down", NAME, timeout_s=STOP_S)
        await asyncio.to_thread(psutil.wait_procs, list(self._seen.values()), GONE_S)
        return [process.pid for process in self._seen.values() if is_there(process)]

    def _command(self, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "KVRELAY_"))}
        environment = kept | {"XDG_STATE_HOME": str(self._folder)}
        return subprocess.run(
            [*COMMAND, *arguments], env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def names(self, role: str) -> list[str]:
        if role == "controller":
            return [role]
        return [f"{role}-{index}" for index in range(self._counts[role])]

    def pid(self, name: str) -> int:
        self._look()
        return self._pids.get(name, 0)

    def ended_s(self, name: str) -> float:
        self._look()
        return self._ended_s.get(name, 0.0)

    def is_ready(self, name: str) -> bool:
        return bool(self.pid(name))

    def signal(self, name: str, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if pid := self.pid(name):
                os.kill(pid, number)

    def heal(self) -> None:
        for name in self._pids:
            self.signal(name, signal.SIGCONT)

    def states(self) -> dict[int, ProcessState]:
        self._look()
        return states_of(self._seen[pid] for pid in self._pids.values() if pid)

    def _look(self) -> None:
        """Who runs under which name. Ray writes an actor's class into its command line, not its name: a role's
        processes have its names in the order of their starts."""
        if self._daemon is None:
            return
        with contextlib.suppress(psutil.Error):
            for process in self._daemon.children(recursive=True):
                self._seen.setdefault(process.pid, process)
        running = {pid: process for pid, process in self._seen.items() if is_there(process)}
        titles = {pid: _title(process) for pid, process in running.items()}
        for role, title in TITLES.items():
            pids = [pid for pid in running if title in titles[pid]]
            self._note(role, pids)

    def _note(self, role: str, pids: list[int]) -> None:
        for name in self.names(role):
            if self._pids.get(name) and self._pids[name] not in pids:
                self._pids[name], self._ended_s[name] = 0, time.monotonic()
        new = [pid for pid in pids if pid not in self._pids.values()]
        for name in self.names(role):
            if not self._pids.get(name) and new:
                self._pids[name] = new.pop(0)


def _title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""
