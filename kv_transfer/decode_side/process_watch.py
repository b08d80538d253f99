"""ProcessWatch knows whether a process has exited, and can end one that hangs while it may write into our memory.

One that cannot be watched (no descriptor left) never counts as dead: then only its own word frees the pages that it
may write into.

Why a kill, and nothing gentler: a process that was stopped in the middle of a copy goes on with it when it is woken,
before it looks at anything that we could revoke. Its mapping of our memory cannot be taken from it, and moving the
pages' bytes elsewhere would have to be done in every process that maps them. Its end is the one thing that surely ends
its writes; whoever keeps it starts another, and one that answers nothing is of no use to anybody else, either.

A prefill worker names its pid itself. So only a process is killed that has the pair's own file mapped, which none does
that is not the pair's sender; the pidfd stands for the process that was looked at, whatever becomes of its number.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import select
import signal
from pathlib import Path

log = logging.getLogger(__name__)


class ProcessWatch:
    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._pidfd = -1
        self._was_gone = False
        try:
            self._pidfd = os.pidfd_open(pid)
        except OverflowError:
            self._was_gone = True
        except OSError as error:
            self._was_gone = error.errno in (errno.ESRCH, errno.EINVAL)  # no such process, or not the number of one
            if not self._was_gone:
                log.warning("process %d cannot be watched: %s", pid, error)

    @property
    def has_exited(self) -> bool:
        if self._pidfd < 0:
            return self._was_gone
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def kill(self, mapped_inode: int) -> str:
        """Kill it if it has the memory file of that inode mapped. Why that cannot be; empty: it is dead, or dying."""
        if self.has_exited:
            return ""
        if self._pidfd < 0:
            return f"process {self._pid} cannot be watched"
        if self._pid == os.getpid():
            return "it is this very process"
        try:
            if not _has_mapped(self._pid, mapped_inode):
                return f"process {self._pid} is not the sender"
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        except ProcessLookupError:
            return ""
        except OSError as error:
            return f"process {self._pid} cannot be killed: {error.strerror}"
        return ""

    def close(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def _has_mapped(pid: int, inode: int) -> bool:
    """Raises OSError where its maps may not be read."""
    maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    return re.search(rf"^\S+ \S+ \S+ \S+ {inode} +/memfd:kvrelay-", maps, re.MULTILINE) is not None
