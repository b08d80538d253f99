from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest

from cluster.router.links.worker_link import WorkerEndpoint, WorkerLink
from kvrelay.v1 import worker_pb2_grpc
from worker.awake import AwakeClock


async def test_one_that_is_ended_in_the_moment_in_which_its_call_fails_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC keeps such a cancel to itself."""
    ended: list[asyncio.Task[None]] = []

    def end_once() -> None:
        if not ended and link._task is not None:
            ended.append(link._task)
            link._task.cancel()  # as `close` does

    _on_call_done(monkeypatch, end_once)
    with socket.socket() as nobody:  # it never listens
        nobody.bind(("127.0.0.1", 0))
        endpoint = WorkerEndpoint(name="mixed-0", role="mixed", address=f"127.0.0.1:{nobody.getsockname()[1]}")
        host: Any = None  # it hears nothing of a worker that was never there
        link = WorkerLink(endpoint, host, AwakeClock(), router_id="router-0")
        link.start()
        async with asyncio.timeout(10):
            while not ended:
                await asyncio.sleep(0.001)
        done, _ = await asyncio.wait(ended, timeout=3)
        await link.close()
    assert done, "it goes on"


def _on_call_done(monkeypatch: pytest.MonkeyPatch, told: Callable[[], None]) -> None:
    """`told` as soon as a call to a worker is over, before anybody who waits for it goes on."""
    init: Any = worker_pb2_grpc.WorkerStub.__init__

    def init_watched(stub: Any, channel: Any) -> None:
        init(stub, channel)
        connect = stub.Connect

        def connect_watched(*args: Any, **options: Any) -> Any:
            call = connect(*args, **options)
            call.add_done_callback(lambda _: told())
            return call

        stub.Connect = connect_watched

    monkeypatch.setattr(worker_pb2_grpc.WorkerStub, "__init__", init_watched)
