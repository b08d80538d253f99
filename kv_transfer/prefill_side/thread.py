"""SendThread owns the sending end of one pair's transport: it sleeps on a queue, checksums segments and sends them.

It knows no lease, no message and no event loop: its owner gives it jobs and is called back, in this thread. A Lane
stands for one handoff: stopping it drops its queued jobs, and says when none of its segments is being written.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.pages.layout import KvLayout
from engine.pages.memory import KvMemory
from kv_transfer.base import Segment, SendEnd, TransferError
from kv_transfer.checksum import RunningDigest, device_checksummer

log = logging.getLogger(__name__)

SEGMENT_BYTES = 8 << 20  # larger ones are cut, so that sending one overlaps with verifying the one before
GPU_SEGMENT_BYTES = 64 << 20  # a launch and a message cost more there, and a copy of so much takes microseconds


class Lane:
    """One handoff's jobs. `stopped` and `on_idle` are read and written under the thread's lock only."""

    __slots__ = ("num_announced", "on_idle", "stopped")

    def __init__(self) -> None:
        self.num_announced = 0  # the owner's: segments of it that the peer was told of
        self.stopped = False
        self.on_idle: list[Callable[[], None]] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Send the KV of token pages page_begin .. page_end - 1 in `layers`."""

    lane: Lane
    lease_id: int
    layers: range
    page_begin: int
    page_end: int
    src_pages: Sequence[int]
    dst_pages: Sequence[int]
    after: object | None = None  # see Segment
    resend: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A segment that was sent (one-sided) or is on its way (two-sided). checksum None: checksums are off."""

    job: Job
    seq: int
    nbytes: int
    checksum: int | None
    transfer_s: float


class OnSent(Protocol):
    def __call__(self, sent: Sent) -> None: ...


def cut_job(
    layout: KvLayout, layers: range, num_pages: int, segment_bytes: int = SEGMENT_BYTES
) -> Iterator[tuple[range, range]]:
    """(layers, index range of the pages) of the segments that a job is cut into: whole layers while they fit."""
    start = layers.start
    while start < layers.stop:
        stop, nbytes = start + 1, layout.page_bytes(range(start, start + 1)) * num_pages
        while stop < layers.stop and nbytes + layout.page_bytes(range(stop, stop + 1)) * num_pages <= segment_bytes:
            nbytes += layout.page_bytes(range(stop, stop + 1)) * num_pages
            stop += 1
        step = max(1, num_pages * segment_bytes // max(nbytes, segment_bytes))
        for at in range(0, num_pages, step):
            yield range(start, stop), range(at, min(at + step, num_pages))
        start = stop


class SendThread:
    def __init__(
        self,
        end: SendEnd,
        memory: KvMemory,
        *,
        name: str,
        checksums: bool,
        on_sent: OnSent,
        on_error: Callable[[str], None],
    ) -> None:
        self._end = end
        self._layout = memory.layout
        self._checksums = checksums
        self._device_checksummer = device_checksummer(memory) if checksums else None
        self._on_sent = on_sent
        self._on_error = on_error
        self._queue: queue.SimpleQueue[Job | Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._current: Lane | None = None
        self._seq = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        self._queue.put(job)

    def call_when_drained(self, then: Callable[[], None]) -> None:
        """Call `then` in this thread after all jobs put so far. Never called if the transport fails before."""
        self._queue.put(then)

    def stop_lane(self, lane: Lane, then: Callable[[], None]) -> None:
        """Drop the lane's jobs; call `then`, at once or in this thread, when none of them is being written."""
        with self._lock:
            lane.stopped = True
            if self._current is lane:
                lane.on_idle.append(then)
                return
        then()

    def abort(self) -> None:
        """Make the thread end soon, in the middle of its jobs."""
        self._end.abort()
        self._queue.put(None)

    def close(self) -> None:
        """End the thread after the jobs put so far."""
        self._queue.put(None)

    def join(self, timeout_s: float) -> bool:
        """Whether the thread has ended, so that nothing more is written."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while (item := self._next()) is not None:
                if isinstance(item, Job):
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

    def _next(self) -> Job | Callable[[], None] | None:
        try:
            return self._queue.get_nowait()
        except queue.Empty:
            self._end.flush()
            return self._queue.get()

    def _send_unless_stopped(self, job: Job) -> None:
        with self._lock:
            if job.lane.stopped:
                return
            self._current = job.lane
        try:
            self._send(job)
        finally:
            with self._lock:
                self._current = None
                on_idle, job.lane.on_idle = job.lane.on_idle, []
            for then in on_idle:
                then()

    def _send(self, job: Job) -> None:
        digest = RunningDigest() if self._checksums and self._device_checksummer is None else None
        segment = Segment(
            seq=self._seq, layers=job.layers, src_pages=job.src_pages, dst_pages=job.dst_pages, after=job.after
        )
        self._seq += 1
        nbytes = self._layout.page_bytes(job.layers) * len(job.src_pages)
        started = time.perf_counter()
        self._end.send(segment, digest.see if digest else None)
        took_s = time.perf_counter() - started
        checksum = digest.value if digest else None
        if self._device_checksummer is not None:
            checksum = self._device_checksummer.digest(job.layers, job.src_pages, job.after)
        self._on_sent(Sent(job=job, seq=segment.seq, nbytes=nbytes, checksum=checksum, transfer_s=took_s))
