"""process_group moves KV through a two-rank torch ProcessGroup for each pair: gloo for CPU memory, NCCL for CUDA.

Two-sided. The receiver (rank 1) serves a TCPStore on its own address and a random name; both ranks meet there, outside
any default group, so that a lost peer hurts one pair only. A segment's pages are gathered into one contiguous buffer,
sent, received and scattered; while one is on the wire the next is gathered, and the one before scattered.

What gloo makes necessary (measured): a message larger than the buffer it arrives in ends the process, so a message's
size is its tag too, and a message of another size matches no receive and times out. `abort` does not wake a blocked
wait, so a thread of its own waits on the wire, and the ends wait for that thread, which can be left behind. After any
error the group is of no use: the pair must be opened anew, under a new name.
"""

from __future__ import annotations

import atexit
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed

from kv_transfer.base import ReceiveEnd, Segment, SendEnd, TransferError
from kv_transfer.layout import KvLayout
from kv_transfer.memory import KvMemory
from kv_transfer.rows import PageRows, Seen

dist: Any = torch.distributed  # its names are not all in its type stubs

SENDER, RECEIVER = 0, 1
BUFFERS = 3  # segments on the wire, or about to be, at once
BUFFER_BYTES = 8 << 20  # at least, so that segments of all sizes share buffers whose memory is there already

_wires: WeakSet[_Wire] = WeakSet()


@atexit.register
def _join_wires() -> None:
    """A thread that the interpreter's end finds inside gloo would end the process with std::terminate."""
    wires = list(_wires)
    for wire in wires:
        wire.abort("this process is ending")
    for wire in wires:
        wire.join()


class _Wire:
    """The two-rank group and the thread that waits for its operations, in order."""

    def __init__(self, make_group: Callable[[], Any], device: str, peer: str, timeout_s: float) -> None:
        self._make_group = make_group
        self._device = device
        self._peer = peer
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._pending: set[Future[None]] = set()
        self._error: TransferError | None = None
        self._works: SimpleQueue[tuple[Callable[[], Any], Future[None]] | None] = SimpleQueue()
        self._group: Any = None
        self._thread = threading.Thread(target=self._run, name=f"kv-wire-{peer}", daemon=True)
        _wires.add(self)

    def join(self) -> None:
        """After abort: wait for what still waits in gloo, which its timeout bounds."""
        if self._thread.is_alive():
            self._thread.join(self._timeout_s + 1.0)

    def open(self) -> None:
        """Meet the other rank."""
        opened: Future[None] = self._promise()
        self._thread.start()
        self._works.put((self._meet, opened))
        opened.result()

    def send(self, data: torch.Tensor) -> Future[None]:
        """Posted in the wire's thread: gloo writes to the socket in the call, and the caller has pages to gather."""
        done = self._promise()
        self._works.put((lambda: self._group.send([data], RECEIVER, _tag(data)), done))
        return done

    def receive(self, data: torch.Tensor) -> Future[None]:
        """Posted at once, so that the bytes may come before anybody waits for them."""
        done = self._promise()
        try:
            work = self._group.recv([data], SENDER, _tag(data))
        except (RuntimeError, ValueError) as error:
            self.abort(f"cannot reach {self._peer}: {_first_line(error)}")
            raise TransferError(f"cannot reach {self._peer}: {_first_line(error)}") from error
        self._works.put((lambda: (work, data)[0], done))  # gloo knows the buffer's address only: it must live as long
        return done

    def abort(self, reason: str) -> None:
        """Fail what is pending and what comes. The thread may linger in gloo until its timeout; it owns its buffers."""
        with self._lock:
            if self._error is not None:
                return
            self._error = TransferError(reason)
            pending, self._pending = self._pending, set()
        self._works.put(None)
        for future in pending:
            future.set_exception(self._error)

    def _promise(self) -> Future[None]:
        future: Future[None] = Future()
        with self._lock:
            if self._error is not None:
                raise self._error
            self._pending.add(future)
        return future

    def _run(self) -> None:
        try:
            while (entry := self._works.get()) is not None:
                post, done = entry
                self._wait(post())
                with self._lock:
                    if self._error is not None:
                        return
                    self._pending.remove(done)
                done.set_result(None)
        except (RuntimeError, ValueError) as error:
            self.abort(f"{self._peer} moved nothing for {self._timeout_s:g} s or is gone: {_first_line(error)}")
        finally:
            if self._device != "cpu" and self._group is not None:
                self._group.abort()
            self._group = None

    def _meet(self) -> None:
        self._group = self._make_group()

    def _wait(self, work: Any) -> None:
        if work is None:
            return
        if self._device == "cpu":
            work.wait()
            return
        deadline_s = time.monotonic() + self._timeout_s  # NCCL has no timeout of its own that spares the process
        while not work.is_completed():
            if time.monotonic() > deadline_s or self._error is not None:
                raise RuntimeError("the operation did not complete")
            time.sleep(50e-6)


