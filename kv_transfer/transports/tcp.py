"""tcp moves KV between two hosts over one connection for each pair (pair_socket.py), in TLS where the cluster has it.

Two-sided, CPU memory only. A segment is its place in the pair's order, its size and its bytes in KvLayout's order.
Runs of pages leave from where they stand, scattered ones through a piece of the cache. They arrive in a buffer and are
put into the pages by `place`: whose pages they are may have changed while they were on the way.
"""

from __future__ import annotations

import queue
import select
import socket
import ssl
import struct
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

from engine.pages.layout import KvLayout
from engine.pages.memory import KvMemory
from engine.pages.rows import Seen
from kv_transfer.base import ReceiveEnd, Segment, SendEnd, TransferError, Wire
from kv_transfer.plan import MAX_SEGMENT_BYTES
from kv_transfer.transports.pair_socket import PairListener, dial, first_words, shut

HEADER = struct.Struct("<QQ")  # place in the pair's order, bytes
MOST_VIEWS = 1024  # IOV_MAX of Linux
BUFFERS = 3  # segments that were read, or are being placed, at once

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class _Arrived:
    seq: int
    nbytes: int
    data: Bytes


class _End:
    """One end of the connection. After any error it is of no use."""

    one_sided = False

    def __init__(self, memory: KvMemory, peer: str, timeout_s: float) -> None:
        self._layout: KvLayout = memory.layout
        self._rows = memory.rows
        self._peer = peer
        self._timeout_s = timeout_s
        self._lock = threading.Lock()  # `abort` comes from another thread
        self._reason = ""
        self._socket: socket.socket | None = None

    def abort(self) -> None:
        self._fail(f"the tcp connection with {self._peer} is closed; open a new pair")

    def close(self) -> None:
        self.abort()
        if self._socket is not None:
            self._socket.close()

    def _use(self, sock: socket.socket) -> None:
        with self._lock:
            self._socket = sock
            is_over = bool(self._reason)
        if is_over:
            shut(sock)

    def _fail(self, reason: str) -> None:
        with self._lock:
            self._reason = self._reason or reason
        if self._socket is not None:
            shut(self._socket)

    @contextmanager
    def _connected(self) -> Iterator[socket.socket]:
        """Whatever goes wrong with it is a TransferError, from now on."""
        try:
            if self._reason or self._socket is None:
                raise ConnectionError("no connection")
            yield self._socket
        except TransferError as error:
            self._fail(str(error))
            raise
        except TimeoutError as error:
            self._fail(f"{self._peer} moved nothing for {self._timeout_s:g} s or is gone; open a new pair")
            raise TransferError(self._reason) from error
        except OSError as error:
            self._fail(f"the connection with {self._peer} is lost: {first_words(error)}; open a new pair")
            raise TransferError(self._reason) from error


class TcpSendEnd(_End):
    def __init__(self, memory: KvMemory, sock: socket.socket, peer: str, timeout_s: float) -> None:
        super().__init__(memory, peer, timeout_s)
        self._use(sock)

    def send(self, segment: Segment, seen: Seen | None = None) -> None:
        with self._connected() as sock:
            _check_there(sock)
            sock.sendall(HEADER.pack(segment.seq, _num_bytes(self._layout, segment, len(segment.src_pages))))
            for batch in self._rows.batches(segment.layers, segment.src_pages):
                if seen is not None:
                    for block in batch:
                        seen(block)
                _send_all(sock, [memoryview(block).cast("B") for block in batch])  # type: ignore[arg-type]

    def flush(self) -> None:
        """What was sent has left the pages."""
        with self._connected() as sock:
            _check_there(sock)


