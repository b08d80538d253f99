"""A router between fake workers, and a client of it: what the router's tests stand on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from cluster.front.server import RouterServer, ServerOptions, server_options
from cluster.front.tokenizer import TextCodec
from kvrelay.v1 import cluster_pb2, cluster_pb2_grpc, generate_pb2, generate_pb2_grpc
from tests.fakes import FakeDecodeWorker, FakePrefillWorker, FakeWorker
from worker.wire.rpc import open_channel

WAIT_S = 20.0


class Harness:
    def __init__(self, server: RouterServer, workers: Sequence[FakeWorker], channel: grpc.aio.Channel) -> None:
        self.server = server
        self.router = server.router
        self.workers = {worker.name: worker for worker in workers}
        self.channel = channel
        self.generate = generate_pb2_grpc.GenerateStub(channel)
        self._cluster = cluster_pb2_grpc.ClusterStub(channel)

    def prefill(self, index: int = 0) -> FakePrefillWorker:
        worker = self.workers[f"prefill-{index}"]
        assert isinstance(worker, FakePrefillWorker)
        return worker

    def decode(self, index: int = 0) -> FakeDecodeWorker:
        worker = self.workers[f"decode-{index}"]
        assert isinstance(worker, FakeDecodeWorker)
        return worker

    async def status(self) -> cluster_pb2.GetStatusResponse:
        status: cluster_pb2.GetStatusResponse = await self._cluster.GetStatus(cluster_pb2.GetStatusRequest())
        return status

    async def until(self, predicate: Callable[[], bool]) -> None:
        """Wait for something that the router learns from its workers."""
        async with asyncio.timeout(WAIT_S):
            while not predicate():
                await asyncio.sleep(0.002)

    async def ready(self) -> None:
        """All workers have said hello, and what room they have: of two alike the first one is chosen then."""
        told = self.router.workers
        await self.until(lambda: all(link.state == "ready" and report is not None for link, report, _ in told()))

    def count(self, name: str) -> int:
        return self.router.metrics.counts[name]


@asynccontextmanager
async def serving(
    prefills: int = 1,
    decodes: int = 1,
    *,
    options: ServerOptions | None = None,
    codec: TextCodec | None = None,
    worker: dict[str, Any] | None = None,
) -> AsyncIterator[Harness]:
    """A router with so many fake workers, all connected; the router's books must balance at the end."""
    worker = worker or {}
    decode = [FakeDecodeWorker(name=f"decode-{i}", **worker) for i in range(decodes)]
    prefill = [FakePrefillWorker(name=f"prefill-{i}", decodes=decode, **worker) for i in range(prefills)]
    workers: list[FakeWorker] = [*prefill, *decode]
    server = RouterServer(options or server_options(port=0), codec=codec)
    port = await server.start()
    endpoints = [await each.start() for each in workers]
    channel = open_channel(f"127.0.0.1:{port}")
    try:
        server.set_workers(endpoints)
        harness = Harness(server, workers, channel)
        await harness.ready()
        yield harness
        server.router.check_invariants()
    finally:
        await channel.close()
        await server.stop()
        for each in workers:
            await each.kill()
    server.router.check_invariants()
    assert server.router.num_submissions == 0
    assert server.router.num_in_flight == 0


def request(ids: Sequence[int] = (5, 6, 7), **sampling: Any) -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(
        token_ids=generate_pb2.TokenIds(ids=ids), sampling=generate_pb2.SamplingParams(**sampling)
    )


async def collect(call: Any) -> list[generate_pb2.GenerateResponse]:
    async with asyncio.timeout(WAIT_S):
        return [response async for response in call]


def tokens_of(responses: Sequence[generate_pb2.GenerateResponse], choice: int = 0) -> list[int]:
    return [token for response in responses if response.index == choice for token in response.token_ids]