class _Staging:
    """Contiguous buffers, reused in turn, and the copies between them and the pages."""

    def __init__(self, memory: KvMemory) -> None:
        self._memory = memory
        self._rows = PageRows(memory.layout, memory.bytes.numpy()) if memory.device == "cpu" else None
        self._buffers: list[torch.Tensor] = []

    def take(self, nbytes: int) -> torch.Tensor:
        """A buffer of exactly nbytes; give it back with `give`."""
        buffer = self._buffers.pop() if self._buffers else torch.empty(0, dtype=torch.uint8)
        if buffer.numel() < nbytes:
            capacity = max(nbytes, BUFFER_BYTES)
            buffer = torch.empty(capacity, dtype=torch.uint8, device=self._memory.device)
        return buffer[:nbytes]

    def give(self, buffer: torch.Tensor) -> None:
        whole = buffer.untyped_storage()
        self._buffers.append(torch.empty(0, dtype=torch.uint8, device=buffer.device).set_(whole))

    def gather(self, segment: Segment, out: torch.Tensor, seen: Seen | None) -> None:
        if self._rows is not None:
            self._rows.gather(segment.layers, segment.src_pages, out.numpy(), seen)
            return
        index = torch.tensor(segment.src_pages, device=self._memory.device)
        for part, block in self._blocks(segment.layers, len(segment.src_pages), out):
            torch.index_select(part, 0, index, out=block)
        torch.cuda.current_stream().synchronize()
        if seen is not None:
            seen(out.cpu().numpy().reshape(1, -1))

    def scatter(self, segment: Segment, data: torch.Tensor) -> None:
        if self._rows is not None:
            self._rows.scatter(segment.layers, segment.dst_pages, data.numpy())
            return
        index = torch.tensor(segment.dst_pages, device=self._memory.device)
        for part, block in self._blocks(segment.layers, len(segment.dst_pages), data):
            part.index_copy_(0, index, block)
        torch.cuda.current_stream().synchronize()

    def _blocks(self, layers: range, num_pages: int, data: torch.Tensor) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        pairs, at = [], 0
        for layer in layers:
            for part in (self._memory.k(layer), self._memory.v(layer)):
                nbytes = num_pages * part[0].numel() * part.element_size()
                pairs.append((part, data[at : at + nbytes].view(part.dtype).view(num_pages, *part.shape[1:])))
                at += nbytes
        return pairs


class ProcessGroupSendEnd:
    one_sided = False

    def __init__(self, memory: KvMemory, wire: _Wire, peer: str) -> None:
        self._layout = memory.layout
        self._staging = _Staging(memory)
        self._wire = wire
        self._peer = peer
        self._on_wire: deque[tuple[Future[None], torch.Tensor]] = deque()

    def send(self, segment: Segment, seen: Seen | None = None) -> None:
        if len(self._on_wire) >= BUFFERS:
            self._finish_oldest()
        data = self._staging.take(_num_bytes(self._layout, segment.layers, segment.src_pages))
        self._staging.gather(segment, data, seen)
        self._on_wire.append((self._wire.send(data), data))

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

    def __init__(self, memory: KvMemory, peer: str, host: str, timeout_s: float) -> None:
        self._layout = memory.layout
        self._staging = _Staging(memory)
        self._peer = peer
        self._lock = threading.Lock()  # `expect` is called from another thread than the rest
        self._expected: deque[Segment] = deque()  # not posted yet
        self._posted: deque[tuple[int, Future[None], torch.Tensor]] = deque()
        self._arrived: torch.Tensor | None = None
        self._is_open = False
        name = secrets.token_hex(8)
        store, port = _serve_store(host, timeout_s)
        self._params = {"name": name, "address": host, "port": str(port)}
        self._wire = _Wire(
            lambda: _make_group(store, name, RECEIVER, memory.device, host, timeout_s), memory.device, peer, timeout_s
        )

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

    def offer(self, memory: KvMemory, *, peer: str, host: str, timeout_s: float) -> ReceiveEnd:
        try:
            return ProcessGroupReceiveEnd(memory, peer, host, timeout_s)
        except (OSError, RuntimeError) as error:
            raise TransferError(f"cannot serve a process group on {host}: {_first_line(error)}") from error

    def connect(
        self, memory: KvMemory, params: Mapping[str, str], *, peer: str, host: str, timeout_s: float
    ) -> SendEnd:
        def make_group() -> Any:
            store = dist.TCPStore(
                params["address"],
                int(params["port"]),
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout_s),
            )
            return _make_group(store, params["name"], SENDER, memory.device, host, timeout_s)

        if not {"address", "port", "name"} <= params.keys():
            raise TransferError(f"{peer} offers a process group without an address; use another transport")
        wire = _Wire(make_group, memory.device, peer, timeout_s)
        wire.open()
        return ProcessGroupSendEnd(memory, wire, peer)


def _num_bytes(layout: KvLayout, layers: range, pages: Sequence[int]) -> int:
    return layout.page_bytes(layers) * len(pages)


def _tag(data: torch.Tensor) -> int:
    """The size, within the 31 bits of a tag."""
    return data.numel() % (1 << 31)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200]


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


def _make_group(store: Any, name: str, rank: int, device: str, host: str, timeout_s: float) -> Any:
    """Blocks until both ranks are there."""
    prefixed = dist.PrefixStore(name, store)
    if device == "cpu":
        return _make_gloo(prefixed, rank, host, timeout_s)
    return _make_nccl(prefixed, rank, device, timeout_s)


def _make_gloo(store: Any, rank: int, host: str, timeout_s: float) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [gloo.create_device(hostname=host)]
    options._threads = 1
    return gloo(store, rank, 2, options)


def _make_nccl(store: Any, rank: int, device: str, timeout_s: float) -> Any:
    nccl: Any = dist.ProcessGroupNCCL
    torch.cuda.set_device(device)
    options = nccl.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return nccl(store, rank, 2, options)


TRANSPORT = ProcessGroupTransport()
