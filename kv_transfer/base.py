"""What a transport is: it moves the bytes of KV pages from one worker's KvMemory into another's, and nothing else.

A pair (one prefill worker, one decode worker) opens one transport. The decode worker *offers* it (ReceiveEnd, with
parameters that travel in the handshake); the prefill worker *connects* to it (SendEnd). Each end is used by one
thread of its own, in the pair's order of `seq`, so an implementation needs no locks; only `abort` may be called from
another thread, at any time, and makes the other calls raise TransferError soon.

One-sided transports (shared_memory, cuda_ipc) write into the receiver's pages by themselves: `receive` returns at
once, and the receiver trusts what the sender announces after `send` returned. Two-sided ones (tcp, process_group) need
both sides: `receive` blocks until the bytes have arrived, and `place` puts them into the pages, so that the receiver
can look in between whether the pages are still meant for them.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.pages.memory import KvMemory
from engine.pages.rows import Seen


class TransferError(Exception):
    """The bytes did not move. One sentence naming the peer and the mend; the pair must be opened anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """KV of some pages in some layers: `src_pages[i]` of the sender goes to `dst_pages[i]` of the receiver."""

    seq: int  # position in the pair's order
    layers: range
    src_pages: Sequence[int]
    dst_pages: Sequence[int]
    after: object | None = None  # KvMemory.mark: an event after which the source pages hold the KV


class Tls(Protocol):
    """Certificates as they are now, for every pair. Both raise ValueError for files of no use."""

    @property
    def server_name(self) -> str:
        """That a dialled peer's certificate must have; empty: its address."""

    def server_context(self) -> ssl.SSLContext: ...

    def client_context(self) -> ssl.SSLContext: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """What a transport keeps to where it leaves its process."""

    host: str  # this worker's own address, and the only one that it listens on
    timeout_s: float  # that it waits for a peer that moves nothing
    tls: Tls | None = None  # None: in plain


class SendEnd(Protocol):
    @property
    def one_sided(self) -> bool: ...

    def send(self, segment: Segment, seen: Seen | None = None) -> None:
        """Move the bytes, and show them to `seen`. One-sided: they stand in the receiver's pages on return. Two-sided:
        they have left the source pages, and errors of an earlier segment may be raised. Raises TransferError."""

    def flush(self) -> None:
        """Two-sided: block until all that was sent has left. Raises TransferError."""

    def abort(self) -> None: ...

    def close(self) -> None:
        """The thread's last act: nothing is written after this. Frees what the end holds."""


class ReceiveEnd(Protocol):
    @property
    def one_sided(self) -> bool: ...

    @property
    def params(self) -> Mapping[str, str]:
        """What the sender needs to connect."""

    @property
    def sender_closed(self) -> bool:
        """One-sided: whether the sender has called `close`: the fence when its stream is broken."""

    @property
    def mapped_inode(self) -> int:
        """One-sided between processes: of a file that the sender has mapped for as long as it may write. 0: none."""

    def open(self, timeout_s: float) -> None:
        """Meet the sender (two-sided), in the receiver's thread. Raises TransferError."""

    def expect(self, segment: Segment) -> None:
        """Two-sided: `receive` will be called for this segment, in order; lets the bytes flow ahead of that call."""

    def receive(self, segment: Segment) -> None:
        """Two-sided: block until the bytes have arrived (src_pages is empty). Raises TransferError."""

    def place(self, segment: Segment) -> None:
        """Two-sided: put what `receive` brought into dst_pages. May be left out: the bytes are dropped then."""

    def abort(self) -> None: ...

    def close(self) -> None:
        """The thread's last act. Frees what the end holds."""

    def forget(self) -> None:
        """One-sided: `sender_closed` is asked no more. Frees what was kept for it, once the end is closed."""


class Transport(Protocol):
    name: str
    same_host_only: bool
    encrypts: bool  # what leaves the host, when Wire has tls

    def offer(self, memory: KvMemory, *, peer: str, wire: Wire) -> ReceiveEnd:
        """Raises TransferError when this memory or machine cannot."""

    def connect(self, memory: KvMemory, params: Mapping[str, str], *, peer: str, wire: Wire) -> SendEnd:
        """Blocks until both ends stand. Raises TransferError."""
