"""LocalCluster is a whole cluster in this process: real engines, real gRPC on loopback addresses, no Ray.

For tests, notebooks and benchmarks of the serving path itself. Every worker loads the model for itself and runs its
engine in a thread of its own. `shared_memory` works here as between processes; `loopback` only here.

    async with LocalCluster(model, prefill=1, decode=2) as cluster:
        client = AsyncClient(cluster.endpoint)
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType, TracebackType
from typing import Any

from cluster.front.server import RouterServer, ServerOptions
from cluster.router.links.worker_link import LinkState, WorkerEndpoint
from decode_worker.driver import DecodeRole
from engine.engine import Engine
from engine.options import EngineOptions
from kv_transfer.transports.faulty import Faults
from mixed_worker.driver import MixedRole
from prefill_worker.driver import PrefillRole
from worker.driver import Worker, make_worker
from worker.options import worker_options

POLL_S = 0.01
SECRET = "local"


class LocalCluster:
    def __init__(
        self,
        model: str,
        *,
        prefill: int = 1,
        decode: int = 1,
        mixed: int = 0,
        models: Mapping[str, str] = MappingProxyType({}),
        engine: EngineOptions | None = None,
        decode_engine: EngineOptions | None = None,
        worker: Mapping[str, Any] | None = None,
        router: ServerOptions | None = None,
        faults: Faults | None = None,
    ) -> None:
        """`engine`, `worker` (settings by name, of either role) and `router` say everything but names, roles, addresses
        and the model.

        `models`: served beside it, by what requests call them, each by as many workers; `decode_engine` is for decode
        workers that differ (fewer pages, say); `faults` go into every handoff.
        """
        engine = engine or EngineOptions(model=model, num_pages=512)
        self._engines = {
            "prefill": replace(engine, model=model),
            "decode": replace(decode_engine or engine, model=model),
            "mixed": replace(engine, model=model),
        }
        self._worker = {**(worker or {}), "secret": SECRET}
        self._router_options = replace(
            router or ServerOptions(),
            cluster_id=f"local-{secrets.token_hex(4)}",
            model=model,
            models=models,
            secret=SECRET,
            host="127.0.0.1",
            port=0,
        )
        self._counts = {"prefill": prefill, "decode": decode, "mixed": mixed}
        self._faults = faults
        self.prefill: list[Worker[PrefillRole]] = []
        self.decode: list[Worker[DecodeRole]] = []
        self.mixed: list[Worker[MixedRole]] = []
        self.beside: dict[str, list[Worker[Any]]] = {name: [] for name in models}  # of other models
        self.routers: list[RouterServer] = []
        self.server: RouterServer | None = None  # the first router, at `endpoint`
        self._endpoints: list[WorkerEndpoint] = []
        self.endpoint = ""

    async def __aenter__(self) -> LocalCluster:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Load, connect, and return when the first router has a stream with every worker."""
        await self._make("prefill", self.prefill)
        await self._make("decode", self.decode)
        await self._make("mixed", self.mixed)
        for name, workers in self.beside.items():
            for role in self._counts:
                await self._make(role, workers, name)
        models = {worker: name for name, workers in self.beside.items() for worker in workers}
        self._endpoints = [
            WorkerEndpoint(
                name=worker.options.name,
                role=worker.options.role,
                address=(await worker.start()).address,
                model=models.get(worker, ""),
            )
            for worker in self.workers
        ]
        self.server = await self.add_router()
        self.endpoint = f"127.0.0.1:{self.server.port}"

    async def _make(self, role: str, workers: list[Worker[Any]], model: str = "") -> None:
        """Each goes to `workers` at once, for `stop` to find should the next one fail."""
        made = self._engines[role]
        if model:
            made = replace(made, model=self._router_options.models[model])
        for index in range(self._counts[role]):
            engine = await asyncio.to_thread(Engine.load, made)
            name = f"{model}-{role}-{index}" if model else f"{role}-{index}"
            options = worker_options(name, role, **self._worker)
            workers.append(make_worker(options, engine, faults=None if role == "decode" else self._faults))

    async def add_router(self) -> RouterServer:
        """One router more over the same workers; returns when it has a stream with each of them."""
        server = RouterServer(replace(self._router_options, name=f"router-{len(self.routers)}"))
        self.routers.append(server)
        await server.start()
        server.set_workers(self._endpoints)
        async with asyncio.timeout(10):
            links = [link for router in server.catalog.routers for link, *_ in router.workers()]
            while not all(link.state is LinkState.READY for link in links):
                await asyncio.sleep(POLL_S)
        return server

    async def stop(self, grace_s: float = 0.0) -> None:
        for server in self.routers:
            await server.stop(grace_s)
        started = [worker for worker in self.workers if worker.address.address]
        await asyncio.gather(*(worker.stop() for worker in started))
        for worker in self.workers:
            worker.engine.close()

    @property
    def workers(self) -> list[Worker[Any]]:
        return [*self.prefill, *self.decode, *self.mixed, *itertools.chain(*self.beside.values())]

    def check_invariants(self) -> None:
        for worker in self.workers:
            worker.check_invariants()
        for server in self.routers:
            for router in server.catalog.routers:
                router.check_invariants()

    def held_pages(self) -> dict[str, int]:
        """Pages that are neither free nor cached, by worker, where there are any."""
        held = {worker.options.name: worker.pool.usage.held for worker in self.workers}
        return {name: count for name, count in held.items() if count}

    async def settled(self, timeout_s: float = 10.0) -> None:
        """Wait until every page of every worker is free or cached. Raises TimeoutError naming who holds pages."""
        deadline = time.monotonic() + timeout_s
        while held := self.held_pages():
            if time.monotonic() > deadline:
                raise TimeoutError(f"pages are still held after {timeout_s:g} s: {held}")
            await asyncio.sleep(POLL_S)
