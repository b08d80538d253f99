"""process_group moves KV through a two-rank torch ProcessGroup for each pair: gloo for CPU memory, NCCL for CUDA.

Two-sided. The receiver (rank 1) serves a TCPStore on its own address and a random name; both ranks meet there, outside
any default group, so that a lost peer hurts one pair only. A segment's pages are gathered into one contiguous buffer,
sent, received and scattered; while one is on the wire the next is gathered, and the one before scattered.

What gloo makes necessary (measured): a message larger than the buffer it arrives in ends the process, so a message's
size is its tag too, and a message of another size matches no receive and times out. What NCCL does: nccl.py. How the
ends wait: wire.py.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed

from engine.pages.layout import KvLayout
from engine.pages.memory import KvMemory
from engine.pages.rows import PageRows, Seen
from kv_transfer.base import ReceiveEnd, Segment, SendEnd, TransferError
from kv_transfer.transports.wire import RECEIVER, SENDER, GlooWire, Wire, first_line

dist: Any = torch.distributed  # its names are not all in its type stubs

BUFFERS = 3  # segments on the wire, or about to be, at once
BUFFER_BYTES = 8 << 20  # at least, so that segments of all sizes share buffers whose memory is there already


class Staging(Protocol):
    """Contiguous buffers, reused in turn, and the copies between them and the pages."""

    def take(self, nbytes: int) -> torch.Tensor:
        """A buffer of exactly nbytes; give it back with `give`."""

    def give(self, buffer: torch.Tensor) -> None: ...

    def gather(self, segment: Segment, out: torch.Tensor, seen: Seen | None) -> None: ...

    def settle(self) -> None:
        """Wait until what was gathered has left the pages."""

    def scatter(self, segment: Segment, data: torch.Tensor) -> None: ...


class Kind(Protocol):
    """How one kind of memory is moved: Gloo here, Nccl in nccl.py."""

    @property
    def params(self) -> Mapping[str, str]: ...

    def check(self, params: Mapping[str, str], peer: str) -> None: ...

    def staging(self, memory: KvMemory, timeout_s: float) -> Any: ...

    def wire(
        self, store: Callable[[], Any], rank: int, memory: KvMemory, staging: Any, peer: str, timeout_s: float
    ) -> Wire: ...


class CpuStaging:
    def __init__(self, memory: KvMemory) -> None:
        self._rows = PageRows(memory.layout, memory.bytes.numpy())
        self._buffers: list[torch.Tensor] = []

    def take(self, nbytes: int) -> torch.Tensor:
        buffer = self._buffers.pop() if self._buffers else torch.empty(0, dtype=torch.uint8)
        if buffer.numel() < nbytes:
            buffer = torch.empty(max(nbytes, BUFFER_BYTES), dtype=torch.uint8)
        return buffer[:nbytes]

    def give(self, buffer: torch.Tensor) -> None:
        self._buffers.append(torch.empty(0, dtype=torch.uint8).set_(buffer.untyped_storage()))

    def gather(self, segment: Segment, out: torch.Tensor, seen: Seen | None) -> None:
        self._rows.gather(segment.layers, segment.src_pages, out.numpy(), seen)

    def settle(self) -> None:
        pass

    def scatter(self, segment: Segment, data: torch.Tensor) -> None:
        self._rows.scatter(segment.layers, segment.dst_pages, data.numpy())


class Gloo:
    """`host`: the address that says which network is used."""

    params: Mapping[str, str] = {"kind": "gloo"}

    def __init__(self, host: str) -> None:
        self._host = host

    def check(self, params: Mapping[str, str], peer: str) -> None:
        if params.get("kind") != "gloo":
            raise TransferError(f"{peer}'s KV is on a GPU and ours on the CPU; give both pools the same device")

    def staging(self, memory: KvMemory, timeout_s: float) -> CpuStaging:
        return CpuStaging(memory)

    def wire(
        self, store: Callable[[], Any], rank: int, memory: KvMemory, staging: Any, peer: str, timeout_s: float
    ) -> GlooWire:
        return GlooWire(lambda: _make_gloo(store(), rank, self._host, timeout_s), peer, timeout_s)


def kind_of(memory: KvMemory, host: str) -> Kind:
    if not memory.is_on_gpu:
        return Gloo(host)
    from kv_transfer.transports.gpu.cuda import gpu_of
    from kv_transfer.transports.gpu.nccl import Nccl

    return Nccl(gpu_of(memory.device))


class ProcessGroupSendEnd:
    one_sided = False

    def __init__(self, memory: KvMemory, staging: Staging, wire: Wire, peer: str) -> None:
        self._layout = memory.layout
        self._staging = staging
        self._wire = wire
        self._peer = peer
        self._on_wire: deque[tuple[Future[None], torch.Tensor]] = deque()

    def send(self, segment: Segment, seen: Seen | None = None) -> None:
        if len(self._on_wire) >= BUFFERS:
            self._finish_oldest()
        data = self._staging.take(_num_bytes(self._layout, segment.layers, segment.src_pages))
        self._staging.gather(segment, data, seen)
        self._on_wire.append((self._wire.send(data), data))
        self._staging.settle()

    def flush(self) -> None:
        while self._on_wire:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        done, data = self._on_wire.popleft()
        done.result()
        self._staging.give(data)

    def abort(self) -> None:
        self._wire.abort(f"the process group with {self._peer} is closed; open a new pair")

    def close(self) -> None:
        self.abort()


class ProcessGroupReceiveEnd:
    one_sided = False
    sender_closed = False

    def __init__(self, memory: KvMemory, kind: Kind, peer: str, host: str, timeout_s: float) -> None:
        self._layout = memory.layout
        self._staging: Staging = kind.staging(memory, timeout_s)
        self._peer = peer
        self._lock = threading.Lock()  # `expect` is called from another thread than the rest
        self._expected: deque[Segment] = deque()  # not posted yet
        self._posted: deque[tuple[int, Future[None], torch.Tensor]] = deque()
        self._arrived: torch.Tensor | None = None
        self._is_open = False
        name = secrets.token_hex(8)
        store, port = _serve_store(host, timeout_s)
        self._params = {**kind.params, "name": name, "address": host, "port": str(port)}
        self._wire = kind.wire(lambda: dist.PrefixStore(name, store), RECEIVER, memory, self._staging, peer, timeout_s)

    @property
    def params(self) -> Mapping[str, str]:
        return self._params

    def open(self, timeout_s: float) -> None:
        self._wire.open()
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
                self._posted.append((segment.seq, self._wire.receive(data), data))
            except TransferError:
                self._is_open = False  # `receive` finds the wire dead, and says so in the right thread

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
        """Nothing was expected, or the wire is dead: then this raises."""
        data = self._staging.take(_num_bytes(self._layout, segment.layers, segment.dst_pages))
        return segment.seq, self._wire.receive(data), data

    def place(self, segment: Segment) -> None:
        assert self._arrived is not None, "place follows receive"
        self._staging.scatter(segment, self._arrived)

    def _drop_arrived(self) -> None:
        if self._arrived is not None:
            self._staging.give(self._arrived)
            self._arrived = None

    def abort(self) -> None:
        self._wire.abort(f"the process group with {self._peer} is closed; open a new pair")

    def close(self) -> None:
        self.abort()


class ProcessGroupTransport:
    name = "process_group"
    same_host_only = False

    def __init__(self, find_kind: Callable[[KvMemory, str], Kind] = kind_of) -> None:
        self._find_kind = find_kind

    def offer(self, memory: KvMemory, *, peer: str, host: str, timeout_s: float) -> ReceiveEnd:
        try:
            return ProcessGroupReceiveEnd(memory, self._find_kind(memory, host), peer, host, timeout_s)
        except (OSError, RuntimeError) as error:
            raise TransferError(f"cannot serve a process group on {host}: {first_line(error)}") from error

    def connect(
        self, memory: KvMemory, params: Mapping[str, str], *, peer: str, host: str, timeout_s: float
    ) -> SendEnd:
        if not {"address", "port", "name"} <= params.keys():
            raise TransferError(f"{peer} offers a process group without an address; use another transport")
        kind = self._find_kind(memory, host)
        kind.check(params, peer)

        def store() -> Any:
            served = dist.TCPStore(
                params["address"],
                int(params["port"]),
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout_s),
            )
            return dist.PrefixStore(params["name"], served)

        staging = kind.staging(memory, timeout_s)
        wire = kind.wire(store, SENDER, memory, staging, peer, timeout_s)
        wire.open()
        return ProcessGroupSendEnd(memory, staging, wire, peer)


def _num_bytes(layout: KvLayout, layers: range, pages: Sequence[int]) -> int:
    return layout.page_bytes(layers) * len(pages)


def _serve_store(host: str, timeout_s: float) -> tuple[Any, int]:
    """A store that listens on `host` only, on a port of the system's choice."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    port = int(listener.getsockname()[1])
    store = dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )
    return store, port


def _make_gloo(store: Any, rank: int, host: str, timeout_s: float) -> Any:
    """Blocks until both ranks are there."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [gloo.create_device(hostname=host)]
    options._threads = 1
    return gloo(store, rank, 2, options)


TRANSPORT = ProcessGroupTransport()
