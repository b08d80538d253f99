"""RouterActor is the process in which Ray starts one router. It carries no request: it lets the router serve over
gRPC, tells the controller how that goes, and hands the router the newest word on the workers' addresses.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from cluster.front.options import FrontOptions
from cluster.router.options import RouterOptions
from cluster.router.takers import RouterStanding, Takers
from cluster.spec.model import USUAL_HTTP_PORT, ClusterSpec, RouterSpec
from cluster.usage.options import UsageOptions
from engine.process import set_environment
from worker.actor import MemberActor
from worker.membership import Greeting, Membership
from worker.process import Progress, Service
from worker.wire.tls import is_loopback
from worker.wire.tokens import TokenError, read_tokens

if TYPE_CHECKING:
    from cluster.front.server import ServerOptions

logger = logging.getLogger(__name__)

ANY_ADDRESS = ("0.0.0.0", "::")
CALL_TIMEOUT_S = 10.0


class RouterActor(MemberActor):
    def __init__(self, spec: ClusterSpec, index: int, membership: Membership, cluster_id: str) -> None:
        """`spec` is resolved."""
        set_environment(1)
        host = ray.util.get_node_ip_address() if spec.router.host in ANY_ADDRESS else spec.router.host

        def build(incarnation: str, progress: Progress, greeting: Greeting) -> Service:
            from cluster.deploy.router_service import RouterService

            os.environ.update(greeting.secrets.telemetry)  # its SDK reads them there; of where `up` ran
            options = _options(greeting.spec or spec, index, greeting, cluster_id)
            return RouterService(options, host, pools=ControllerPools(membership.controller))

        super().__init__(f"router-{index}", host, membership, build)

    def set_workers(self, version: Sequence[int], workers: Sequence[Sequence[Any]]) -> None:
        """Roster.workers, and the Roster's version then."""
        self._thread.call(self._thread.service.set_workers(version, workers), CALL_TIMEOUT_S)

    def standing(self) -> RouterStanding:
        """How it stands with the workers."""
        standing: Coroutine[Any, Any, RouterStanding] = self._thread.service.standing()
        return self._thread.call(standing, CALL_TIMEOUT_S)

    def why_not(self, spec: ClusterSpec) -> str:
        """Why it could not go by this spec; empty if it could. Nothing changes."""
        try:
            if spec.router.tokens_file:
                read_tokens(spec.router.tokens_file)
        except TokenError as error:
            return str(error)
        why: Coroutine[Any, Any, str] = self._thread.service.why_not(spec)
        return self._thread.call(why, CALL_TIMEOUT_S)

    def take_spec(self, spec: ClusterSpec) -> None:
        """Go by it from now on, as far as it changes while a router runs."""
        self._thread.call(self._thread.service.take_spec(spec), CALL_TIMEOUT_S)

    def wait_serving(self, timeout_s: float) -> str:
        """Why it does not serve by then; empty if it does. Raises TimeoutError if it says nothing."""
        serves: Coroutine[Any, Any, str] = self._thread.service.wait_serving(timeout_s)
        return self._thread.call(serves, timeout_s + CALL_TIMEOUT_S)


class ControllerPools:
    """What an operator asks of a router for which it must ask the controller. Each raises RequestFailed when that does
    not answer."""

    def __init__(self, controller: str) -> None:
        self._controller = controller

    async def pools(self) -> dict[str, list[str]]:
        answer: dict[str, list[str]] = await self._ask("pools")
        return answer

    async def size(self, pool: str) -> int:
        return int(await self._ask("size", pool))

    async def scale(self, pool: str, replicas: int, takers: Takers | None) -> str:
        return str(await self._ask("scale", pool, replicas, takers))

    async def pending(self, pool: str) -> list[tuple[str, str, str]]:
        answer: list[tuple[str, str, str]] = await self._ask("pending", pool)
        return answer

    async def remove(self, worker: str, takers: Takers | None) -> str | None:
        answer: str | None = await self._ask("remove", worker, takers)
        return answer

    async def take_back(self, worker: str) -> bool:
        return bool(await self._ask("take_back", worker))

    async def spec(self) -> dict[str, Any]:
        return dict(await self._ask("spec"))

    async def apply_spec(
        self, data: object, sources: Mapping[str, str], max_surge: int | None, *, dry_run: bool
    ) -> dict[str, Any]:
        return dict(await self._ask("apply_spec", data, dict(sources), max_surge, dry_run))

    async def set_adapters(self, add: Mapping[str, str], remove: Sequence[str]) -> str:
        return str(await self._ask("set_adapters", dict(add), list(remove)))

    async def roll(self, pools: Sequence[str], max_surge: int | None) -> str:
        return str(await self._ask("roll", list(pools), max_surge))

    async def _ask(self, method: str, *arguments: object) -> Any:
        """In a thread: where Ray's GCS is gone its client waits without end."""
        import grpc  # not before its environment is set

        from cluster.router.live.requests import RequestFailed

        def ask() -> Any:
            controller = ray.get_actor(self._controller)
            return ray.get(getattr(controller, method).remote(*arguments), timeout=CALL_TIMEOUT_S)

        try:
            return await asyncio.wait_for(asyncio.to_thread(ask), CALL_TIMEOUT_S)
        except (RayError, ValueError, TimeoutError) as error:
            logger.warning("the controller does not answer: %s", " ".join(str(error).split()) or type(error).__name__)
            why = "the controller does not answer, and may have done it; look, and ask again when it is back"
            raise RequestFailed(grpc.StatusCode.UNAVAILABLE, why) from None


def _options(spec: ClusterSpec, index: int, greeting: Greeting, cluster_id: str) -> ServerOptions:
    from cluster.front.server import ServerOptions

    router = spec.router
    return ServerOptions(
        name=f"router-{index}",
        cluster_id=cluster_id,
        host=router.host,
        port=router.port + index if router.port else _port_of(greeting.last_address),
        secret=greeting.secrets.cluster,
        auth=router.auth,
        tokens=greeting.secrets.clients,
        model=spec.model,
        model_name=spec.model_name,
        models={model.name: model.model for model in spec.models},
        metrics_port=router.metrics_port + index if router.metrics_port else router.metrics_port,
        http_ports=_http_ports(router, index, _port_of(greeting.last_http)),
        router=router.options(RouterOptions),
        front=router.options(FrontOptions),
        num_routers=router.replicas,
        tokens_file=router.tokens_file or "",
        tls=router.tls.files if router.tls else None,
        worker_tls=spec.tls.files if spec.tls else None,
        reflection=router.reflection,
        usage_db=router.options(UsageOptions).place(spec.name),
        prices=router.prices.prices if router.prices else None,
    )


def _http_ports(router: RouterSpec, index: int, last: int) -> tuple[int, ...]:
    """Those to try, one after the other; first the one that its clients know."""
    if router.http_port is None:
        return ()
    if router.http_port != "auto":
        return (router.http_port + index if router.http_port else last,)
    if not is_loopback(router.host):
        return ()
    usual = (USUAL_HTTP_PORT + index,) if router.port else ()
    return (*filter(None, (last,)), *usual, 0)


def _port_of(address: str) -> int:
    """With port 0 a restarted router takes the port that its clients know; 0 at its first start."""
    return int(address.rpartition(":")[2]) if address else 0
