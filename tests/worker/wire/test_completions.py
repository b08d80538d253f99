import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from worker.wire.completions import told_together
from worker.wire.rpc import make_server

pytestmark = pytest.mark.unit


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    reads, writes = socket.socketpair()
    reads.setblocking(False)
    with reads, writes:
        yield reads, writes


async def test_many_bytes_wake_once(sockets: tuple[socket.socket, socket.socket]) -> None:
    reads, writes = sockets
    woken = []
    loop = asyncio.get_running_loop()
    with told_together():
        loop.add_reader(reads, lambda: woken.append(1))
    for _ in range(200):
        writes.send(b"1")
    await asyncio.sleep(0.05)
    loop.remove_reader(reads)
    assert len(woken) == 1


async def test_bytes_that_another_loop_has_read_do_no_harm(sockets: tuple[socket.socket, socket.socket]) -> None:
    reads, writes = sockets
    loop, woken = asyncio.get_running_loop(), asyncio.Event()
    with told_together():
        loop.add_reader(reads, woken.set)
    writes.send(b"1")
    loop.call_soon(reads.recv, 1)  # in the turn before the reader is called
    await asyncio.wait_for(woken.wait(), 5)
    loop.remove_reader(reads)


async def test_one_that_fails_does_not_hide_those_behind_it(sockets: tuple[socket.socket, socket.socket]) -> None:
    reads, writes = sockets
    loop, queue, told = asyncio.get_running_loop(), [1, 0, 0, 1], list[int]()
    loop.set_exception_handler(lambda _, context: told.append(-1))

    def take_all() -> None:
        while queue:
            told.append(1 // queue.pop(0))  # gRPC's fails for a loop that is closed

    with told_together():
        loop.add_reader(reads, take_all)
    writes.send(b"1111")
    await asyncio.sleep(0.05)
    loop.remove_reader(reads)
    assert told == [1, -1, -1, 1]


class WatchedLoop(asyncio.SelectorEventLoop):
    """Remembers what wakes it."""

    def __init__(self) -> None:
        super().__init__()
        self.readers: list[Any] = []

    def add_reader(self, fd: Any, callback: Any, *args: Any) -> None:  # type: ignore[override]
        self.readers.append(callback)
        super().add_reader(fd, callback, *args)


def test_a_server_takes_its_completions_together() -> None:
    async def make() -> list[Any]:
        await make_server().stop(None)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, WatchedLoop)
        return loop.readers

    with asyncio.Runner(loop_factory=WatchedLoop) as runner:
        readers = runner.run(make())
    assert [reader.__name__ for reader in readers] == ["read_all"]
