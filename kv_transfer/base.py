"""What a transport is: it moves the bytes of KV pages from one worker's KvMemory into another's, and nothing else.

A pair (one prefill worker, one decode worker) opens one transport. The decode worker *offers* it (ReceiveEnd, with
parameters that travel in the handshake); the prefill worker *connects* to it (SendEnd). Each end is used by one
thread of its own, in the pair's order of `seq`, so an implementation needs no locks; only `abort` may be called from
another thread, at any time, and makes the other calls raise TransferError soon.

One-sided transports (shared_memory, cuda_ipc) write into the receiver's pages by themselves: `receive` returns at
once, and the receiver trusts what the sender announces after `send` returned. Two-sided ones (process_group) need
both sides: `receive` blocks until the bytes stand in the pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kv_transfer.memory import KvMemory


class TransferError(Exception):
    """The bytes did not move. One sentence naming the peer and the mend; the pair must be opened anew."""


class TransferTimeout(TransferError):
    def __init__(self, peer: str, after_s: float) -> None:
        super().__init__(f"{peer} moved no byte for {after_s:g} s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """KV of some pages in some layers: `src_pages[i]` of the sender goes to `dst_pages[i]` of the receiver."""

    seq: int  # position in the pair's order
    layers: range
    src_pages: Sequence[int]
    dst_pages: Sequence[int]


class SendEnd(Protocol):
    one_sided: bool

    def send(self, segment: Segment) -> None:
        """Move the bytes. One-sided: they stand in the receiver's pages on return. Raises TransferError."""

    def abort(self) -> None: ...


class ReceiveEnd(Protocol):
    one_sided: bool

    @property
    def params(self) -> Mapping[str, str]:
        """What the sender needs to connect."""

    def open(self, timeout_s: float) -> None:
        """Meet the sender (two-sided), in the receiver's thread. Raises TransferError."""

    def receive(self, segment: Segment) -> None:
        """Two-sided: block until the bytes stand in dst_pages (src_pages is empty). Raises TransferError."""

    def abort(self) -> None: ...


class Transport(Protocol):
    name: str
    same_host_only: bool

    def offer(self, memory: KvMemory, *, peer: str, host: str, timeout_s: float) -> ReceiveEnd: ...

    def connect(
        self, memory: KvMemory, params: Mapping[str, str], *, peer: str, host: str, timeout_s: float
    ) -> SendEnd: ...
