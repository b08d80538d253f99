"""ProcessWatch knows whether a process has exited.

One that cannot be watched (no descriptor left) never counts as dead: then only its own word frees the pages that it
may write into.
"""

from __future__ import annotations

import errno
import logging
import os
import select

log = logging.getLogger(__name__)


class ProcessWatch:
    def __init__(self, pid: int) -> None:
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

    def close(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
