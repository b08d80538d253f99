"""A cluster under test: the real command, real Ray, real processes, in a state directory of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

COMMAND = [sys.executable, "-m", "kvrelay.cli.main"]
START_TIMEOUT_S = 240.0
RETURN_TIMEOUT_S = 120.0


def kvrelay(
    state_dir: Path, *arguments: str, timeout_s: float = START_TIMEOUT_S, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        env=environment(state_dir) | variables,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def environment(state_dir: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "KVRELAY_"))}
    return kept | {"XDG_STATE_HOME": str(state_dir), "COLUMNS": "120"}


@dataclass(frozen=True)
class Running:
    state_dir: Path
    summary: Mapping[str, Any]  # what `up --json` printed

    @property
    def name(self) -> str:
        return str(self.summary["name"])

    @property
    def endpoint(self) -> str:
        return str(self.summary["endpoints"][0])

    @property
    def token(self) -> str:
        """As a client finds it that has the same state directory."""
        return str(self.state["token"])

    @property
    def daemon(self) -> psutil.Process:
        return psutil.Process(self.state["pid"])

    @property
    def state(self) -> dict[str, Any]:
        path = self.state_dir / "kvrelay" / "clusters" / f"{self.name}.json"
        return dict(json.loads(path.read_text()))

    def processes(self) -> list[psutil.Process]:
        """The background process and everything under it: Ray's own processes, workers, routers."""
        return [self.daemon, *self.daemon.children(recursive=True)]

    def actors(self, kind: str) -> set[int]:
        """Process ids of the actors of a class, such as PrefillActor. Ray writes the name into the command line."""
        return {process.pid for process in self.processes() if kind in title(process)}

    def status(self) -> dict[str, Any]:
        return dict(json.loads(kvrelay(self.state_dir, "status", "--endpoint", self.endpoint, "--json").stdout))


def title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def until(holds: Callable[[], bool], what: str, timeout_s: float = RETURN_TIMEOUT_S) -> None:
    """For what no event tells a test: another process's view of things."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.1)


def gone(processes: list[psutil.Process], timeout_s: float = 60.0) -> list[psutil.Process]:
    """Those that are still there."""
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
