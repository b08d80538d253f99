"""The ends of a transport between two processes of one host, whose prefill side writes into the pages by itself.

What differs is how the pages are reached and copied; that a peer is dead, and that a side has ended, is told by the
pair's file (pair_file.py) alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace

from engine.pages.layout import KvLayout
from engine.pages.memory import KvMemory
from engine.pages.rows import Seen
from kv_transfer.base import Segment, TransferError
from kv_transfer.transports.pair_file import DecodePairFile, PrefillPairFile


class OneSidedReceiveEnd:
    one_sided = True

    def __init__(self, transport: str, layout: KvLayout, params: Mapping[str, str]) -> None:
        """`params`: how the pages of `layout` are reached."""
        self._transport = transport
        self._pair_file = DecodePairFile()
        self._is_aborted = False
        self._params = {
            **self._pair_file.params,
            "bytes": str(layout.total_bytes),
            "num_pages": str(layout.num_pages),
            **params,
        }

    @property
    def params(self) -> Mapping[str, str]:
        return self._params

    @property
    def sender_closed(self) -> bool:
        return self._pair_file.sender_closed

    @property
    def mapped_inode(self) -> int:
        return self._pair_file.inode

    def open(self, timeout_s: float) -> None:
        pass

    def expect(self, segment: Segment) -> None:
        pass

    def receive(self, segment: Segment) -> None:
        if self._is_aborted:
            raise TransferError(f"this end of the {self._transport} transport is closed; open a new pair")

    def place(self, segment: Segment) -> None:
        pass

    def abort(self) -> None:
        self._is_aborted = True

    def close(self) -> None:
        self._is_aborted = True
        self._pair_file.close()


class OneSidedSendEnd(ABC):
    one_sided = True

    def __init__(self, transport: str, memory: KvMemory, params: Mapping[str, str], peer: str) -> None:
        """Raises TransferError, KeyError, ValueError, OSError for parameters of no use."""
        self._transport = transport
        self._peer = peer
        self._is_aborted = False
        self._is_closed = False
        self._target_layout = replace(memory.layout, num_pages=int(params["num_pages"]))
        theirs, ours = int(params["bytes"]), self._target_layout.total_bytes
        if theirs != ours:
            raise TransferError(f"{peer} says its KV has {theirs} bytes, but its layout has {ours}")
        self._pair_file = PrefillPairFile(params, peer)

    def send(self, segment: Segment, seen: Seen | None = None) -> None:
        if self._is_aborted:
            raise TransferError(f"the {self._transport} transport to {self._peer} is closed; open a new pair")
        if self._pair_file.is_peer_dead:
            raise TransferError(f"{self._peer} is dead; hand off to another worker")
        self._copy(segment, seen)

    @abstractmethod
    def _copy(self, segment: Segment, seen: Seen | None) -> None:
        """Returns when the bytes stand in the peer's pages."""

    def flush(self) -> None:
        return  # what was sent has arrived

    def abort(self) -> None:
        self._is_aborted = True

    def close(self) -> None:
        self._is_aborted = True
        if not self._is_closed:
            self._is_closed = True
            self._release()

    @abstractmethod
    def _release(self) -> None:
        """Close the pair's file once nothing more is written, and the peer's pages."""
