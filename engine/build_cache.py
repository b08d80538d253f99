"""Where what is compiled for this machine is kept, and that it is built once however many processes want it at a time.

$XDG_CACHE_HOME/kvrelay, or ~/.cache/kvrelay, or a folder of one's own beside the temporary files. An artefact is a file
or a folder, named by a hash of all it depends on; it is built under a lock and appears whole, by a rename. The caller
knows what is built and how.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


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
def locked(path: Path) -> Iterator[None]:
    """One process at a time, by a file beside `path`."""
    with open(path.with_name(f"{path.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def built_once(path: Path, build: Callable[[Path], None]) -> Path:
    """`path`, which `build` has made at the place it is given, now or earlier. What `build` raises is raised here, and
    nothing stays of what it began."""
    if path.exists():
        return path
    with locked(path):
        if path.exists():
            return path
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            build(unfinished)
            os.replace(unfinished, path)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
            if unfinished.is_file():
                unfinished.unlink()
    return path
