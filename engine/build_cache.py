"""Where what is compiled for this machine is kept, and that it is built once however many processes want it at a time.

$XDG_CACHE_HOME/kvrelay, or ~/.cache/kvrelay, or a folder of one's own beside the temporary files. An artefact is a file
or a folder, named by a hash of all it depends on; it is built under a lock and appears whole, by a rename once the disk
has it: two that build it beside each other are slow, and not wrong. The caller knows what is built and how.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from select import select
from typing import IO

logger = logging.getLogger(__name__)

PATIENCE_S = 300.0  # with another that builds or measures the same; most are done in one
POLL_S = 0.1


class NoCacheFolder(Exception):
    """There is no folder to keep things in: one sentence with the mend."""


def cache_folder() -> Path:
    """Made if need be. Raises NoCacheFolder."""
    try:
        path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvrelay"
        path.mkdir(parents=True, exist_ok=True)
        if os.access(path, os.W_OK):
            return path
    except (OSError, RuntimeError):  # a user without a home
        pass
    path = Path(tempfile.gettempdir()) / f"kvrelay-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    if path.stat().st_uid != os.getuid():
        raise NoCacheFolder(f"{path} belongs to somebody else; set XDG_CACHE_HOME to a directory of your own")
    return path


@contextmanager
def locked(path: Path, patience_s: float = math.inf) -> Iterator[None]:
    """One process at a time, by a file beside `path`. Whoever has waited for `patience_s` goes on beside the holder,
    which may be stopped."""
    with open(path.with_name(f"{path.name}.lock"), "a+") as lock:
        if _is_taken(lock, patience_s):
            lock.truncate(0)
            print(os.getpid(), file=lock, flush=True)
        else:
            lock.seek(0)
            holder = f"process {lock.read().strip() or 'unknown'}"
            logger.warning("%s has held %s for %g s; it is waited for no longer: end it", holder, lock.name, patience_s)
        yield


def _is_taken(lock: IO[str], patience_s: float) -> bool:
    waited_s = 0.0  # by no clock: the planner builds here, too, and imports none
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waited_s >= patience_s:
                return False
            select([], [], [], POLL_S)
            waited_s += POLL_S
        else:
            return True


def built_once(path: Path, build: Callable[[Path], None]) -> Path:
    """`path`, which `build` has made at the place it is given, now or earlier. What `build` raises is raised here, and
    nothing stays of what it began."""
    if path.exists():
        return path
    with locked(path, PATIENCE_S):
        if path.exists():
            return path
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            build(unfinished)
            _settle(unfinished)
            os.replace(unfinished, path)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
            if unfinished.is_file():
                unfinished.unlink()
    return path


def _settle(made: Path) -> None:
    """Whoever finds half a library after the machine lost its power is killed by loading it, at each start."""
    for path in (made, *made.rglob("*")):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
