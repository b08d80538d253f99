"""RouterService is a router as its process runs it: it serves, and takes the newest word on the workers. It knows no
Ray; router_actor.py runs it under Ray, the fault suite without.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from cluster.deploy.roster import Newest, WorkerEntry
from cluster.front.bounds.memory import put_off_collections
from cluster.front.operating.operate import Pools
from cluster.front.options import FrontOptions
from cluster.front.server import RouterServer, ServerOptions
from cluster.router.links.worker_link import WorkerEndpoint
from cluster.router.options import RouterOptions
from cluster.router.takers import RouterStanding
from cluster.spec.model import ClusterSpec
from worker.wire.rpc import written

logger = logging.getLogger(__name__)


class Listening(NamedTuple):
    address: str
    http: str  # empty: it does not serve HTTP


class RouterService:
    def __init__(
        self,
        options: ServerOptions,
        reached_at: str,
        workers: Sequence[WorkerEndpoint] = (),
        pools: Pools | None = None,
    ) -> None:
        """`workers`: those that are known before anybody has said a word. `pools`: who starts and ends them."""
        put_off_collections()
        self._server = RouterServer(options, pools=pools)
        self._reached_at = reached_at
        self._workers = workers
        self._newest = Newest()

    async def start(self) -> Listening:
        port = await self._server.start()
        if self._workers:
            self._server.set_workers(self._workers)
        where, http_port = self._reached_at, self._server.http_port
        return Listening(written(where, port), written(where, http_port) if http_port is not None else "")

    async def wait_serving(self, timeout_s: float) -> str:
        """Why it does not serve by then; empty if it does."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._server.serving.wait()
            return ""
        links = [link for router in self._server.catalog.routers for link, _, _ in router.workers()]
        return "; ".join(f"{link.name}: {link.reason}" for link in links if link.reason)

    async def wait_broken(self) -> None:
        """Never: a router has no loop of its own that could break, and whoever keeps its process sees that die."""
        await asyncio.get_running_loop().create_future()

    async def stop(self, grace_s: float) -> None:
        await self._server.stop(grace_s)

    async def standing(self) -> RouterStanding:
        return self._server.catalog.standing

    async def why_not(self, spec: ClusterSpec) -> str:
        """Why it could not go by this spec; empty if it could. Nothing changes."""
        adapters = spec.router.options(FrontOptions).adapters
        return await self._server.models.why_not(models_of(spec)) or await self._server.why_not_adapters(adapters)

    async def take_spec(self, spec: ClusterSpec) -> None:
        """Raises TokenError."""
        router = spec.router
        front = router.options(FrontOptions)
        self._server.take_options(router.options(RouterOptions), front, router.tokens_file or "")
        self._server.take_prices(router.prices.prices if router.prices else None)
        await self._server.take_models(models_of(spec))
        await self._server.take_adapters(front.adapters)

    async def set_workers(self, version: Sequence[int], workers: Sequence[Sequence[Any]]) -> None:
        if not self._newest.takes(version):
            logger.info("a list of workers that came late is dropped: %s", version)
            return
        entries = [WorkerEntry(*worker) for worker in workers]
        self._server.set_workers(
            WorkerEndpoint(
                name=e.name, role=e.role, address=e.address, trouble=e.trouble, is_leaving=e.is_leaving, model=e.model
            )
            for e in entries
        )


def models_of(spec: ClusterSpec) -> dict[str, str]:
    """Beside the cluster's own: where each lies, by what requests call it."""
    return {model.name: model.model for model in spec.models}
