"""The two threads of a pair, without a thread: the sender moves when the explorer says so, the receiver at once.

A write takes two steps, so that everything can happen while it is under way; `written` is asked at both whether the
pages may be written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from kv_transfer.base import TransferError
from kv_transfer.prefill_side.segments import Flow, SegmentToSend, SentSegment


class ModelSendThread:
    made: Callable[[ModelSendThread], None]  # told of each one

    def __init__(
        self,
        end: Any,
        memory: Any,
        *,
        name: str,
        checksums: bool,
        on_sent: Callable[[SentSegment], None],
        on_error: Callable[[str], None],
    ) -> None:
        self.owner: Any = None  # the processes at both ends: the world's to say
        self.target: Any = None
        self.peer = name.removeprefix("kv-send-")
        self.end = end
        self.writing: SegmentToSend | None = None
        self._on_sent = on_sent
        self._on_error = on_error
        self._queue: deque[SegmentToSend | Callable[[], None] | None] = deque()
        self._is_aborted = False
        self._seq = 0
        self.is_over = False
        type(self).made(self)

    def put(self, segment: SegmentToSend) -> None:
        self._queue.append(segment)

    def call_when_drained(self, then: Callable[[], None]) -> None:
        self._queue.append(then)

    def stop_flow(self, flow: Flow, then: Callable[[], None]) -> None:
        flow.stopped = True
        if self.writing is not None and self.writing.flow is flow:
            flow.on_idle.append(then)
        else:
            then()

    def abort(self) -> None:
        self._is_aborted = True
        self._queue.append(None)

    def close(self) -> None:
        self._queue.append(None)

    def join(self, timeout_s: float) -> bool:
        return True

    @property
    def can_move(self) -> bool:
        return not self.is_over and (self.writing is not None or bool(self._queue))

    def move(self) -> None:
        """The next half of what it does."""
        if self.writing is not None:
            self._finish(self.writing)
            return
        item = self._queue.popleft()
        if item is None or self._is_aborted:
            self._end()
        elif not isinstance(item, SegmentToSend):
            item()
        elif not item.flow.stopped:
            self.writing = item

    def _finish(self, segment: SegmentToSend) -> None:
        self.writing = None
        if self.target.is_alive:  # however late it comes: it may have been under way when it was told to stop
            receiver = self.end._receiver
            receiver.rows.copy_from(self.end._rows, segment.layers, segment.src_pages, segment.dst_pages)
        if not self._is_aborted:
            sent = SentSegment(
                segment=segment, seq=self._seq, nbytes=_bytes_of(self, segment), checksum=None, transfer_s=0
            )
            self._seq += 1
            self._on_sent(sent)
        on_idle, segment.flow.on_idle = segment.flow.on_idle, []
        for then in on_idle:
            then()

    def _end(self) -> None:
        self.is_over = True
        self.end.close()
        if self._is_aborted:
            self._on_error("aborted")


def _bytes_of(thread: ModelSendThread, segment: SegmentToSend) -> int:
    layout = thread.end._rows.layout
    return int(layout.page_bytes(segment.layers) * len(segment.src_pages))


class ModelReceiveThread:
    def __init__(
        self,
        end: Any,
        checksummer: Any,
        *,
        name: str,
        timeout_s: float,
        on_verified: Callable[[Any, bool, float], None],
        on_error: Callable[[str], None],
    ) -> None:
        self._end = end
        self._on_verified = on_verified

    def put(self, announced: Any) -> None:
        try:
            self._end.receive(announced.segment)
        except TransferError:
            return
        self._on_verified(announced.token, True, 0.0)

    def revoke(self, permit: Any) -> None:
        permit.is_valid = False

    def abort(self) -> None:
        self._end.close()
