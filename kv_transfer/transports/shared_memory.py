"""shared_memory moves KV between two processes of one host at the speed of memcpy. CPU memory only.

One-sided: the receiver's KV memory is an anonymous file (memfd); the sender opens it through /proc/PID/fd/FD, maps it
and copies pages straight into it, once. A second, small file is the pair's fence: the receiver writes a nonce into it,
by which the sender knows that it has opened the files that were meant, and the sender's last act is to set a flag in
it, by which the receiver knows that no more will be written even when the control stream is broken.

Nothing is left behind by a killed process: both files vanish with their last user.
"""

from __future__ import annotations

import mmap
import os
import secrets
import select
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from kv_transfer.base import ReceiveEnd, Segment, SendEnd, TransferError
from kv_transfer.memory import KvMemory
from kv_transfer.rows import PageRows, Seen

FENCE_BYTES = 4096
NONCE_BYTES = 16
CLOSED_AT = 64  # offset of the flag in the fence file


class SharedMemoryReceiveEnd:
    one_sided = True

    def __init__(self, memory: KvMemory) -> None:
        if memory.fd is None:
            raise TransferError(f"shared_memory wants KV in a CPU memfd, and this worker's is on {memory.device}")
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._fence_fd = os.memfd_create("kvrelay-fence", os.MFD_CLOEXEC)
        os.ftruncate(self._fence_fd, FENCE_BYTES)
        self._fence = mmap.mmap(self._fence_fd, FENCE_BYTES)
        self._fence[:NONCE_BYTES] = self._nonce
        self._is_aborted = False
        stat = os.fstat(memory.fd)
        self._params = {
            "pid": str(os.getpid()),
            "fd": str(memory.fd),
            "inode": str(stat.st_ino),
            "bytes": str(memory.layout.total_bytes),
            "num_pages": str(memory.layout.num_pages),
            "fence_fd": str(self._fence_fd),
            "nonce": self._nonce.hex(),
        }

    @property
    def params(self) -> Mapping[str, str]:
        return self._params

    @property
    def sender_closed(self) -> bool:
        return self._fence[CLOSED_AT] != 0

    def open(self, timeout_s: float) -> None:
        pass

    def expect(self, segment: Segment) -> None:
        pass

    def receive(self, segment: Segment) -> None:
        if self._is_aborted:
            raise TransferError("this end of the shared_memory transport is closed; open a new pair")

    def place(self, segment: Segment) -> None:
        pass

    def abort(self) -> None:
        self._is_aborted = True

    def close(self) -> None:
        """The map stays, for `sender_closed`, until the object goes; the number must not be opened again."""
        self._is_aborted = True
        if self._fence_fd >= 0:
            os.close(self._fence_fd)
            self._fence_fd = -1


class SharedMemorySendEnd:
    one_sided = True

    def __init__(self, memory: KvMemory, params: Mapping[str, str], peer: str) -> None:
        self._peer = peer
        self._is_aborted = False
        pid, num_bytes = int(params["pid"]), int(params["bytes"])
        layout = replace(memory.layout, num_pages=int(params["num_pages"]))
        if layout.total_bytes != num_bytes:
            raise TransferError(f"{peer} says its KV has {num_bytes} bytes, but its layout has {layout.total_bytes}")
        self._fence = _map(pid, int(params["fence_fd"]), FENCE_BYTES, peer)
        if self._fence[:NONCE_BYTES] != bytes.fromhex(params["nonce"]):
            raise TransferError(f"process {pid} is not {peer}: its fence holds another nonce; use another transport")
        self._map = _map(pid, int(params["fd"]), num_bytes, peer, inode=int(params["inode"]))
        self._source = PageRows(memory.layout, memory.bytes.numpy())
        self._target = PageRows(layout, np.frombuffer(self._map, np.uint8))
        self._pidfd = os.pidfd_open(pid)

    def send(self, segment: Segment, seen: Seen | None = None) -> None:
        if self._is_aborted:
            raise TransferError(f"the shared_memory transport to {self._peer} is closed; open a new pair")
        if _has_exited(self._pidfd):
            raise TransferError(f"{self._peer} is dead; hand off to another worker")
        self._target.copy_from(self._source, segment.layers, segment.src_pages, segment.dst_pages, seen)

    def flush(self) -> None:
        pass

    def abort(self) -> None:
        self._is_aborted = True

    def close(self) -> None:
        self._is_aborted = True
        if self._pidfd < 0:
            return
        self._fence[CLOSED_AT] = 1
        os.close(self._pidfd)
        self._pidfd = -1
        del self._target, self._map  # with their last user goes the map, and with a dead peer's last map its memory


def _map(pid: int, fd: int, num_bytes: int, peer: str, inode: int | None = None) -> mmap.mmap:
    path = f"/proc/{pid}/fd/{fd}"
    try:
        own = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise TransferError(
            f"cannot open {peer}'s memory at {path}: {error.strerror}; use another transport"
        ) from error
    try:
        stat = os.fstat(own)
        if stat.st_size != num_bytes or (inode is not None and stat.st_ino != inode):
            raise TransferError(f"{path} is not {peer}'s memory: another file or size; use another transport")
        return mmap.mmap(own, num_bytes)
    finally:
        os.close(own)


def _has_exited(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


class SharedMemoryTransport:
    name = "shared_memory"
    same_host_only = True

    def offer(self, memory: KvMemory, *, peer: str, host: str, timeout_s: float) -> ReceiveEnd:
        return SharedMemoryReceiveEnd(memory)

    def connect(
        self, memory: KvMemory, params: Mapping[str, str], *, peer: str, host: str, timeout_s: float
    ) -> SendEnd:
        if memory.device != "cpu":
            raise TransferError(f"shared_memory moves CPU memory only, and this worker's KV is on {memory.device}")
        try:
            return SharedMemorySendEnd(memory, params, peer)
        except (KeyError, ValueError, OSError) as error:
            raise TransferError(f"{peer}'s shared_memory cannot be used: {error}; use another transport") from error


TRANSPORT = SharedMemoryTransport()
