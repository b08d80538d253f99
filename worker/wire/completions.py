"""Completions: how grpc.aio tells an event loop what is done, without the waits of its own way.

Its thread puts each completion in a queue and a byte into a socket; the loop, woken by the socket, takes all that are
in the queue but reads one byte (_handle_events of grpc's completion_queue.pyx.pxi, 1.85). So it is woken for every
other byte in vain. Once some 280 bytes are in the socket gRPC's thread stands until one is read, and each turn of the
loop takes one completion: behind a flood of calls a probe of health then waits for a second, with a loop that is never
late.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

MANY_BYTES = 65_536  # more than a socket holds of single ones


@contextmanager
def told_together() -> Iterator[None]:
    """Where gRPC meets the running loop in here for the first time, as it does when a server is made, the loop reads
    all bytes at once from then on."""
    loop = asyncio.get_running_loop()
    add_reader = loop.add_reader

    def add(bytes_of: socket.socket, take_all: Callable[[], object]) -> None:
        read = bytearray(MANY_BYTES)

        def read_all() -> None:
            with suppress(BlockingIOError):  # another loop of the process was woken, too
                bytes_of.recv_into(read)
            try:
                take_all()
            except Exception:  # it has taken one, of a loop that is closed
                loop.call_soon(read_all)  # those behind it have no byte left that tells
                raise

        add_reader(bytes_of, read_all)

    setattr(loop, "add_reader", add)  # noqa: B010
    try:
        yield
    finally:
        delattr(loop, "add_reader")
