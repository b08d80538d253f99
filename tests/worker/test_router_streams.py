"""RouterStreams: what a worker keeps for a router that does not read."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest

from kvrelay.v1 import worker_pb2 as pb
from kvrelay.v1 import worker_pb2_grpc
from worker import router_streams
from worker.router_streams import MAX_UNREAD, RouterLink, RouterStreams
from worker.rpc import PROTOCOL_VERSION, bind, make_server, open_channel

WIDE = ["x" * 1000] * 1000  # ids in a report: a megabyte, so that a few fill the stream's window


class _Host:
    def __init__(self) -> None:
        self.num_reports = 0
        self.lost = asyncio.Event()

    def hello(self) -> pb.WorkerHello:
        return pb.WorkerHello(role="prefill")

    def on_submit(self, link: RouterLink, submit: pb.Submit) -> None: ...

    def on_cancel(self, cancel: pb.Cancel) -> None: ...

    def on_reassign(self, reassign: pb.Reassign) -> None: ...

    def on_router_lost(self, router_id: str) -> None:
        self.lost.set()

    def report(self) -> pb.WorkerReport:
        self.num_reports += 1
        return pb.WorkerReport(request_ids=WIDE)


async def test_a_router_that_does_not_read_is_kept_no_heap_of_reports_and_is_missed_when_it_goes() -> None:
    host = _Host()
    streams = RouterStreams(host, report_interval_s=0.001)
    server = make_server()
    worker_pb2_grpc.add_WorkerServicer_to_server(streams, server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(30):
        call = worker_pb2_grpc.WorkerStub(channel).Connect()
        await call.write(pb.RouterMessage(hello=pb.RouterHello(router_id="r", protocol_version=PROTOCOL_VERSION)))
        assert (await call.read()).WhichOneof("kind") == "hello"
        streams.start()
        while host.num_reports < 2 * MAX_UNREAD:
            await asyncio.sleep(0)
        link = streams.link("r")
        assert link is not None
        assert link.outbox.qsize() <= MAX_UNREAD
        call.cancel()
        await host.lost.wait()
    await streams.stop()
    await server.stop(0)


async def test_a_router_that_says_nothing_more_is_lost_though_its_stream_stands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router_streams, "ROUTER_DEAD_AFTER_S", 0.02)
    host = _Host()
    streams = RouterStreams(host, report_interval_s=0.01)
    server = make_server()
    worker_pb2_grpc.add_WorkerServicer_to_server(streams, server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    streams.start()
    async with open_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(30):
        call = worker_pb2_grpc.WorkerStub(channel).Connect()
        await call.write(pb.RouterMessage(hello=pb.RouterHello(router_id="r", protocol_version=PROTOCOL_VERSION)))
        while await call.read() is not grpc.aio.EOF:
            pass
        await host.lost.wait()
    await streams.stop()
    await server.stop(0)
