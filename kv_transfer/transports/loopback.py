"""loopback moves KV between two workers of one process. For tests, and for a cluster inside one process.

One-sided: the sender copies straight into the receiver's pages, which it finds by a random token.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from weakref import WeakValueDictionary

from engine.pages.memory import KvMemory
from engine.pages.rows import Seen
from kv_transfer.base import ReceiveEnd, Segment, SendEnd, TransferError, Wire

_offers: WeakValueDictionary[str, LoopbackReceiveEnd] = WeakValueDictionary()  # by token, while the receiver lives


class LoopbackReceiveEnd:
    one_sided = True
    mapped_inode = 0

    def __init__(self, memory: KvMemory) -> None:
        self.rows = memory.rows
        self.is_closed = False
        self.sender_closed = False
        self._token = secrets.token_hex(16)
        _offers[self._token] = self

    @property
    def params(self) -> Mapping[str, str]:
        return {"token": self._token}

    def open(self, timeout_s: float) -> None:
        pass

    def expect(self, segment: Segment) -> None:
        pass

    def receive(self, segment: Segment) -> None:
        if self.is_closed:
            raise TransferError("this end of the loopback transport is closed; open a new pair")

    def place(self, segment: Segment) -> None:
        pass

    def abort(self) -> None:
        self.is_closed = True

    def close(self) -> None:
        self.is_closed = True

    def forget(self) -> None:
        pass


class LoopbackSendEnd:
    one_sided = True

    def __init__(self, memory: KvMemory, receiver: LoopbackReceiveEnd, peer: str) -> None:
        self._rows = memory.rows
        self._receiver = receiver
        self._peer = peer
        self._aborted = False

    def send(self, segment: Segment, seen: Seen | None = None) -> None:
        if self._aborted or self._receiver.is_closed:
            raise TransferError(f"the loopback transport to {self._peer} is closed; open a new pair")
        self._receiver.rows.copy_from(self._rows, segment.layers, segment.src_pages, segment.dst_pages, seen)

    def flush(self) -> None:
        pass

    def abort(self) -> None:
        self._aborted = True

    def close(self) -> None:
        self._aborted = True
        self._receiver.sender_closed = True


class LoopbackTransport:
    name = "loopback"
    same_host_only = True
    encrypts = False

    def offer(self, memory: KvMemory, *, peer: str, wire: Wire) -> ReceiveEnd:
        if memory.device != "cpu":
            raise TransferError(f"loopback moves CPU memory only, and this worker's KV is on {memory.device}")
        return LoopbackReceiveEnd(memory)

    def connect(self, memory: KvMemory, params: Mapping[str, str], *, peer: str, wire: Wire) -> SendEnd:
        receiver = _offers.get(params.get("token", ""))
        if receiver is None:
            raise TransferError(f"{peer} is not in this process; use another transport than loopback")
        return LoopbackSendEnd(memory, receiver, peer)


TRANSPORT = LoopbackTransport()
