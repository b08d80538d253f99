"""The file of a one-sided pair on one host: both sides map it, and the prefill side's last word stands in it.

The decode side makes it (a memfd, opened through /proc/PID/fd/FD) and writes a nonce into it, by which the prefill side
knows that it has opened what was meant. That side's last act is to set a flag in it: the decode side's fence, for no
more is written then even when the control stream is broken. It may also leave a note: cuda_ipc the handles of its
events.
"""

from __future__ import annotations

import mmap
import os
import secrets
import select
from collections.abc import Mapping

from kv_transfer.base import TransferError

FILE_BYTES = 4096
NONCE_BYTES = 16
CLOSED_AT = 64  # offset of the flag
NOTE_AT = 128  # offset of the note's length, and the note behind it; the length is written last
LENGTH_BYTES = 2


class DecodePairFile:
    def __init__(self) -> None:
        """Raises OSError where the process may have no more descriptors or maps."""
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self._is_forgotten = False
        self._fd = os.memfd_create("kvrelay-pair", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._fd, FILE_BYTES)
            self.inode = os.fstat(self._fd).st_ino
            self._map = mmap.mmap(self._fd, FILE_BYTES)
        except BaseException:
            self.close()
            raise
        self._map[:NONCE_BYTES] = self.nonce

    @property
    def params(self) -> Mapping[str, str]:
        return {"pid": str(os.getpid()), "fence_fd": str(self._fd), "nonce": self.nonce.hex()}

    @property
    def sender_closed(self) -> bool:
        return self._map[CLOSED_AT] != 0

    @property
    def note(self) -> bytes:
        """Empty while there is none."""
        begin = NOTE_AT + LENGTH_BYTES
        return self._map[begin : begin + int.from_bytes(self._map[NOTE_AT:begin], "little")]

    def close(self) -> None:
        """The number must not be opened again. The map stays, for `sender_closed`, until it is forgotten."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._unmap_if_over()

    def forget(self) -> None:
        """Nobody asks any more whether the sender has closed. May be called in another thread than `close`."""
        self._is_forgotten = True
        self._unmap_if_over()

    def _unmap_if_over(self) -> None:
        """Not left to the object's end: a map has a descriptor of its own, and who holds it is in circles, which are
        hardly ever looked for in a process that serves."""
        if self._is_forgotten and self._fd < 0:
            self._map.close()


class PrefillPairFile:
    def __init__(self, params: Mapping[str, str], peer: str) -> None:
        """Raises TransferError, KeyError, ValueError, OSError for parameters of no use."""
        pid = int(params["pid"])
        self._map = map_file(pid, int(params["fence_fd"]), FILE_BYTES, peer)
        if self._map[:NONCE_BYTES] != bytes.fromhex(params["nonce"]):
            raise TransferError(f"process {pid} is not {peer}: its fence holds another nonce; use another transport")
        self._pidfd = os.pidfd_open(pid)

    @property
    def is_peer_dead(self) -> bool:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def leave_note(self, note: bytes) -> None:
        begin = NOTE_AT + LENGTH_BYTES
        self._map[begin : begin + len(note)] = note
        self._map[NOTE_AT:begin] = len(note).to_bytes(LENGTH_BYTES, "little")

    def close(self, *, has_stopped: bool = True) -> None:
        """Say that nothing more is written, unless that is not known: then only this process's end tells."""
        if self._pidfd < 0:
            return
        if has_stopped:
            self._map[CLOSED_AT] = 1
            self._map.close()
        os.close(self._pidfd)
        self._pidfd = -1


def map_file(pid: int, fd: int, num_bytes: int, peer: str, inode: int | None = None) -> mmap.mmap:
    """Map another process's memfd. Raises TransferError."""
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
