"""The ends of a transport between two processes of one host, whose prefill side writes into the pages by itself.

The receiver offers each of its shares (engine/pages/share.py), and the sender writes into all. What differs is how the
pages are reached and copied; that a peer is dead, and that a side has ended, is told by the
pair's file (pair_file.py) alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

from engine.pages.memory import KvMemory
from engine.pages.rows import Seen
from engine.pages.share import Share, check_whole
from kv_transfer.base import Segment, TransferError
from kv_transfer.transports.pair_file import DecodePairFile, PrefillPairFile

SEPARATOR = ","  # between what is said of each share


def column(params: Mapping[str, str], key: str) -> list[str]:
    """What is said of each share."""
    return params[key].split(SEPARATOR)


class OneSidedReceiveEnd:
    one_sided = True

    def __init__(
        self, transport: str, memory: KvMemory, columns: Mapping[str, Sequence[object]], params: Mapping[str, str]
    ) -> None:
        """`columns`: how each of the memory's shares is reached; `params`: what else there is to say."""
        self._transport = transport
        self._pair_file = DecodePairFile()
        self._is_aborted = False
        shares = memory.shares
        columns = {**columns, "share": [each.share for each in shares], "bytes": [each.num_bytes for each in shares]}
        self._params = {
            **self._pair_file.params,
            "num_pages": str(memory.layout.num_pages),
            **{key: SEPARATOR.join(map(str, column)) for key, column in columns.items()},
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

    def forget(self) -> None:
        self._pair_file.forget()


class OneSidedSendEnd(ABC):
    one_sided = True

    def __init__(self, transport: str, memory: KvMemory, params: Mapping[str, str], peer: str) -> None:
        """Raises TransferError, KeyError, ValueError, OSError for parameters of no use."""
        self._transport = transport
        self._peer = peer
        self._is_aborted = False
        self._is_closed = False
        self._target_layout = replace(memory.layout, num_pages=int(params["num_pages"]))
        self._target_shares = [Share.read(text) for text in column(params, "share")]
        check_whole(self._target_layout, self._target_shares)
        for share, theirs in zip(self._target_shares, map(int, column(params, "bytes")), strict=True):
            if theirs != (ours := share.of(self._target_layout).total_bytes):
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
