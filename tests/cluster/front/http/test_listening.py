"""Who is let in where files run out."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from contextlib import suppress

import pytest

from cluster.front.http import listening
from cluster.front.http.listening import HttpListener

pytestmark = pytest.mark.unit


async def hello(scope: object, receive: object, send: object) -> None:
    raise AssertionError("nobody asks")


def listener() -> HttpListener:
    return HttpListener(hello, max_connections=4096, max_stall_s=30.0, tls=None)


async def test_what_comes_while_half_of_the_files_are_open_is_closed_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    doors = listener()
    port = await doors.start("127.0.0.1", 0)
    monkeypatch.setattr(listening, "half_of_files", lambda: 0)
    for _ in range(3):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 5.0) == b""
        writer.close()
    monkeypatch.setattr(listening, "half_of_files", lambda: 1 << 20)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(), 0.1)
    writer.close()
    await doors.stop()
    assert len(caplog.records) == 1


def test_no_files_are_told_of_once_and_not_for_each_that_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: socket.socket) -> object:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(socket.socket, "accept", fail)
    with listening._Door() as door:
        for _ in range(2):
            with pytest.raises(OSError, match="Too many open files"):
                door.accept()
            with pytest.raises(BlockingIOError):
                door.accept()
