"""cuda_ipc moves KV between two processes of one host, on one GPU or on two: the sender's kernel writes the pages.

One-sided, as shared_memory is (../one_sided.py). The receiver exports the allocation that holds its pages as a CUDA IPC
handle, and those of its other ranks, which it has from them; the sender opens each once for the pair and copies a
segment's pages, of all its layers and ranks, in one launch on a stream of its own. On another GPU the copy goes over
NVLink or PCIe (peer access).

    engine's stream  --event, recorded when a layer's KV was launched--> copy --the pair's events--> receiver's stream

`send` returns when the copy is done: what is announced then stands in the pages, and a lease that is over is over. The
pair's events (interprocess ones, whose handles the sender leaves as a note in the pair's file) order the receiver's
own reads after the copy as the device sees it; where such events cannot be had, the sender's wait alone does. There are
a few, used in turn: with one, a receiver would wait for the sender's next layer group, which is recorded before it
looks.

Within one process handles cannot be opened: there the receiver is found by its nonce, as in loopback.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from weakref import WeakValueDictionary

from engine.pages.memory import KvMemory
from engine.pages.page_table import Int64s, Places, check_pages
from engine.pages.rows import Seen
from kv_transfer.base import ReceiveEnd, Segment, SendEnd, TransferError, Wire
from kv_transfer.checksum import Checksummer
from kv_transfer.transports.gpu.cuda import gpu_of
from kv_transfer.transports.gpu.device import Gpu
from kv_transfer.transports.one_sided import OneSidedReceiveEnd, OneSidedSendEnd, column

log = logging.getLogger(__name__)

EVENTS = 8
HANDLE_BYTES = 64  # of an event

_in_process: WeakValueDictionary[str, CudaIpcReceiveEnd] = WeakValueDictionary()  # by nonce, while the receiver lives


class CudaIpcReceiveEnd(OneSidedReceiveEnd):
    def __init__(self, memory: KvMemory, gpu: Gpu, peer: str, timeout_s: float) -> None:
        handle, offset = gpu.export(memory)
        handles = [handle.hex(), *(other.handle.hex() for other in memory.others)]
        offsets = [offset, *(other.offset for other in memory.others)]
        super().__init__("cuda_ipc", memory, {"handle": handles, "offset": offsets}, {"gpu": gpu.uuid})
        self.memory = memory
        self.events: list[object] = []  # the pair's; set by a sender in this process, else opened from the note
        self._gpu = gpu
        self._peer = peer
        self._timeout_s = timeout_s
        self._queue = gpu.queue()
        self._has_events = True
        _in_process[self.params["nonce"]] = self

    def receive(self, segment: Segment) -> None:
        super().receive(segment)
        self._open_events()
        if self.events:
            self._queue.wait_for(self.events[segment.seq % EVENTS])
            self._queue.finish(self._timeout_s)

    def _open_events(self) -> None:
        """Once, and only when something was announced: by then the sender has left its note."""
        if self.events or not self._has_events:
            return
        note = self._pair_file.note
        try:
            self.events = [
                self._gpu.open_event(note[at : at + HANDLE_BYTES]) for at in range(0, len(note), HANDLE_BYTES)
            ]
        except (RuntimeError, TransferError) as error:
            self._has_events = False
            why = str(error).partition("\n")[0]
            log.warning("%s's CUDA events cannot be opened (%s): its own wait orders the copies", self._peer, why)


class CudaIpcSendEnd(OneSidedSendEnd):
    def __init__(self, memory: KvMemory, params: Mapping[str, str], peer: str, gpu: Gpu, timeout_s: float) -> None:
        super().__init__("cuda_ipc", memory, params, peer)
        self._gpu = gpu
        self._timeout_s = timeout_s
        self._source = memory
        self._opened: list[int] = []
        try:
            self._queue = gpu.queue()
            made = [gpu.new_event() for _ in range(EVENTS)]
            self._events = [event for event, _ in made]
            addresses = self._open_target(params, b"".join(handle for _, handle in made))
            shares = list(zip(self._target_shares, addresses, strict=True))
            self._target = Places(self._target_layout, shares)
        except BaseException:
            self._pair_file.close()  # nothing was ever written
            self._close_opened()
            raise

    def _open_target(self, params: Mapping[str, str], event_handles: bytes) -> list[int]:
        """The addresses of the receiver's shares here."""
        if int(params["pid"]) == os.getpid():
            return self._find_here(params["nonce"])
        for handle in column(params, "handle"):
            self._opened.append(self._gpu.open(bytes.fromhex(handle)))
        self._pair_file.leave_note(event_handles)
        return [at + int(offset) for at, offset in zip(self._opened, column(params, "offset"), strict=True)]

    def _find_here(self, nonce: str) -> list[int]:
        receiver = _in_process.get(nonce)
        if receiver is None:
            raise TransferError(f"{self._peer} is not in this process any more; open a new pair")
        receiver.events = self._events
        return [each.address for each in receiver.memory.shares]

    def _copy(self, segment: Segment, seen: Seen | None) -> None:
        source = self._source
        self._queue.wait_for(segment.after)
        self._queue.copy(
            source.places.to_read(segment.layers),
            self._target.to_write(segment.layers),
            _checked(segment.src_pages, source.layout.num_pages, "our"),
            _checked(segment.dst_pages, self._target_layout.num_pages, f"{self._peer}'s"),
        )
        self._queue.record(self._events[segment.seq % EVENTS])
        self._queue.finish(self._timeout_s)
        if seen is not None:
            Checksummer(source).show(segment.layers, segment.src_pages, seen)

    def _release(self) -> None:
        try:
            self._queue.finish(self._timeout_s)
        except TransferError as error:  # a copy may still be under way: only our end is the fence then
            log.error("a copy into %s's pages does not end: %s", self._peer, error)
            self._pair_file.close(has_stopped=False)
            return
        self._pair_file.close()
        self._close_opened()

    def _close_opened(self) -> None:
        opened, self._opened = self._opened, []
        for address in opened:
            try:
                self._gpu.close(address)
            except TransferError as error:
                log.warning("%s's memory stays open here: %s", self._peer, error)


def _checked(pages: Sequence[int], num_pages: int, whose: str) -> Int64s:
    try:
        return check_pages(pages, num_pages)
    except ValueError as error:
        raise TransferError(f"{whose} pages cannot be copied: {error}") from error


class CudaIpcTransport:
    name = "cuda_ipc"
    same_host_only = True
    encrypts = False

    def __init__(self, find_gpu: Callable[[str], Gpu] = gpu_of) -> None:
        """`find_gpu` gives the GPU that a memory's device names, or raises TransferError."""
        self._find_gpu = find_gpu

    def offer(self, memory: KvMemory, *, peer: str, wire: Wire) -> ReceiveEnd:
        try:
            return CudaIpcReceiveEnd(memory, self._find_gpu(memory.device), peer, wire.timeout_s)
        except (OSError, RuntimeError) as error:
            raise TransferError(f"this worker's KV cannot be shared by cuda_ipc: {error}") from error

    def connect(self, memory: KvMemory, params: Mapping[str, str], *, peer: str, wire: Wire) -> SendEnd:
        try:
            return CudaIpcSendEnd(memory, params, peer, self._find_gpu(memory.device), wire.timeout_s)
        except (KeyError, ValueError, OSError, RuntimeError) as error:
            raise TransferError(f"{peer}'s cuda_ipc cannot be used: {error}; use another transport") from error


TRANSPORT = CudaIpcTransport()
