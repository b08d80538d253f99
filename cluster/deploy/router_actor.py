"""RouterActor is the process in which Ray starts one router. It carries no request: it lets the router serve over
gRPC, tells the controller how that goes, and hands the router the workers' addresses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import ray

from cluster.front.options import FrontOptions
from cluster.router.policy import RouterOptions
from cluster.spec.model import ClusterSpec
from engine.process import set_thread_counts
from worker.process import Progress, Service, ServiceEvent, ServiceThread

ANY_ADDRESS = ("0.0.0.0", "::")
CALL_TIMEOUT_S = 10.0


class RouterActor:
    """Made by Ray, again after each crash. `spec` is resolved; `controller` names the actor that hears the events."""

    def __init__(self, spec: ClusterSpec, index: int, secret: str, controller: str) -> None:
        set_thread_counts(1)
        name = f"router-{index}"
        host = ray.util.get_node_ip_address() if spec.router.host in ANY_ADDRESS else spec.router.host

        def build(incarnation: str, progress: Progress) -> Service:
            last_port = 0 if spec.router.port else _last_port(controller, name)
            return _RouterService(spec, index, secret, host, last_port)

        def tell(event: ServiceEvent) -> None:
            ray.get_actor(controller).on_event.remote(event.as_dict())

        self._thread = ServiceThread(name, host, build, tell)
        self._thread.begin()

    def describe(self) -> dict[str, Any]:
        return self._thread.event.as_dict()

    def set_workers(self, workers: Sequence[tuple[str, str, str, str]]) -> None:
        """(name, role, address, incarnation) of every worker there is."""
        self._thread.call(self._thread.service.set_workers(workers), CALL_TIMEOUT_S)

    def wait_end(self) -> str:
        """Blocks until the router has ended: the controller learns of a crash by this call's failing."""
        return self._thread.wait_end()

    def stop(self, grace_s: float) -> None:
        self._thread.stop(grace_s)


class _RouterService:
    def __init__(self, spec: ClusterSpec, index: int, secret: str, reached_at: str, last_port: int) -> None:
        from cluster.front.server import RouterServer, ServerOptions

        router = spec.router
        self._reached_at = reached_at
        self._server = RouterServer(
            ServerOptions(
                name=f"router-{index}",
                host=router.host,
                port=router.port + index if router.port else last_port,
                secret=secret,
                model=spec.model,
                model_name=spec.model_name,
                metrics_port=router.metrics_port + index if router.metrics_port else router.metrics_port,
                router=router.options(RouterOptions),
                front=router.options(FrontOptions),
            )
        )

    async def start(self) -> str:
        port = await self._server.start()
        where = f"[{self._reached_at}]" if ":" in self._reached_at else self._reached_at
        return f"{where}:{port}"

    async def wait_broken(self) -> None:
        """Never: a router has no loop of its own that could break, and Ray sees its process die."""
        await asyncio.get_running_loop().create_future()

    async def stop(self, grace_s: float) -> None:
        await self._server.stop(grace_s)

    async def set_workers(self, workers: Sequence[tuple[str, Any, str, str]]) -> None:
        from cluster.router.worker_link import WorkerEndpoint

        endpoints = [WorkerEndpoint(name=name, role=role, address=address) for name, role, address, _ in workers]
        self._server.set_workers(endpoints)


def _last_port(controller: str, name: str) -> int:
    """With port 0 a restarted router takes the port that its clients know; 0 at its first start."""
    address: str = ray.get(ray.get_actor(controller).last_address.remote(name), timeout=CALL_TIMEOUT_S)
    return int(address.rpartition(":")[2]) if address else 0
