from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trustme

from cluster.router.links.worker_link import WorkerEndpoint, WorkerLink
from kvrelay.v1 import worker_pb2_grpc
from tests.certificates import write_tls
from worker.awake import AwakeClock
from worker.wire import rpc
from worker.wire.tls import TlsFiles


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


@pytest.fixture
def members(tmp_path: Path) -> tuple[TlsFiles, TlsFiles]:
    """Of whom the first is believed by the second, and does not believe it."""
    authority, other = trustme.CA(), trustme.CA()
    believer = write_tls(tmp_path, other, stem="believer")
    Path(believer.ca).write_bytes(authority.cert_pem.bytes() + other.cert_pem.bytes())
    return write_tls(tmp_path, authority), believer


async def test_a_worker_that_does_not_believe_our_certificate_is_told_so(
    members: tuple[TlsFiles, TlsFiles],
) -> None:
    """As one does whose clock is wrong. gRPC says no more than that the socket was closed."""
    theirs, ours = members
    server = rpc.make_server()
    port = rpc.bind(server, "127.0.0.1", 0, theirs)
    await server.start()
    host: Any = None
    endpoint = WorkerEndpoint(name="mixed-0", role="mixed", address=f"127.0.0.1:{port}")
    link = WorkerLink(endpoint, host, AwakeClock(), router_id="router-0", tls=ours)
    before = link.reason
    link.start()
    async with asyncio.timeout(30):
        while (reason := link.reason) == before:
            await asyncio.sleep(0.001)
    await link.close()
    await server.stop(None)
    assert "see whether its time of day and its tls.ca" in reason


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
