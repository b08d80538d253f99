"""The state files: which clusters this user started from this machine, where they answer, and which process to end.

One JSON file for each cluster, readable by its owner only (it holds the cluster's secret), under
$XDG_STATE_HOME/kvrelay/clusters or ~/.kvrelay/clusters. A file whose process is gone is stale and counts for nothing.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from kvrelay.cli.console import CliError

Mode = Literal["foreground", "daemon", "joined"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterState:
    name: str
    mode: Mode  # joined: the actors live in a Ray that goes on without us
    pid: int  # of `kvrelay up`; 0 when joined and detached
    pid_created_s: float  # so that a pid that was given again is not taken for ours
    address: str = ""  # joined: of the Ray
    endpoints: tuple[str, ...] = ()  # empty until ready
    model: str = ""
    secret: str = field(default="", repr=False)

    @property
    def is_alive(self) -> bool:
        """Joined and detached ones are believed: only their Ray could say."""
        return self.mode == "joined" or is_process(self.pid, self.pid_created_s)


def directory() -> Path:
    base = os.environ.get("XDG_STATE_HOME")
    root = Path(base) / "kvrelay" if base else Path.home() / ".kvrelay"
    return root / "clusters"


def make_directory() -> None:
    """Raises CliError when nothing can be written there."""
    try:
        directory().mkdir(parents=True, exist_ok=True)
        if not os.access(directory(), os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise CliError(f"{directory()} cannot be written: {why}; set XDG_STATE_HOME to a directory that can") from None


def log_path(name: str) -> Path:
    return directory() / f"{name}.log"


def this_process(name: str, mode: Mode) -> ClusterState:
    import psutil

    return ClusterState(name=name, mode=mode, pid=os.getpid(), pid_created_s=psutil.Process().create_time())


def is_process(pid: int, created_s: float) -> bool:
    import psutil

    try:
        process = psutil.Process(pid)
        is_same = abs(process.create_time() - created_s) < 1.0
        return bool(is_same and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def write(state: ClusterState) -> None:
    """Whole or not at all; never readable by others."""
    path = _path(state.name)
    make_directory()
    made = path.with_suffix(f".{os.getpid()}.tmp")
    with os.fdopen(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(asdict(state), file)
    made.replace(path)


def read(name: str) -> ClusterState | None:
    """None when there is none, or it cannot be read."""
    try:
        data = json.loads(_path(name).read_text())
        return replace(ClusterState(**data), endpoints=tuple(data["endpoints"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def remove(name: str) -> None:
    _path(name).unlink(missing_ok=True)


def alive() -> Iterator[ClusterState]:
    """The clusters that run, by name."""
    for path in sorted(directory().glob("*.json")):
        state = read(path.stem)
        if state is not None and state.is_alive:
            yield state


def _path(name: str) -> Path:
    return directory() / f"{name}.json"
