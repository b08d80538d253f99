"""shared_memory moves KV between two processes of one host at the speed of memcpy. CPU memory only.

One-sided: the decode worker's KV memory is an anonymous file (memfd), or one for each of its ranks; the prefill side
opens it through /proc/PID/fd/FD, maps it and copies pages straight into it, once.

Nothing is left behind by a killed process: this file and the pair's vanish with their last user.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np

from engine.pages.memory import KvMemory
from engine.pages.rows import Bytes, PageRows, Seen
from kv_transfer.base import ReceiveEnd, Segment, SendEnd, TransferError, Wire
from kv_transfer.transports.one_sided import OneSidedReceiveEnd, OneSidedSendEnd, column
from kv_transfer.transports.pair_file import map_file


class SharedMemorySendEnd(OneSidedSendEnd):
    def __init__(self, memory: KvMemory, params: Mapping[str, str], peer: str) -> None:
        super().__init__("shared_memory", memory, params, peer)
        try:
            maps = self._map_all(params)
        except BaseException:
            self._pair_file.close()  # nothing was ever written
            raise
        self._source = memory.rows
        self._target = PageRows(self._target_layout, list(zip(self._target_shares, maps, strict=True)))

    def _map_all(self, params: Mapping[str, str]) -> list[Bytes]:
        pid, files = int(params["pid"]), zip(column(params, "fd"), column(params, "inode"), strict=True)
        sizes = [share.of(self._target_layout).total_bytes for share in self._target_shares]
        return [
            np.frombuffer(map_file(pid, int(fd), num_bytes, self._peer, inode=int(inode)), np.uint8)
            for (fd, inode), num_bytes in zip(files, sizes, strict=True)
        ]

    def _copy(self, segment: Segment, seen: Seen | None) -> None:
        self._target.copy_from(self._source, segment.layers, segment.src_pages, segment.dst_pages, seen)

    def _release(self) -> None:
        self._pair_file.close()
        del self._target  # with it go the maps, and with a dead peer's last map its memory


class SharedMemoryTransport:
    name = "shared_memory"
    same_host_only = True
    encrypts = False

    def offer(self, memory: KvMemory, *, peer: str, wire: Wire) -> ReceiveEnd:
        if memory.fd is None:
            raise TransferError(f"shared_memory wants KV in a CPU memfd, and this worker's is on {memory.device}")
        files = [each.fd for each in memory.shares if each.fd is not None]
        inodes = [os.fstat(fd).st_ino for fd in files]
        try:
            return OneSidedReceiveEnd(self.name, memory, {"fd": files, "inode": inodes}, {})
        except OSError as error:
            raise TransferError(f"this worker's KV cannot be shared by shared_memory: {error}") from error

    def connect(self, memory: KvMemory, params: Mapping[str, str], *, peer: str, wire: Wire) -> SendEnd:
        if memory.device != "cpu":
            raise TransferError(f"shared_memory moves CPU memory only, and this worker's KV is on {memory.device}")
        try:
            return SharedMemorySendEnd(memory, params, peer)
        except (KeyError, ValueError, OSError) as error:
            raise TransferError(f"{peer}'s shared_memory cannot be used: {error}; use another transport") from error


TRANSPORT = SharedMemoryTransport()
