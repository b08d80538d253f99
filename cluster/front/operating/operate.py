"""The gRPC service Cluster: what an operator asks a router, and has it do."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import grpc

from cluster.front.grpc import refuse_with, unary
from cluster.front.models.catalog import Catalog
from cluster.front.operating import spec_calls
from cluster.front.operating.explain import explain, list_slow
from cluster.front.operating.spec_calls import SpecKeeper
from cluster.front.operating.usage_call import Usage, get_usage
from cluster.router.links.worker_link import LinkState
from cluster.router.live.requests import RequestFailed
from cluster.router.monitoring.status import load_of
from cluster.router.takers import Takers
from engine.types import InvalidRequest
from kvrelay.v1 import cluster_pb2
from worker.wire.door import CALLER
from worker.wire.tokens import OPERATORS

CLUSTER_SERVICE = "kvrelay.v1.Cluster"
MAX_REPLICAS = 4096  # as a spec has


class Pools(SpecKeeper, Protocol):
    """Who starts and ends workers. Each raises RequestFailed when it does not answer."""

    async def pools(self) -> dict[str, list[str]]:
        """By pool, its workers, those that leave first last; without those that are leaving."""

    async def size(self, pool: str) -> int:
        """How many workers it shall have."""

    async def scale(self, pool: str, replicas: int, takers: Takers | None) -> str:
        """Returns why not; empty if it is so. `takers`: of a phase that these compute one must be left that does not
        leave; None: whoever is left."""

    async def pending(self, pool: str) -> list[tuple[str, str, str]]:
        """Name, stage and reason of those that are on their way."""

    async def remove(self, worker: str, takers: Takers | None) -> str | None:
        """Have it leave. Returns why not, empty if it does; None: there is none of the name, or none any more."""

    async def take_back(self, worker: str) -> bool:
        """Have it stay. Whether there is one of the name, and it is not too late."""


class ClusterService:
    def __init__(
        self,
        catalog: Catalog,
        pools: Pools | None = None,
        usage: Callable[[], Usage] = lambda: Usage(None, None),
    ) -> None:
        self._catalog = catalog
        self._pools = pools
        self._usage = usage

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        return {
            "GetStatus": unary(self.get_status, cluster_pb2.GetStatusRequest),
            "Drain": unary(_for_operators(self.drain), cluster_pb2.DrainRequest),
            "SetRole": unary(_for_operators(self.set_role), cluster_pb2.SetRoleRequest),
            "Scale": unary(_for_operators(self.scale), cluster_pb2.ScaleRequest),
            "GetSpec": unary(_for_operators(self.get_spec), cluster_pb2.GetSpecRequest),
            "ApplySpec": unary(_for_operators(self.apply_spec), cluster_pb2.ApplySpecRequest),
            "ListAdapters": unary(_for_operators(self.list_adapters), cluster_pb2.ListAdaptersRequest),
            "SetAdapters": unary(_for_operators(self.set_adapters), cluster_pb2.SetAdaptersRequest),
            "RollPools": unary(_for_operators(self.roll_pools), cluster_pb2.RollPoolsRequest),
            "GetLoad": unary(_for_operators(self.get_load), cluster_pb2.GetLoadRequest),
            "Explain": unary(_answering(self.explain), cluster_pb2.ExplainRequest),
            "ListSlow": unary(_answering(self.list_slow), cluster_pb2.ListSlowRequest),
            "NoteDecision": unary(_for_operators(self.note_decision), cluster_pb2.NoteDecisionRequest),
            "GetUsage": unary(_answering(self.get_usage), cluster_pb2.GetUsageRequest),
        }

    async def get_status(self, _: Any, context: Any) -> cluster_pb2.GetStatusResponse:
        return self._catalog.status

    async def get_load(self, asked: cluster_pb2.GetLoadRequest) -> cluster_pb2.GetLoadResponse:
        return await load_of(self._catalog.first.router, asked.window_s)

    async def explain(self, asked: cluster_pb2.ExplainRequest) -> cluster_pb2.ExplainResponse:
        return explain(self._catalog, asked.request_id)

    async def list_slow(self, asked: cluster_pb2.ListSlowRequest) -> cluster_pb2.ListSlowResponse:
        return list_slow(self._catalog, asked.last)

    async def get_usage(self, asked: cluster_pb2.GetUsageRequest) -> cluster_pb2.GetUsageResponse:
        return await get_usage(self._usage(), asked)

    async def note_decision(self, asked: cluster_pb2.NoteDecisionRequest) -> cluster_pb2.NoteDecisionResponse:
        if not asked.what:
            raise InvalidRequest("what is empty; say what was decided")
        router = self._catalog.first.router
        router.metrics.chronicle.note(asked.by or "operator", asked.what, asked.reason, router.now, acted=asked.acted)
        return cluster_pb2.NoteDecisionResponse()

    async def drain(self, asked: cluster_pb2.DrainRequest) -> cluster_pb2.DrainResponse:
        if asked.remove and asked.undo:
            raise InvalidRequest("remove and undo do not go together; give one")
        if asked.remove:
            await self._remove(asked.worker, force=asked.force)
        elif asked.undo and self._pools is not None:
            await self._take_back(asked.worker, self._pools)
        else:
            self._catalog.router_of(asked.worker).drain(asked.worker, undo=asked.undo, force=asked.force)
        return cluster_pb2.DrainResponse()

    async def set_role(self, asked: cluster_pb2.SetRoleRequest) -> cluster_pb2.SetRoleResponse:
        chunk_tokens = asked.chunk_tokens if asked.HasField("chunk_tokens") else None
        self._catalog.router_of(asked.worker).set_role(asked.worker, asked.role, chunk_tokens, force=asked.force)
        return cluster_pb2.SetRoleResponse()

    async def scale(self, asked: cluster_pb2.ScaleRequest) -> cluster_pb2.ScaleResponse:
        kept = self._kept()
        pools = await kept.pools()
        if asked.pool not in pools:
            known = ", ".join(pools)
            raise RequestFailed(grpc.StatusCode.NOT_FOUND, f"there is no pool {asked.pool!r}; there are {known}")
        if asked.replicas > MAX_REPLICAS:
            raise InvalidRequest(f"replicas is {asked.replicas}; give {MAX_REPLICAS} at most")
        if not asked.look and (why := await kept.scale(asked.pool, asked.replicas, self._takers(force=asked.force))):
            raise RequestFailed(grpc.StatusCode.FAILED_PRECONDITION, why)
        pending = await kept.pending(asked.pool) or self._unheard((await kept.pools())[asked.pool])
        return cluster_pb2.ScaleResponse(
            pending=[cluster_pb2.PendingWorker(name=name, stage=stage, reason=why) for name, stage, why in pending],
            replicas=await kept.size(asked.pool),
        )

    async def get_spec(self, _: cluster_pb2.GetSpecRequest) -> cluster_pb2.GetSpecResponse:
        return await spec_calls.get_spec(self._kept())

    async def apply_spec(self, asked: cluster_pb2.ApplySpecRequest) -> cluster_pb2.ApplySpecResponse:
        return await spec_calls.apply_spec(self._kept(), asked)

    async def list_adapters(self, _: cluster_pb2.ListAdaptersRequest) -> cluster_pb2.ListAdaptersResponse:
        return spec_calls.list_adapters(self._catalog.first.adapters)

    async def set_adapters(self, asked: cluster_pb2.SetAdaptersRequest) -> cluster_pb2.SetAdaptersResponse:
        return await spec_calls.set_adapters(self._kept(), asked)

    async def roll_pools(self, asked: cluster_pb2.RollPoolsRequest) -> cluster_pb2.RollPoolsResponse:
        return await spec_calls.roll_pools(self._kept(), asked)

    def _unheard(self, workers: list[str]) -> list[tuple[str, str, str]]:
        """Those of them that run, and that this router does not use yet."""
        links = {link.name: link for router in self._catalog.routers for link, *_ in router.workers()}
        absent = [(name, LinkState.CONNECTING.value, "") for name in workers if name not in links]
        known = [links[name] for name in workers if name in links]
        return absent + [
            (each.name, each.state.value, each.reason) for each in known if each.state is not LinkState.READY
        ]

    async def _remove(self, worker: str, *, force: bool) -> None:
        """Also one that is lost, again and again."""
        why = await self._kept().remove(worker, self._takers(force=force))
        if why is None:
            raise RequestFailed(grpc.StatusCode.NOT_FOUND, f"there is no worker {worker!r} in any pool")
        if why:
            raise RequestFailed(grpc.StatusCode.FAILED_PRECONDITION, why)

    def _takers(self, *, force: bool) -> Takers | None:
        return None if force else self._catalog.takers

    async def _take_back(self, worker: str, pools: Pools) -> None:
        """First of all from whoever would end it. Where that does not answer, it is not being ended just now."""
        with contextlib.suppress(RequestFailed):
            if not await pools.take_back(worker):
                raise InvalidRequest(f"{worker} is in no pool, or on its way out for good")
        self._catalog.router_of(worker).drain(worker, undo=True)

    def _kept(self) -> Pools:
        if self._pools is None:
            why = "nobody keeps this router's workers: start and end them as they were started"
            raise RequestFailed(grpc.StatusCode.UNIMPLEMENTED, why)
        return self._pools


def _for_operators(method: Callable[[Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    return _answering(method, check=_check_operator)


def _answering(
    method: Callable[[Any], Awaitable[Any]], *, check: Callable[[], None] = lambda: None
) -> Callable[[Any, Any], Awaitable[Any]]:
    """The same for gRPC: what was sent is checked, and what the method raises ends the call."""

    async def answer(request: Any, context: Any) -> Any:
        try:
            if request is None:
                raise InvalidRequest("the request cannot be read; send a message of this method, with strings in UTF-8")
            check()
            return await method(request)
        except (RequestFailed, InvalidRequest) as error:
            await refuse_with(context, error)

    return answer


def _check_operator() -> None:
    """Raises RequestFailed for anybody else."""
    if (caller := CALLER.get()) not in OPERATORS:
        why = f"the token of {caller!r} may not change workers; show one named `operator`, or one without a name"
        raise RequestFailed(grpc.StatusCode.PERMISSION_DENIED, why)
