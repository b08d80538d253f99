"""process_group moves KV through a two-rank torch ProcessGroup for each pair: gloo for CPU memory, NCCL for CUDA.

Two-sided. The ranks meet over a connection of the pair's own (pair_socket.py, pair_store.py): decode, rank 1, listens
for it; no store has a port. The group is outside any default one, so that a lost peer hurts one pair only. A segment's
pages are gathered into one contiguous buffer, sent, received and scattered; while one is on the way the next is
gathered, and the one before scattered. What gloo and NCCL then send over connections of their own is in plain.

What each backend makes necessary stands in gloo.py and gpu/nccl.py; how the ends wait, in two_rank_group.py.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import torch

from engine.pages.layout import KvLayout
from engine.pages.memory import KvMemory
from engine.pages.rows import Seen
from kv_transfer.base import ReceiveEnd, Segment, SendEnd, TransferError, Wire
from kv_transfer.transports.gloo import Gloo
from kv_transfer.transports.pair_socket import PairListener, dial, first_words
from kv_transfer.transports.pair_store import PairStore
from kv_transfer.transports.two_rank_group import DECODE_RANK, PREFILL_RANK, TwoRankGroup, first_line

BUFFERS = 3  # segments on the way, or about to be, at once


class Staging(Protocol):
    """Contiguous buffers, reused in turn, and the copies between them and the pages."""

    def take(self, nbytes: int) -> torch.Tensor:
        """A buffer of exactly nbytes; give it back with `give`."""

    def give(self, buffer: torch.Tensor) -> None: ...

    def gather(self, segment: Segment, out: torch.Tensor, seen: Seen | None) -> None: ...

    def settle(self) -> None:
        """Wait until what was gathered has left the pages."""

    def scatter(self, segment: Segment, data: torch.Tensor) -> None: ...


class Backend(Protocol):
    """How one kind of memory is moved: Gloo (gloo.py) or Nccl (gpu/nccl.py)."""

    @property
    def params(self) -> Mapping[str, str]: ...

    def meeting_s(self, timeout_s: float) -> float:
        """How long the ranks wait for each other at first."""

    def check(self, params: Mapping[str, str], peer: str) -> None: ...

    def staging(self, memory: KvMemory, timeout_s: float) -> Any: ...

    def group(
        self, store: Callable[[], Any], rank: int, memory: KvMemory, staging: Any, peer: str, timeout_s: float
    ) -> TwoRankGroup:
        """`store` is called when the group is opened."""


def backend_of(memory: KvMemory, host: str) -> Backend:
    if not memory.is_on_gpu:
        return Gloo(host)
    from kv_transfer.transports.gpu.cuda import gpu_of
    from kv_transfer.transports.gpu.nccl import Nccl

    return Nccl(gpu_of(memory.device))


class ProcessGroupSendEnd:
    one_sided = False

    def __init__(self, memory: KvMemory, staging: Staging, group: TwoRankGroup, store: PairStore, peer: str) -> None:
        self._layout = memory.layout
        self._staging = staging
        self._group = group
        self._store = store
        self._peer = peer
        self._in_flight: deque[tuple[Future[None], torch.Tensor]] = deque()

    def send(self, segment: Segment, seen: Seen | None = None) -> None:
        if len(self._in_flight) >= BUFFERS:
            self._finish_oldest()
        data = self._staging.take(_num_bytes(self._layout, segment.layers, segment.src_pages))
        self._staging.gather(segment, data, seen)
        self._in_flight.append((self._group.send(data), data))
        self._staging.settle()

    def flush(self) -> None:
        while self._in_flight:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        done, data = self._in_flight.popleft()
        done.result()
        self._staging.give(data)

    def abort(self) -> None:
        self._group.abort(f"the process group with {self._peer} is closed; open a new pair")
        self._store.abort()

    def close(self) -> None:
        self.abort()
        self._store.close()


class ProcessGroupReceiveEnd:
    one_sided = False
    sender_closed = False
    mapped_inode = 0

    def __init__(self, memory: KvMemory, backend: Backend, peer: str, wire: Wire) -> None:
        self._layout = memory.layout
        self._staging: Staging = backend.staging(memory, wire.timeout_s)
        self._peer = peer
        self._lock = threading.Lock()  # `expect` is called from another thread than the rest
        self._expected: deque[Segment] = deque()  # not posted yet
        self._posted: deque[tuple[int, Future[None], torch.Tensor]] = deque()
        self._arrived: torch.Tensor | None = None
        self._is_open = False
        self._meeting_s = backend.meeting_s(wire.timeout_s)
        self._listener = PairListener(wire)
        self._store: PairStore | None = None  # until the sender has come
        self._params = {**backend.params, **self._listener.params}
        self._group = backend.group(lambda: self._store, DECODE_RANK, memory, self._staging, peer, wire.timeout_s)

    @property
    def params(self) -> Mapping[str, str]:
        return self._params

    def open(self, timeout_s: float) -> None:
        try:
            sock = self._listener.accept(self._peer, self._meeting_s)
        except OSError as error:
            raise TransferError(f"cannot wait for {self._peer}: {first_words(error)}") from error
        self._store = PairStore(sock, timeout_s)
        self._group.open()
        with self._lock:
            self._is_open = True
            self._post_expected()

    def expect(self, segment: Segment) -> None:
        with self._lock:
            self._expected.append(segment)
            self._post_expected()

    def _post_expected(self) -> None:
        while self._is_open and self._expected and len(self._posted) < BUFFERS:
            segment = self._expected.popleft()
            data = self._staging.take(_num_bytes(self._layout, segment.layers, segment.dst_pages))
            try:
                self._posted.append((segment.seq, self._group.receive(data), data))
            except TransferError:
                self._is_open = False  # `receive` finds the group dead, and says so in the right thread

    def receive(self, segment: Segment) -> None:
        with self._lock:
            self._drop_arrived()
            self._post_expected()
            posted = self._posted.popleft() if self._posted else None
        if posted is None:
            posted = self._post_now(segment)
        seq, done, data = posted
        assert seq == segment.seq, f"segment {segment.seq} is received, but {seq} was expected"
        done.result()
        with self._lock:
            self._arrived = data
            self._post_expected()

    def _post_now(self, segment: Segment) -> tuple[int, Future[None], torch.Tensor]:
        """Nothing was expected, or the group is dead: then this raises."""
        data = self._staging.take(_num_bytes(self._layout, segment.layers, segment.dst_pages))
        return segment.seq, self._group.receive(data), data

    def place(self, segment: Segment) -> None:
        assert self._arrived is not None, "place follows receive"
        self._staging.scatter(segment, self._arrived)

    def _drop_arrived(self) -> None:
        if self._arrived is not None:
            self._staging.give(self._arrived)
            self._arrived = None

    def abort(self) -> None:
        self._group.abort(f"the process group with {self._peer} is closed; open a new pair")
        self._listener.abort()
        if self._store is not None:
            self._store.abort()

    def close(self) -> None:
        self.abort()
        self._listener.close()
        if self._store is not None:
            self._store.close()

    def forget(self) -> None:
        pass


class ProcessGroupTransport:
    name = "process_group"
    same_host_only = False
    encrypts = False

    def __init__(self, find_backend: Callable[[KvMemory, str], Backend] = backend_of) -> None:
        self._find_backend = find_backend

    def offer(self, memory: KvMemory, *, peer: str, wire: Wire) -> ReceiveEnd:
        try:
            return ProcessGroupReceiveEnd(memory, self._find_backend(memory, wire.host), peer, wire)
        except (OSError, RuntimeError, ValueError) as error:
            raise TransferError(f"cannot serve a process group on {wire.host}: {first_line(error)}") from error

    def connect(self, memory: KvMemory, params: Mapping[str, str], *, peer: str, wire: Wire) -> SendEnd:
        backend = self._find_backend(memory, wire.host)
        backend.check(params, peer)
        staging = backend.staging(memory, wire.timeout_s)
        store = PairStore(dial(params, wire, peer), wire.timeout_s)
        group = backend.group(lambda: store, PREFILL_RANK, memory, staging, peer, wire.timeout_s)
        try:
            group.open()
        except TransferError:
            store.close()
            raise
        return ProcessGroupSendEnd(memory, staging, group, store, peer)


def _num_bytes(layout: KvLayout, layers: range, pages: Sequence[int]) -> int:
    return layout.page_bytes(layers) * len(pages)


TRANSPORT = ProcessGroupTransport()
