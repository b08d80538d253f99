"""shared_memory moves KV between two processes of one host at the speed of memcpy. CPU memory only.

One-sided: the receiver's KV memory is an anonymous file (memfd); the sender opens it through /proc/PID/fd/FD, maps it
and copies pages straight into it, once. A second, small file is the pair's fence (fence.py).

Nothing is left behind by a killed process: both files vanish with their last user.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from engine.pages.memory import KvMemory
from engine.pages.rows import PageRows, Seen
from kv_transfer.base import ReceiveEnd, Segment, SendEnd, TransferError
from kv_transfer.transports.fence import ReceiverFence, SenderFence, map_file


class SharedMemoryReceiveEnd:
    one_sided = True

    def __init__(self, memory: KvMemory) -> None:
        if memory.fd is None:
            raise TransferError(f"shared_memory wants KV in a CPU memfd, and this worker's is on {memory.device}")
        self._fence = ReceiverFence()
        self._is_aborted = False
        stat = os.fstat(memory.fd)
        self._params = {
            **self._fence.params,
            "fd": str(memory.fd),
            "inode": str(stat.st_ino),
            "bytes": str(memory.layout.total_bytes),
            "num_pages": str(memory.layout.num_pages),
        }

    @property
    def params(self) -> Mapping[str, str]:
        return self._params

    @property
    def sender_closed(self) -> bool:
        return self._fence.sender_closed

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
        self._is_aborted = True
        self._fence.close()


class SharedMemorySendEnd:
    one_sided = True

    def __init__(self, memory: KvMemory, params: Mapping[str, str], peer: str) -> None:
        self._peer = peer
        self._is_aborted = False
        self._is_closed = False
        num_bytes = int(params["bytes"])
        layout = replace(memory.layout, num_pages=int(params["num_pages"]))
        if layout.total_bytes != num_bytes:
            raise TransferError(f"{peer} says its KV has {num_bytes} bytes, but its layout has {layout.total_bytes}")
        self._fence = SenderFence(params, peer)
        self._map = map_file(int(params["pid"]), int(params["fd"]), num_bytes, peer, inode=int(params["inode"]))
        self._source = PageRows(memory.layout, memory.bytes.numpy())
        self._target = PageRows(layout, np.frombuffer(self._map, np.uint8))

    def send(self, segment: Segment, seen: Seen | None = None) -> None:
        if self._is_aborted:
            raise TransferError(f"the shared_memory transport to {self._peer} is closed; open a new pair")
        if self._fence.is_peer_dead:
            raise TransferError(f"{self._peer} is dead; hand off to another worker")
        self._target.copy_from(self._source, segment.layers, segment.src_pages, segment.dst_pages, seen)

    def flush(self) -> None:
        pass

    def abort(self) -> None:
        self._is_aborted = True

    def close(self) -> None:
        self._is_aborted = True
        if self._is_closed:
            return
        self._is_closed = True
        self._fence.close()
        del self._target, self._map  # with their last user goes the map, and with a dead peer's last map its memory


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
