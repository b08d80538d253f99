"""A GPU and an NCCL made of this computer's memory, which do nothing until they must: order that is left out shows.

A FakeQueue keeps what it is told and carries it out only in `finish`, `digest` or an event's `query`, each after what
it was told to wait for. So a copy that nobody waited for has not happened, and one that did not wait for the engine's
event reads what stood there before. Addresses are real ones; "other processes" are other mappings of a memfd.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock, local
from typing import Any

import numpy as np
import torch

from engine.pages.memory import KvMemory
from engine.pages.page_table import Int64s, PartTable, common
from kv_transfer.base import TransferError
from kv_transfer.transports.gpu.cuda_ipc import CudaIpcTransport
from kv_transfer.transports.gpu.nccl import Nccl
from kv_transfer.transports.process_group import ProcessGroupTransport

HANDLE_BYTES = 64


class FakeEvent:
    """Happens when the queue that it was last recorded in comes to it, or by `happen`."""

    def __init__(self) -> None:
        self.has_happened = False
        self.queue: FakeQueue | None = None

    def happen(self) -> None:
        self.has_happened = True

    def query(self) -> bool:
        if not self.has_happened and self.queue is not None:
            self.queue.run()
        return self.has_happened


class FakeQueue:
    def __init__(self, log: list[tuple[str, Any]]) -> None:
        self.log = log
        self._todo: deque[tuple[Callable[[], bool], Callable[[], None]]] = deque()  # (may it run now, what it does)
        self._lock = Lock()

    def wait_for(self, event: Any) -> None:
        if event is not None:
            self.add("wait", lambda: None, may_run=event.query)

    def copy(self, src: PartTable, dst: PartTable, src_pages: Int64s, dst_pages: Int64s) -> None:
        self.add("copy", lambda: copy_rows(src, dst, src_pages, dst_pages))

    def digest(self, parts: PartTable, pages: Int64s) -> int:
        self.finish(5.0)
        return hash(b"".join(row_bytes(parts, pages)))

    def record(self, event: Any) -> None:
        event.has_happened, event.queue = False, self
        self.add("record", event.happen)

    def mark(self) -> FakeEvent:
        event = FakeEvent()
        self.record(event)
        return event

    def finish(self, timeout_s: float) -> None:
        self.log.append(("finish", timeout_s))
        deadline_s = time.monotonic() + timeout_s
        while not self.run():
            if time.monotonic() > deadline_s:
                raise TransferError(f"the fake GPU copied nothing for {timeout_s:g} s")
            time.sleep(0.001)

    @contextmanager
    def current(self) -> Iterator[None]:
        before, _here.queue = current_queue(), self
        try:
            yield
        finally:
            _here.queue = before

    def add(self, name: str, act: Callable[[], None], may_run: Callable[[], bool] = lambda: True) -> None:
        self.log.append((name, None))
        self._todo.append((may_run, act))

    def run(self) -> bool:
        """Carry out what may be, in order; whether nothing is left."""
        with self._lock:
            while self._todo:
                may_run, act = self._todo[0]
                if not may_run():
                    return False
                act()
                self._todo.popleft()
            return True


_here = local()


def current_queue() -> FakeQueue | None:
    return getattr(_here, "queue", None)


def row_bytes(parts: PartTable, rows: Int64s) -> Iterator[bytes]:
    """Of whole pages, plane after plane; a token's heads may be in several places."""
    for plane in np.unique(parts.planes):
        there = np.flatnonzero(parts.planes == plane)
        there = there[np.argsort(parts.starts[there])]
        for row in rows.tolist():
            for token in range(int(parts.tokens[there[0]])):
                for part in there:
                    at = parts.addresses[part] + row * parts.page_bytes[part] + token * parts.run_bytes[part]
                    yield ctypes.string_at(int(at), int(parts.run_bytes[part]))


def copy_rows(src: PartTable, dst: PartTable, src_rows: Int64s, dst_rows: Int64s) -> None:
    both = common(src, dst)
    for part, nbytes in enumerate(both.run_bytes.tolist()):
        for s, d in zip(src_rows.tolist(), dst_rows.tolist(), strict=True):
            for run in range(int(both.runs[part])):
                from_at = both.src[part] + s * both.src_page_bytes[part] + run * both.src_run_bytes[part]
                to_at = both.dst[part] + d * both.dst_page_bytes[part] + run * both.dst_run_bytes[part]
                ctypes.memmove(int(to_at), int(from_at), nbytes)


