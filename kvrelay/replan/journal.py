"""The journal of decisions about roles: lines of JSON, one for each time that arrangements were weighed."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from kvrelay.client.known_clusters import directory, noted
from worker.wire.private_files import make_private_folder, write_private

MOST_BYTES = 16 << 20  # then the older half is dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Of a worker, its role and chunks (None: as they are); or of a pool, how many workers it has."""

    worker: str = ""
    role: str = ""
    chunk_tokens: int | None = None
    force: bool = False  # new requests waited for it
    pool: str = ""
    replicas: int = 0
    seconds: float = 0.0  # that it took
    failure: str = ""  # why it was given up


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """`measured`: the share of requests that met their targets. `changes`: what was decided, and what came of it."""

    at: str  # ISO 8601, UTC
    roles: dict[str, str]
    requests: int
    rate: float
    measured: float
    reason: str
    mode: str  # advise or act
    tried: Sequence[dict[str, Any]] = ()  # roles, chunks and attainment of each arrangement that was played
    changes: Sequence[Change] = ()


class Journal:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock: TextIO | None = None

    def hold(self) -> bool:
        """Be the one who has workers change, until this process ends; False: another process is."""
        self._make_folder()
        self._lock = self._path.with_suffix(".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def _make_folder(self) -> None:
        make_private_folder(self._path.parent.parent)
        make_private_folder(self._path.parent)

    def add(self, entry: Entry) -> None:
        self._make_folder()
        with self._path.open("a") as file:
            print(json.dumps(asdict(entry)), file=file)
            size = file.tell()
        if size > MOST_BYTES:
            lines = self._path.read_text().splitlines(keepends=True)
            write_private(self._path, "".join(lines[len(lines) // 2 :]))

    def last(self, count: int) -> list[dict[str, Any]]:
        """The newest last; none where nothing was written."""
        try:
            lines = self._path.read_text().splitlines()
        except FileNotFoundError:
            return []
        return [entry for line in lines[-count:] if (entry := _read(line))]


def journal_of(endpoint: str) -> Journal:
    return Journal(directory().parent / "decisions" / f"{noted(endpoint).replace(':', '_').replace('/', '_')}.jsonl")


def _read(line: str) -> dict[str, Any] | None:
    """None for a line that was torn."""
    try:
        return dict(json.loads(line))
    except ValueError:
        return None
