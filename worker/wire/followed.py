"""Followed is what some files say: read anew when they change.

Files that cannot be used (half renewed, unreadable) change nothing: the log says why, once, and they are tried again
until they can. It watches nothing by itself; whoever asks is answered.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")
Stamp = list[tuple[int, ...] | None]


class Followed(Generic[T]):
    def __init__(self, paths: Sequence[str], read: Callable[[], T], what: str) -> None:
        """Raises what `read` does: OSError or ValueError, for files of no use. `what` names them in the log."""
        self._paths, self._read, self._what = paths, read, what
        self._stamp = _stamp(paths)  # before they are read: what changes meanwhile is read again
        self._complaint = ""
        self.value = read()

    def renew(self) -> bool:
        """Whether `value` is another than before."""
        stamp = _stamp(self._paths)
        if stamp == self._stamp:
            return False
        try:
            self.value = self._read()
        except (OSError, ValueError) as error:
            if str(error) != self._complaint:
                log.error("%s stay as they were: %s", self._what, error)
            self._complaint = str(error)
            return False
        self._stamp, self._complaint = stamp, ""
        log.info("%s are read anew", self._what)
        return True


def _stamp(paths: Sequence[str]) -> Stamp:
    """Changes when a file does, in content, mode or owner; None for one that is not there."""
    stamp: Stamp = []
    for path in paths:
        try:
            known = Path(path).stat()
        except (OSError, ValueError):
            stamp.append(None)
        else:
            stamp.append((known.st_dev, known.st_ino, known.st_ctime_ns))
    return stamp