@dataclass(eq=False)
class FakeGpu:
    """`log` holds the calls of all its queues, in order."""

    uuid: str = "GPU-fake"
    log: list[tuple[str, Any]] = field(default_factory=list)
    opened: dict[int, mmap.mmap] = field(default_factory=dict)
    events: dict[bytes, FakeEvent] = field(default_factory=dict)
    taken: int = 0

    @property
    def free_bytes(self) -> int:
        self.taken += 64 << 20  # whoever looks again finds less
        return (1 << 40) - self.taken

    def queue(self) -> FakeQueue:
        return FakeQueue(self.log)

    def export(self, memory: KvMemory) -> tuple[bytes, int]:
        if memory.fd is None:
            raise TransferError("the fake GPU exports memfds only")
        return f"{os.getpid()}/{memory.fd}/{len(memory.bytes)}".encode().ljust(HANDLE_BYTES, b"\0"), 0

    def open(self, handle: bytes) -> int:
        pid, fd, nbytes = handle.rstrip(b"\0").decode().split("/")
        own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        mapped = mmap.mmap(own, int(nbytes))
        os.close(own)
        address = np.frombuffer(mapped, np.uint8).ctypes.data
        self.opened[address] = mapped
        self.log.append(("open", address))
        return address

    def close(self, address: int) -> None:
        self.log.append(("close", address))
        del self.opened[address]

    def new_event(self) -> tuple[object, bytes]:
        event, handle = FakeEvent(), os.urandom(HANDLE_BYTES)
        self.events[handle] = event
        return event, handle

    def open_event(self, handle: bytes) -> object:
        if handle not in self.events:
            raise RuntimeError("another process's event cannot be opened by the fake GPU")
        return self.events[handle]


class FakeNccl:
    """What the two ranks of FakeGroups meet in: operations match in order, as NCCL's do."""

    def __init__(self) -> None:
        self.groups: list[FakeGroup] = []
        self.sent: dict[bytes, dict[int, bytes]] = {}  # by the id that rank 0 leaves at the store

    def make(self, store: Any, rank: int, device: str) -> FakeGroup:
        group = FakeGroup(self, store, rank)
        self.groups.append(group)
        return group


class FakeGroup:
    """One rank. A receive ends once the other rank's send of the same number has, on its queue, been reached."""

    def __init__(self, nccl: FakeNccl, store: Any, rank: int) -> None:
        self.rank = rank
        self.is_aborted = False
        self._sent_by_id = nccl.sent
        self._store = store
        self._number = 0
        if rank == 0:
            name = os.urandom(16)
            self._sent_by_id[name] = {}
            store.set("id", name)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> None:
        """On the current queue. Rank 0's bytes go; rank 1 waits for those of the same number."""
        assert options.rootRank == 0
        assert not options.asyncOp, "it would run on a stream that all groups share"
        current = current_queue()
        assert current is not None, "a message was posted outside the transport's own stream"
        self._number += 1
        number, tensor = self._number, tensors[0]
        if self.rank == 0:
            current.add(
                "nccl", lambda: self._sent().update({number: tensor.numpy().tobytes()}), lambda: not self.is_aborted
            )
            return

        def take() -> None:
            sent = torch.frombuffer(bytearray(self._sent().pop(number)), dtype=torch.uint8)
            assert len(sent) == len(tensor), "NCCL would hang: the two sides disagree about a size"
            tensor.copy_(sent)

        def has_come() -> bool:
            return not self.is_aborted and bool(self._store.check(["id"])) and number in self._sent()

        current.add("nccl", take, has_come)

    def abort(self) -> None:
        self.is_aborted = True

    def _sent(self) -> dict[int, bytes]:
        return self._sent_by_id[self._store.get("id")]


_gpu = FakeGpu()
_nccl = FakeNccl()
ON_GPU = ("cuda_ipc", "nccl")  # the transports that run on it
CUDA_IPC = CudaIpcTransport(lambda device: _gpu)
NCCL = ProcessGroupTransport(lambda memory, host: Nccl(FakeGpu(uuid=f"GPU-{id(memory)}"), _nccl.make))
