"""FaultySendEnd makes any transport go wrong in the ways that a test asks for (Faults). Never used otherwise."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from engine.pages.memory import KvMemory
from engine.pages.rows import Seen
from kv_transfer.base import Segment, SendEnd, TransferError
from kv_transfer.checksum import Checksummer


@dataclass(slots=True, kw_only=True)
class Faults:
    """What a test makes go wrong at the sending end of any transport. Segments count from 0, over all its pairs."""

    delay_s: float = 0.0  # before each segment
    corrupt: frozenset[int] = frozenset()  # these segments arrive with bytes that are not theirs
    drop: frozenset[int] = frozenset()  # these are announced but never moved
    drop_all: bool = False
    double: frozenset[int] = frozenset()  # these are moved twice
    fail: frozenset[int] = frozenset()  # sending these raises TransferError
    before_send: Callable[[Segment], None] | None = None  # called in the pair's thread
    sent: int = field(default=0, init=False)


class FaultySendEnd:
    def __init__(self, inner: SendEnd, memory: KvMemory, faults: Faults) -> None:
        self._inner = inner
        self._memory = memory
        self._checksummer = Checksummer(memory)
        self._faults = faults

    @property
    def one_sided(self) -> bool:
        return self._inner.one_sided

    def send(self, segment: Segment, seen: Seen | None = None) -> None:
        faults = self._faults
        number, faults.sent = faults.sent, faults.sent + 1
        if faults.before_send is not None:
            faults.before_send(segment)
        if faults.delay_s:
            time.sleep(faults.delay_s)
        if number in faults.fail:
            raise TransferError(f"segment {number} fails because a test asked for it")
        is_dropped, is_corrupted = faults.drop_all or number in faults.drop, number in faults.corrupt
        if not is_dropped and not is_corrupted:
            self._inner.send(segment, seen)
            if number in faults.double:
                self._inner.send(segment)
            return
        if seen is not None:  # the checksum is of what should have arrived
            self._checksummer.show(segment.layers, segment.src_pages, seen)
        if is_corrupted and not is_dropped:
            self._inner.send(self._corrupted(segment))

    def _corrupted(self, segment: Segment) -> Segment:
        """The segment with its first page read from a wrong place. The source's bytes stay as they are: the engine
        may be reading them."""
        pages = list(segment.src_pages)
        keys = self._memory.k(segment.layers.start).flatten(1).view(torch.uint8)
        differs = (keys != keys[pages[0]]).any(1)
        pages[0] = int(differs.nonzero()[0])
        return replace(segment, src_pages=pages)

    def flush(self) -> None:
        self._inner.flush()

    def abort(self) -> None:
        self._inner.abort()

    def close(self) -> None:
        self._inner.close()
