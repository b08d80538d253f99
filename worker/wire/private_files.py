"""Files and folders that only their owner may read: keys, tokens, what `kvrelay up` notes of a cluster.

The rule for a file is that of PostgreSQL's server.key: ours and open to nobody else, or root's and open to its group
(as Kubernetes mounts a secret). What is opened is what is asked, so a link may stand anywhere. No sentence shows what
stands in one.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

MAX_BYTES = 1 << 20


class PrivateFileError(ValueError):
    """A file or folder that cannot be trusted or read: one sentence that names it and the mend."""


def read_private(path: str | Path, what: str) -> bytes:
    """Raises PrivateFileError, which begins with `what`, such as "the key"."""
    shown = f"{what} {str(path)!r}"
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe without a writer keeps nobody
        with open(opened, "rb") as file:
            if why := _why_open(os.fstat(opened)):
                raise PrivateFileError(f"{shown} {why}")
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, PrivateFileError):
            raise
        why = (getattr(error, "strerror", None) or str(error)).lower()
        raise PrivateFileError(f"{shown} cannot be read: {why}; give the path of a file") from None
    if len(content) > MAX_BYTES:
        raise PrivateFileError(f"{shown} has more than {MAX_BYTES} bytes; give another")
    return content


def _why_open(known: os.stat_result) -> str:
    """Why such a file keeps no secret; empty when it does."""
    mode = stat.S_IMODE(known.st_mode)
    if not stat.S_ISREG(known.st_mode):
        return "is no plain file; give the path of one"
    if known.st_uid not in (os.geteuid(), 0):
        return f"belongs to another user ({known.st_uid}); give one of your own"
    if mode & (0o077 if known.st_uid else 0o037):
        return f"is open to others (mode {mode:04o}); chmod 600 it"
    return ""


def write_private(path: Path, content: str) -> None:
    """Whole or not at all; never readable by others."""
    made = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with os.fdopen(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w") as file:
            file.write(content)
        made.replace(path)
    except OSError:  # a full disk
        made.unlink(missing_ok=True)
        raise


def state_folder() -> Path:
    """Where this user's state is kept; a user without a home, as in some containers, is told when it is written."""
    base = os.environ.get("XDG_STATE_HOME")
    if base:
        return Path(base) / "kvrelay"
    try:
        return Path.home() / ".kvrelay"
    except RuntimeError:
        return Path("/") / ".kvrelay"


def make_private_folder(path: Path) -> None:
    """Only we may enter it. Raises OSError when it cannot be made, or another user has made it before us."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    known = path.lstat()
    if known.st_uid != os.geteuid() or not stat.S_ISDIR(known.st_mode):
        raise PermissionError(errno.EPERM, "it belongs to another user")
    if stat.S_IMODE(known.st_mode) & 0o077:
        path.chmod(0o700)
