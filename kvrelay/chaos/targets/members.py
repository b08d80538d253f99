"""The processes of a ProcessCluster: run_worker and run_router are what each runs. They know no Ray; whoever started
them hears their events over a pipe, and ends them by closing it.

Started from a fork server that has torch and grpc imported already (PRELOAD), so that a restart takes the load of the
tiny model and no more.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from worker.options import WorkerOptions
from worker.process import Progress, Service, ServiceEvent, ServiceThread

PRELOAD = (
    *("engine.engine", "worker.driver", "prefill_worker.driver", "decode_worker.driver", "mixed_worker.driver"),
    "cluster.deploy.router_service",
)
LOOPBACK = "127.0.0.1"
Worker = tuple[str, str, str]  # name, role, address


def run_worker(options: WorkerOptions, engine: Mapping[str, Any], advertised: str, pipe: Connection, log: str) -> None:
    """`advertised`: where others are told to reach it, a listener of the Proxy."""

    def build(incarnation: str, progress: Progress) -> Service:
        from dataclasses import replace

        from engine.engine import Engine
        from engine.options import EngineOptions
        from worker.driver import make_worker

        loaded = Engine.load(EngineOptions(**engine), progress=progress)
        return _Behind(make_worker(replace(options, incarnation=incarnation), loaded), advertised)

    _run(options.name, build, pipe, log)


def run_router(settings: Mapping[str, Any], workers: Sequence[Worker], pipe: Connection, log: str) -> None:

    def build(_: str, __: Progress) -> Service:
        from cluster.deploy.router_service import RouterService
        from cluster.front.server import server_options
        from cluster.router.links.worker_link import WorkerEndpoint

        known = [WorkerEndpoint(name=name, role=role, address=address) for name, role, address in workers]
        return RouterService(server_options(**settings), LOOPBACK, known)

    _run(settings["name"], build, pipe, log)


class _Behind:
    """A worker that others reach through the Proxy: it says so to them, and where it listens to who started it."""

    def __init__(self, worker: Any, advertised: str) -> None:
        self._worker = worker
        self._advertised = advertised
        self.stop, self.wait_broken = worker.stop, worker.wait_broken

    async def start(self) -> str:
        address = await self._worker.start()
        listens_at, address.address = address.address, self._advertised
        return str(listens_at)


def _run(name: str, build: Any, pipe: Connection, log: str) -> None:
    """Serve until the pipe says stop or breaks: whoever started this process is gone then."""
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)

    def tell(event: ServiceEvent) -> None:
        pipe.send(event.as_dict())

    thread = ServiceThread(name, LOOPBACK, build, tell)
    thread.begin()
    try:
        grace_s = pipe.recv()
    except (EOFError, OSError):
        os._exit(0)
    thread.stop(grace_s)
    os._exit(0)
