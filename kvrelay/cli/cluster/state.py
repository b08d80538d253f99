"""The state files as `kvrelay up` writes them; kvrelay/known_clusters.py says what they are and reads them."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from kvrelay.cli.console import CliError
from kvrelay.known_clusters import ClusterState, Mode, directory, read, start_of
from worker.wire.private_files import make_private_folder, write_private


@contextmanager
def written_or_told() -> Iterator[None]:
    """What cannot be written there, as CliError."""
    try:
        yield
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise CliError(f"{directory()} cannot be written: {why}; set XDG_STATE_HOME to a directory that can") from None


def make_directory() -> None:
    """Raises CliError when nothing can be written there, or others could."""
    with written_or_told():
        make_private_folder(directory().parent)
        make_private_folder(directory())
        if not os.access(directory(), os.W_OK):
            is_read_only = os.statvfs(directory()).f_flag & os.ST_RDONLY
            why = errno.EROFS if is_read_only else errno.EACCES
            raise OSError(why, os.strerror(why))


def log_dir(name: str) -> Path:
    """Of a cluster on a Ray of its own, unless told otherwise; it outlives the cluster."""
    return directory().parent / "logs" / name


def log_path(name: str) -> Path:
    """What `up --detach` has to say."""
    return log_dir(name) / "up.log"


def this_process(name: str, mode: Mode) -> ClusterState:
    return of_process(os.getpid(), name, mode)


def of_process(pid: int, name: str, mode: Mode) -> ClusterState:
    return ClusterState(name=name, mode=mode, pid=pid, started=start_of(pid))


def write(state: ClusterState) -> None:
    """Whole or not at all; never readable by others. Raises CliError."""
    make_directory()
    with written_or_told():
        write_private(_path(state.name), json.dumps(asdict(state)))


def check_name(name: str, *, is_joined: bool) -> None:
    """What was left in a Ray is that Ray's to say, if it is to be joined; what was noted of this process is no other's.
    Raises CliError."""
    running = read(name)
    if (
        running is None
        or not running.is_alive
        or (is_joined if running.mode == "joined" else running.pid == os.getpid())
    ):
        return
    where = f"in the Ray at {running.address}" if running.mode == "joined" else f"process {running.pid}"
    raise CliError(
        f"a cluster named {name} runs already ({where}); end it with `kvrelay down {name}`, or give another --name"
    )


def claim(state: ClusterState) -> None:
    """Write it, unless another `up` has taken the name since it was looked for. Raises CliError."""
    with _locked():
        check_name(state.name, is_joined=False)
        write(state)


def claim_for(child: ClusterState) -> None:
    """As `claim`, for a process that does it itself later on, and says more then, or has done so. Raises CliError."""
    with _locked():
        noted = read(child.name)
        if noted is None or noted.pid != child.pid:
            check_name(child.name, is_joined=False)
            write(child)


@contextmanager
def _locked() -> Iterator[None]:
    """One process at a time. Raises CliError."""
    make_directory()
    with written_or_told():
        descriptor = os.open(directory() / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def remove_own(name: str, pid: int | None = None) -> None:
    """Of this process, or that one; unless it is another's by now."""
    noted = read(name)
    if noted is not None and noted.pid == (pid or os.getpid()):
        remove(name)


def remove(name: str) -> None:
    _path(name).unlink(missing_ok=True)


def _path(name: str) -> Path:
    return directory() / f"{name}.json"
