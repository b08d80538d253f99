"""RouterActor is the process in which Ray starts one router. It carries no request: it lets the router serve over
gRPC, tells the controller how that goes, and hands the router the newest word on the workers' addresses.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import ray

from cluster.deploy.roster import Newest, WorkerEntry
from cluster.front.options import FrontOptions
from cluster.router.options import RouterOptions
from cluster.spec.model import ClusterSpec
from engine.process import set_thread_counts
from worker.actor import MemberActor
from worker.membership import Greeting, Membership
from worker.process import Progress, Service

logger = logging.getLogger(__name__)

ANY_ADDRESS = ("0.0.0.0", "::")
CALL_TIMEOUT_S = 10.0


class RouterActor(MemberActor):
    def __init__(self, spec: ClusterSpec, index: int, membership: Membership) -> None:
        """`spec` is resolved."""
        set_thread_counts(1)
        host = ray.util.get_node_ip_address() if spec.router.host in ANY_ADDRESS else spec.router.host

        def build(incarnation: str, progress: Progress, greeting: Greeting) -> Service:
            return _RouterService(spec, index, greeting, host)

        super().__init__(f"router-{index}", host, membership, build)

    def set_workers(self, version: Sequence[int], workers: Sequence[Sequence[str]]) -> None:
        """Roster.workers, and the Roster's version then."""
        self._thread.call(self._thread.service.set_workers(version, workers), CALL_TIMEOUT_S)

    def wait_serving(self, timeout_s: float) -> None:
        """Raises TimeoutError."""
        self._thread.call(self._thread.service.wait_serving(), timeout_s)


class _RouterService:
    def __init__(self, spec: ClusterSpec, index: int, greeting: Greeting, reached_at: str) -> None:
        from cluster.front.memory import put_off_collections
        from cluster.front.server import RouterServer, ServerOptions

        put_off_collections()
        router = spec.router
        self._reached_at = reached_at
        self._newest = Newest()
        self._server = RouterServer(
            ServerOptions(
                name=f"router-{index}",
                host=router.host,
                port=router.port + index if router.port else _port_of(greeting.last_address),
                secret=greeting.secrets.cluster,
                auth=router.auth,
                tokens=greeting.secrets.clients,
                model=spec.model,
                model_name=spec.model_name,
                metrics_port=router.metrics_port + index if router.metrics_port else router.metrics_port,
                router=router.options(RouterOptions),
                front=router.options(FrontOptions),
                tokens_file=router.tokens_file or "",
                tls=router.tls.files if router.tls else None,
                worker_tls=spec.tls.files if spec.tls else None,
                reflection=router.reflection,
            )
        )

    async def start(self) -> str:
        port = await self._server.start()
        where = f"[{self._reached_at}]" if ":" in self._reached_at else self._reached_at
        return f"{where}:{port}"

    async def wait_serving(self) -> None:
        await self._server.serving.wait()

    async def wait_broken(self) -> None:
        """Never: a router has no loop of its own that could break, and Ray sees its process die."""
        await asyncio.get_running_loop().create_future()

    async def stop(self, grace_s: float) -> None:
        await self._server.stop(grace_s)

    async def set_workers(self, version: Sequence[int], workers: Sequence[Sequence[str]]) -> None:
        from cluster.router.links.worker_link import WorkerEndpoint

        if not self._newest.takes(version):
            logger.info("a list of workers that came late is dropped: %s", version)
            return
        entries = [WorkerEntry(*worker) for worker in workers]
        self._server.set_workers(WorkerEndpoint(name=e.name, role=e.role, address=e.address) for e in entries)


def _port_of(address: str) -> int:
    """With port 0 a restarted router takes the port that its clients know; 0 at its first start."""
    return int(address.rpartition(":")[2]) if address else 0
