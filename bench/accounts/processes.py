"""The processes of bench.accounts: workers that compute nothing and are killed by a line, and routers that are killed.

python -m bench.accounts.processes workers|router SETTINGS
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import aiohttp
import grpc.aio

from bench.common import end_with_parent
from bench.router import Child, serve_router
from kvrelay.v1 import generate_pb2_grpc
from tests.fakes import FakeDecodeWorker, FakePrefillWorker, FakeWorker
from worker.wire.rpc import open_channel

MODULE = "bench.accounts.processes"
PAIRS = 3  # of workers
AWAY_S = 0.3  # that a worker which was killed is away


class Workers:
    """All in one process."""

    def __init__(self, step_s: float) -> None:
        self._settings: dict[str, Any] = {"step_s": step_s, "ports": {}}

    async def start(self) -> None:
        self._child = await asyncio.to_thread(Child, "workers", json.dumps(self._settings), module=MODULE)
        self.endpoints: list[list[str]] = self._child.ready["workers"]
        self._settings["ports"] = {name: int(address.rpartition(":")[2]) for name, _, address in self.endpoints}

    def kill_one(self, number: int) -> None:
        """It is gone at once, and comes back empty."""
        self._child.send(self.endpoints[number % len(self.endpoints)][0])

    async def kill_all(self) -> None:
        os.kill(self._child.pid, signal.SIGKILL)
        await self.stop()
        await self.start()

    async def stop(self) -> None:
        await asyncio.to_thread(self._child.stop)


class Router:
    """`life`: how often it was started. What its clients were reading when it was killed they read to the end."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.life = 0
        self.up = asyncio.Event()
        self._settings = settings
        self._closing: list[Callable[[], Coroutine[Any, Any, None]]] = []

    async def start(self) -> None:
        self._child = await asyncio.to_thread(Child, "router", json.dumps(self._settings), module=MODULE)
        self.address = f"127.0.0.1:{self._child.ready['port']}"
        channel: grpc.aio.Channel = open_channel(self.address)
        self.stub = generate_pb2_grpc.GenerateStub(channel)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self.http = aiohttp.ClientSession(f"http://127.0.0.1:{self._child.ready['http_port']}", connector=connector)
        self._closing += [channel.close, self.http.close]
        self.life += 1
        self.up.set()

    async def kill(self) -> None:
        self.up.clear()
        os.kill(self._child.pid, signal.SIGKILL)
        await asyncio.to_thread(self._child.stop)

    async def stop(self) -> None:
        if self.up.is_set():
            await asyncio.to_thread(self._child.stop)
        for close in self._closing:
            await close()


async def serve_workers(settings: dict[str, Any]) -> None:
    limits: dict[str, Any] = {"num_pages": 1 << 20, "max_model_len": 1 << 16}
    ports, step_s = settings["ports"], settings["step_s"]
    names = [f"decode-{i}" for i in range(PAIRS)]
    decodes = [FakeDecodeWorker(name=name, port=ports.get(name, 0), step_s=step_s, **limits) for name in names]
    names = [f"prefill-{i}" for i in range(PAIRS)]
    prefills = [FakePrefillWorker(name=name, port=ports.get(name, 0), decodes=decodes, **limits) for name in names]
    workers: dict[str, FakeWorker] = {worker.name: worker for worker in (*decodes, *prefills)}
    endpoints = [await worker.start() for worker in workers.values()]
    print(json.dumps({"workers": [[e.name, e.role, e.address] for e in endpoints]}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        await workers[line.strip()].kill()
        await asyncio.sleep(AWAY_S)
        await workers[line.strip()].start()
    for worker in workers.values():
        await worker.kill()


async def serve_as_router(settings: dict[str, Any]) -> None:
    """As bench.router's, with HTTP, for clients with tokens."""
    workers = json.dumps(settings.pop("workers"))
    await serve_router(workers, json.dumps({"auth": True, "http_ports": [0], **settings}))


if __name__ == "__main__":
    end_with_parent()
    logging.basicConfig(level=logging.CRITICAL)  # workers break streams as they die
    serve = {"workers": serve_workers, "router": serve_as_router}[sys.argv[1]]
    asyncio.run(serve(json.loads(sys.argv[2])))
