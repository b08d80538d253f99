"""The gRPC service Cluster: what an operator asks a router, and has it do."""

from __future__ import annotations

from typing import Any, TypeVar

import grpc

from cluster.front.grpc import refuse_with, unary
from cluster.router.driver import Router
from cluster.router.live.requests import RequestFailed
from cluster.router.monitoring.status import status_of
from engine.types import InvalidRequest
from kvrelay.v1 import cluster_pb2
from worker.wire.door import CALLER
from worker.wire.tokens import DEFAULT_NAME

CLUSTER_SERVICE = "kvrelay.v1.Cluster"
RequestT = TypeVar("RequestT", cluster_pb2.DrainRequest, cluster_pb2.SetRoleRequest)
OPERATORS = ("", DEFAULT_NAME, "operator")  # names of tokens; none: there are no tokens


class ClusterService:
    def __init__(self, router: Router) -> None:
        self._router = router

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        return {
            "GetStatus": unary(self.get_status, cluster_pb2.GetStatusRequest),
            "Drain": unary(self.drain, cluster_pb2.DrainRequest),
            "SetRole": unary(self.set_role, cluster_pb2.SetRoleRequest),
        }

    async def get_status(self, _: Any, context: Any) -> cluster_pb2.GetStatusResponse:
        return status_of(self._router)

    async def drain(self, request: cluster_pb2.DrainRequest | None, context: Any) -> cluster_pb2.DrainResponse:
        try:
            asked = _checked(request)
            self._router.drain(asked.worker, undo=asked.undo, force=asked.force)
        except (RequestFailed, InvalidRequest) as error:
            await refuse_with(context, error)
        return cluster_pb2.DrainResponse()

    async def set_role(self, request: cluster_pb2.SetRoleRequest | None, context: Any) -> cluster_pb2.SetRoleResponse:
        try:
            asked = _checked(request)
            self._router.set_role(asked.worker, asked.role, force=asked.force)
        except (RequestFailed, InvalidRequest) as error:
            await refuse_with(context, error)
        return cluster_pb2.SetRoleResponse()


def _checked(request: RequestT | None) -> RequestT:
    """What an operator asks. Raises InvalidRequest, RequestFailed."""
    if request is None:
        raise InvalidRequest("the request cannot be read; send a message of this method, with strings in UTF-8")
    if (caller := CALLER.get()) not in OPERATORS:
        why = f"the token of {caller!r} may not change workers; show one named `operator`, or one without a name"
        raise RequestFailed(grpc.StatusCode.PERMISSION_DENIED, why)
    return request
