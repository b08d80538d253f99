"""SendThread owns the sending end of one pair's transport: it sleeps on a queue, checksums segments and sends them.

It knows no lease, no message and no event loop: its owner gives it segments and is called back, in this thread. A Flow
is what one handoff sends: stopping it drops its queued segments, and says when none of them is being written.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from engine.pages.memory import KvMemory
from kv_transfer.base import Segment, SendEnd, TransferError
from kv_transfer.checksum import RunningDigest, device_checksummer
from kv_transfer.event_loop import start_thread
from kv_transfer.prefill_side.segments import Flow, SegmentToSend, SentSegment

log = logging.getLogger(__name__)


class SendThread:
    def __init__(
        self,
        end: SendEnd,
        memory: KvMemory,
        *,
        name: str,
        checksums: bool,
        on_sent: Callable[[SentSegment], None],
        on_error: Callable[[str], None],
    ) -> None:
        self._end = end
        self._layout = memory.layout
        self._checksums = checksums
        self._device_checksummer = device_checksummer(memory) if checksums else None
        self._on_sent = on_sent
        self._on_error = on_error
        self._queue: queue.SimpleQueue[SegmentToSend | Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._current: Flow | None = None
        self._seq = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        start_thread(self._thread, end.close)

    def put(self, segment: SegmentToSend) -> None:
        self._queue.put(segment)

    def call_when_drained(self, then: Callable[[], None]) -> None:
        """Call `then` in this thread after all segments put so far. Never called if the transport fails before."""
        self._queue.put(then)

    def stop_flow(self, flow: Flow, then: Callable[[], None]) -> None:
        """Drop the flow's segments; call `then`, at once or in this thread, when none of them is being written."""
        with self._lock:
            flow.stopped = True
            if self._current is flow:
                flow.on_idle.append(then)
                return
        then()

    def abort(self) -> None:
        """Make the thread end soon, in the middle of its segments."""
        self._end.abort()
        self._queue.put(None)

    def close(self) -> None:
        """End the thread after the segments put so far."""
        self._queue.put(None)

    def join(self, timeout_s: float) -> bool:
        """Whether the thread has ended, so that nothing more is written."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while (item := self._next()) is not None:
                if isinstance(item, SegmentToSend):
                    self._send_unless_stopped(item)
                else:
                    item()
        except TransferError as error:
            self._on_error(str(error))
        except Exception as error:
            log.exception("%s failed", self._thread.name)
            self._on_error(f"{self._thread.name} failed: {error!r}")
        finally:
            self._end.close()

    def _next(self) -> SegmentToSend | Callable[[], None] | None:
        try:
            return self._queue.get_nowait()
        except queue.Empty:
            self._end.flush()
            return self._queue.get()

    def _send_unless_stopped(self, queued: SegmentToSend) -> None:
        with self._lock:
            if queued.flow.stopped:
                return
            self._current = queued.flow
        try:
            self._send(queued)
        finally:
            with self._lock:
                self._current = None
                on_idle, queued.flow.on_idle = queued.flow.on_idle, []
            for then in on_idle:
                then()

    def _send(self, queued: SegmentToSend) -> None:
        digest = RunningDigest() if self._checksums and self._device_checksummer is None else None
        segment = Segment(
            seq=self._seq,
            layers=queued.layers,
            src_pages=queued.src_pages,
            dst_pages=queued.dst_pages,
            after=queued.after,
        )
        self._seq += 1
        nbytes = self._layout.page_bytes(queued.layers) * len(queued.src_pages)
        started = time.perf_counter()
        self._end.send(segment, digest.see if digest else None)
        took_s = time.perf_counter() - started
        checksum = digest.value if digest else None
        if self._device_checksummer is not None:
            checksum = self._device_checksummer.digest(queued.layers, queued.src_pages, queued.after)
        self._on_sent(SentSegment(segment=queued, seq=segment.seq, nbytes=nbytes, checksum=checksum, transfer_s=took_s))
