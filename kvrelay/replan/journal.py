"""The journal of decisions about roles: lines of JSON, one for each time that arrangements were weighed. A cluster has
one, whichever of its routers is asked, and a cluster that is started anew begins another.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from kvrelay.client.types import KvrelayError
from kvrelay.known_clusters import directory, noted
from worker.wire.private_files import make_private_folder, write_private

if TYPE_CHECKING:
    from kvrelay.client.client import Client
    from kvrelay.client.types import ClusterStatus

log = logging.getLogger(__name__)

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
    """`measured`: the share of requests that met their targets. `changes`: what was decided, and what came of it. Of
    no requests: nothing could be looked at."""

    at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))  # ISO 8601
    roles: Mapping[str, str] = field(default_factory=dict)
    requests: int = 0
    rate: float = 0.0
    measured: float = 0.0
    reason: str
    mode: str  # advise or act
    tried: Sequence[dict[str, Any]] = ()  # roles, chunks and attainment of each arrangement that was played
    changes: Sequence[Change] = ()


class Journal:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock: TextIO | None = None

    def hold(self) -> bool:
        """Be the one who has workers change, until this process ends; False: another process is. Raises KvrelayError
        where no lock can be had."""
        path = self._path.with_suffix(".lock")
        try:
            self._make_folder()
            self._lock = path.open("w")
        except OSError as error:
            raise _refused(f"{path}, by which one process alone has workers change, cannot be written", error) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def note_last_at(self, endpoints: Sequence[str]) -> None:
        """That this is of the cluster there."""
        with self._written_or_told():
            self._make_folder()
            for endpoint in endpoints:
                write_private(_last_at(endpoint), self._path.stem)

    def _make_folder(self) -> None:
        make_private_folder(self._path.parent.parent)
        make_private_folder(self._path.parent)

    def add(self, entry: Entry) -> None:
        with self._written_or_told():
            self._make_folder()
            with self._path.open("ab+") as file:
                if _is_torn(file):
                    file.write(b"\n")
                file.write(f"{json.dumps(asdict(entry))}\n".encode())
                size = file.tell()
            if size > MOST_BYTES:
                lines = self._path.read_text().splitlines(keepends=True)
                write_private(self._path, "".join(lines[len(lines) // 2 :]))

    @contextmanager
    def _written_or_told(self) -> Iterator[None]:
        """What is decided does not wait for a disk that is full."""
        try:
            yield
        except OSError as error:
            log.warning("the journal of decisions %s cannot be written: %s", self._path, error.strerror or error)

    def last(self, count: int) -> list[dict[str, Any]]:
        """The newest last; none where nothing was written. Raises KvrelayError for what cannot be read."""
        try:
            lines = self._path.read_text().splitlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _refused(f"the journal of decisions {self._path} cannot be read", error) from None
        return [entry for line in lines[-count:] if (entry := _read(line))]


def _refused(what: str, error: OSError) -> KvrelayError:
    why = (error.strerror or str(error)).lower()
    return KvrelayError("FAILED_PRECONDITION", f"{what}: {why}; mend that, or give another XDG_STATE_HOME")


def changes_of(entry: Mapping[str, Any]) -> Iterator[str]:
    """For people: what changes, or should, and what came of it."""
    for change in entry["changes"]:
        verb = "becomes" if entry["mode"] == "act" else "should become"
        took = change["failure"] or (f"after {change['seconds']:g} s" if change["seconds"] else "")
        yield f"{_named(change, verb)}{f': {took}' if took else ''}"


def _named(change: Mapping[str, Any], verb: str) -> str:
    if pool := change.get("pool"):
        return f"{pool} {verb} a pool of {change['replicas']}"
    chunks = change.get("chunk_tokens")
    return f"{change['worker']} {verb} a {change['role']} worker{'' if chunks is None else f' with chunks of {chunks}'}"


def journal_at(clients: Sequence[Client]) -> Journal:
    """Of the cluster whose routers these speak to, to be written: it is found at them from now on, when no router is
    there any more, too. Raises KvrelayError."""
    journal = _journal_of_first(clients)
    journal.note_last_at([client.endpoint for client in clients])
    return journal


def _journal_of_first(clients: Sequence[Client]) -> Journal:
    """That answers."""
    for client in clients[:-1]:
        with suppress(KvrelayError):
            return journal_of(client.status(), client.endpoint)
    return journal_of(clients[-1].status(), clients[-1].endpoint)


def journal_of(status: ClusterStatus, endpoint: str) -> Journal:
    """Of a router that was told no cluster's id, by where it is."""
    return Journal(_folder() / f"{_file_name(status.cluster_id or noted(endpoint))}.jsonl")


def last_journal_at(endpoint: str) -> Journal:
    """Of the cluster that was there last."""
    try:
        name = _last_at(endpoint).read_text()
    except OSError:
        name = noted(endpoint)
    return Journal(_folder() / f"{_file_name(name)}.jsonl")


def _folder() -> Path:
    return directory().parent / "decisions"


def _last_at(endpoint: str) -> Path:
    return _folder() / f"{_file_name(noted(endpoint))}.last"


def _file_name(told: str) -> str:
    """Of what a router, or a user, has said."""
    return re.sub(r"[^A-Za-z0-9.-]", "_", told)


def _is_torn(file: BinaryIO) -> bool:
    """Its last line is a half one, as a disk that was full leaves it."""
    if not file.seek(0, os.SEEK_END):
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"


def _read(line: str) -> dict[str, Any] | None:
    """None for a line that was torn."""
    try:
        return dict(json.loads(line))
    except ValueError:
        return None
