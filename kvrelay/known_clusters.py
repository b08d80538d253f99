"""The clusters that this user started from this machine, as `kvrelay up` notes them: where they answer, and how a
client of the same user is let in.

One JSON file for each, readable by its owner only, under $XDG_STATE_HOME/kvrelay/clusters or ~/.kvrelay/clusters. One
that is not ours alone counts for nothing, and so does one whose process is gone. It is written by
kvrelay/cli/cluster/state.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from worker.wire.private_files import PrivateFileError, read_private, state_folder

Mode = Literal["foreground", "daemon", "joined"]
LOCALHOST = re.compile(r"^(https?://)?localhost(?=:[^:]*$)")
ENDED = ("Z", "X")  # and not reaped yet
START_FIELD = 22 - 4  # of /proc/PID/stat, behind its state


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterState:
    name: str
    mode: Mode  # joined: the actors live in a Ray that goes on without us
    pid: int  # of `kvrelay up`; 0 when joined and detached
    started: str  # of that process (`start_of`), so that a pid that was given again is not taken for ours
    address: str = ""  # joined: of the Ray
    endpoints: tuple[str, ...] = ()  # empty until ready
    http: tuple[str, ...] = ()  # likewise: URLs of OpenAI's API
    model: str = ""
    token: str = field(default="", repr=False)  # that `up` made, or was given
    tokens_file: str = ""  # whose first token is ours
    tls: bool = False
    tls_ca: str = ""  # of the router's certificate; empty: a public authority

    @property
    def is_alive(self) -> bool:
        """Joined and detached ones are believed: only their Ray could say."""
        return self.mode == "joined" or (bool(self.started) and self.started == start_of(self.pid))


def directory() -> Path:
    return state_folder() / "clusters"


def read(name: str) -> ClusterState | None:
    """None when there is none, or it cannot be read."""
    try:
        data: dict[str, Any] = json.loads(read_private(directory() / f"{name}.json", "the state"))
        return ClusterState(**{**data, **{key: tuple(data.get(key, ())) for key in ("endpoints", "http")}})
    except (PrivateFileError, ValueError, TypeError, KeyError):
        return None


def alive() -> Iterator[ClusterState]:
    """The clusters that run, by name."""
    for path in sorted(directory().glob("*.json")):
        state = read(path.stem)
        if state is not None and state.is_alive:
            yield state


def at(endpoint: str) -> ClusterState | None:
    """The one that runs there. Its token goes to no other address, nor to who took the port when it was gone."""
    wanted = noted(endpoint)
    return next((cluster for cluster in alive() if wanted in cluster.endpoints), None)


def serving(url: str) -> ClusterState | None:
    """The one that serves HTTP there, likewise."""
    return next((cluster for cluster in alive() if noted(url) in cluster.http), None)


def noted(endpoint: str) -> str:
    """As `kvrelay up` writes it. In plain text that is what must be called: localhost may be ::1, too, where somebody
    else may listen."""
    return LOCALHOST.sub(r"\g<1>127.0.0.1", endpoint)


def start_of(pid: int) -> str:
    """Which boot, and when in it: of all processes that ever had the pid, this one's. Empty where there is none. A
    clock that is set anew changes nothing."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # from the third, proc(5)
    except OSError:
        return ""
    return "" if state in ENDED else f"{boot_id} {fields[START_FIELD]}"