class TcpReceiveEnd(_End):
    """A thread of its own reads ahead: a segment is announced only once it was sent, and the sockets hold less."""

    sender_closed = False
    mapped_inode = 0

    def __init__(self, memory: KvMemory, peer: str, wire: Wire) -> None:
        super().__init__(memory, peer, wire.timeout_s)
        self._max_bytes = min(memory.layout.total_bytes, MAX_SEGMENT_BYTES)
        self._listener = PairListener(wire)
        self._reader = threading.Thread(target=self._read, name=f"kv-read-{peer}", daemon=True)
        self._moved = 0  # bytes, by the reader
        self._arrived: SimpleQueue[_Arrived | None] = SimpleQueue()  # None: nothing more comes
        self._free: SimpleQueue[Bytes | None] = SimpleQueue()  # None: nothing more is wanted
        self._buffer = np.empty(0, np.uint8)  # of the segment that was received last
        for _ in range(BUFFERS - 1):
            self._free.put(np.empty(0, np.uint8))

    @property
    def params(self) -> Mapping[str, str]:
        return self._listener.params

    def open(self, timeout_s: float) -> None:
        try:
            sock = self._listener.accept(self._peer, timeout_s)
        except OSError as error:
            self._fail(f"cannot wait for {self._peer}: {first_words(error)}")
            raise TransferError(self._reason) from error
        sock.settimeout(None)  # `receive` looks whether anything moves
        self._use(sock)
        self._reader.start()

    def expect(self, segment: Segment) -> None:
        pass

    def receive(self, segment: Segment) -> None:
        self._free.put(self._buffer)
        with self._connected():
            arrived = self._next()
            nbytes = _num_bytes(self._layout, segment, len(segment.dst_pages))
            if (arrived.seq, arrived.nbytes) != (segment.seq, nbytes):
                both = f"segment {arrived.seq} of {arrived.nbytes} bytes where {segment.seq} of {nbytes} belongs"
                raise TransferError(f"{self._peer} sends {both}; open a new pair")
            self._buffer = arrived.data

    def place(self, segment: Segment) -> None:
        self._rows.scatter(segment.layers, segment.dst_pages, self._buffer)

    def abort(self) -> None:
        super().abort()
        self._listener.abort()
        self._free.put(None)

    def close(self) -> None:
        self.abort()
        if self._reader.is_alive():
            self._reader.join()
        super().close()
        self._listener.close()

    def forget(self) -> None:
        pass

    def _next(self) -> _Arrived:
        while True:
            moved = self._moved
            try:
                arrived = self._arrived.get(timeout=self._timeout_s)
            except queue.Empty:
                if moved == self._moved:
                    raise TimeoutError from None
                continue
            if arrived is None:
                raise ConnectionError("the other side has closed it")
            return arrived

    def _read(self) -> None:
        try:
            with self._connected() as sock:
                header = bytearray(HEADER.size)
                while (buffer := self._free.get()) is not None:
                    self._fill(sock, memoryview(header))
                    seq, nbytes = HEADER.unpack(header)
                    if nbytes > self._max_bytes:
                        raise TransferError(f"{self._peer} sends a segment of {nbytes} bytes; {self._max_bytes} can be")
                    if len(buffer) < nbytes:
                        buffer = np.empty(nbytes, np.uint8)
                    self._fill(sock, memoryview(buffer)[:nbytes])  # type: ignore[arg-type]  # numpy: as in checksum.py
                    self._arrived.put(_Arrived(seq=seq, nbytes=nbytes, data=buffer))
        except TransferError:
            pass  # `receive` says it
        finally:
            self._arrived.put(None)

    def _fill(self, sock: socket.socket, view: memoryview) -> None:
        while view:
            got = sock.recv_into(view)
            if not got:
                raise ConnectionError("the other side has closed it")
            self._moved += got
            view = view[got:]


def _num_bytes(layout: KvLayout, segment: Segment, num_pages: int) -> int:
    return layout.page_bytes(segment.layers) * num_pages


def _send_all(sock: socket.socket, views: list[memoryview]) -> None:
    """In as few system calls as the socket takes it; in TLS, whose sockets take one buffer, one for each."""
    if isinstance(sock, ssl.SSLSocket):
        for view in views:
            sock.sendall(view)
        return
    at = 0
    while at < len(views):
        sent = sock.sendmsg(views[at : at + MOST_VIEWS])
        while at < len(views) and sent >= len(views[at]):
            sent -= len(views[at])
            at += 1
        if sent:
            views[at] = views[at][sent:]


def _check_there(sock: socket.socket) -> None:
    """The receiver says nothing after its answer: what can be read is its end, and what is sent now would be lost."""
    if _is_readable(sock):
        raise ConnectionError("the other side has closed it")


def _is_readable(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


class TcpTransport:
    name = "tcp"
    same_host_only = False
    encrypts = True

    def offer(self, memory: KvMemory, *, peer: str, wire: Wire) -> ReceiveEnd:
        _check_memory(memory)
        try:
            return TcpReceiveEnd(memory, peer, wire)
        except (OSError, ValueError) as error:
            raise TransferError(f"cannot listen on {wire.host} for {peer}: {first_words(error)}") from error

    def connect(self, memory: KvMemory, params: Mapping[str, str], *, peer: str, wire: Wire) -> SendEnd:
        _check_memory(memory)
        return TcpSendEnd(memory, dial(params, wire, peer), peer, wire.timeout_s)


def _check_memory(memory: KvMemory) -> None:
    if memory.device != "cpu":
        raise TransferError(f"tcp moves CPU memory only, and this worker's KV is on {memory.device}")


TRANSPORT = TcpTransport()
