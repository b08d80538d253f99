"""What memory this process may still take, and a file in memory (memfd) that takes all of its own.

A memfd is sparse: one larger than the machine shows as nothing until it is written, and then as a process that the
kernel kills under load. So what is not there is refused in a sentence, and what is there is taken, not when it is first
written.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.limits.cgroups import CGROUPS, PROC, groups

logger = logging.getLogger(__name__)

GIB = 1 << 30
AT_ONCE_BYTES = 64 << 20
PIECE_BYTES = 16 << 20
NICEST = 19


@dataclass(frozen=True, slots=True)
class FreeMemory:
    num_bytes: int
    where: str


class HostFile:
    """A zeroed memfd, `fd`, with memory for all of its bytes: for the first AT_ONCE_BYTES before it is there, for the
    rest soon after it, in a thread that gives way to all others. A gigabyte takes the kernel up to half a second to
    clear, for which nobody has to wait. Raises ValueError when there is not so much."""

    def __init__(self, num_bytes: int) -> None:
        check_free(num_bytes)
        self.fd = os.memfd_create("kvrelay-kv", os.MFD_CLOEXEC)
        self._num_bytes = num_bytes
        self._is_closed = False
        try:
            os.ftruncate(self.fd, num_bytes)
            os.posix_fallocate(self.fd, 0, min(num_bytes, AT_ONCE_BYTES))
        except OSError as error:
            os.close(self.fd)
            raise ValueError(self._why_not(error)) from error
        self._rest: threading.Thread | None = None
        if num_bytes > AT_ONCE_BYTES:
            self._rest = threading.Thread(target=self._take_rest, name="kv memory", daemon=True)
            self._rest.start()

    def wait(self) -> None:
        """Until it has all of its memory."""
        if self._rest is not None:
            self._rest.join()

    def close(self) -> None:
        self._is_closed = True
        self.wait()
        os.close(self.fd)

    def _take_rest(self) -> None:
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICEST)  # a thread's own, on Linux
        for start in range(AT_ONCE_BYTES, self._num_bytes, PIECE_BYTES):
            if self._is_closed:
                return
            try:
                os.posix_fallocate(self.fd, start, min(PIECE_BYTES, self._num_bytes - start))
            except OSError as error:  # somebody else has taken it since it was looked for
                logger.error("%s", self._why_not(error))
                return

    def _why_not(self, error: OSError) -> str:
        return f"{_too_much(self._num_bytes, free_memory())} ({error.strerror})"


def check_free(num_bytes: int) -> None:
    """Raise ValueError when there is not so much."""
    free = free_memory()
    if num_bytes > free.num_bytes:
        raise ValueError(_too_much(num_bytes, free))


def _too_much(num_bytes: int, free: FreeMemory) -> str:
    return (
        f"kv_memory is {num_bytes} bytes ({num_bytes / GIB:.1f} GiB of KV pages), but {free.num_bytes / GIB:.1f} GiB "
        f"are free {free.where}; give a smaller kv_memory, or fewer workers"
    )


def free_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> FreeMemory:
    """The least of what the machine has, what the limits of this process' cgroups leave, and what a file may hold."""
    on_machine = FreeMemory(_available_kib(proc) * 1024, "on this machine")
    frees = [on_machine, *_in_a_file(), *_left_by_limits(proc, cgroups)]
    return min(frees, key=lambda free: free.num_bytes)


def _in_a_file() -> Iterator[FreeMemory]:
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY:
        yield FreeMemory(limit, "in one file under this process' limit (`ulimit -f`)")


def _available_kib(proc: Path) -> int:
    lines = (line.split() for line in (proc / "meminfo").read_text().splitlines())
    return next(int(words[1]) for words in lines if words[0] == "MemAvailable:")


def _left_by_limits(proc: Path, cgroups: Path) -> Iterator[FreeMemory]:
    for group in groups("memory", proc, cgroups):
        names = ("memory.max", "memory.current") if group.is_v2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        left = _left_in(group.folder, *names)
        if left is not None:
            yield FreeMemory(max(0, left), f"under the limit of the cgroup {group.folder}")


def _left_in(group: Path, limit_name: str, usage_name: str) -> int | None:
    """None: no limit, or a group that cannot be seen from in here. Files that were read make way."""
    try:
        limit, usage = (group / limit_name).read_text().strip(), int((group / usage_name).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    if limit == "max":
        return None
    reclaimable = stat.get("total_inactive_file", stat.get("inactive_file", "0"))
    return int(limit) - usage + int(reclaimable)
