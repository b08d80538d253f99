"""The cluster's secret, as worker/wire/rpc.py asks for it."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import pytest

from kvrelay.v1 import worker_pb2_grpc
from worker.wire import door, rpc

pytestmark = pytest.mark.unit


async def test_who_says_nothing_and_has_no_secret_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "FIRST_MESSAGE_S", 0.05)
    server = rpc.make_server(rpc.secret_door("right"))
    worker_pb2_grpc.add_HandoffServicer_to_server(worker_pb2_grpc.HandoffServicer(), server)
    port = rpc.bind(server, "127.0.0.1", 0)
    await server.start()
    stub: Any = worker_pb2_grpc.HandoffStub  # grpc generates no types
    async with rpc.open_channel(f"127.0.0.1:{port}") as channel:
        silent = stub(channel).Connect(metadata=rpc.secret_metadata("wrong"))
        assert await silent.code() is grpc.StatusCode.UNAUTHENTICATED
    await server.stop(None)
