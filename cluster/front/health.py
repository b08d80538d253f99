"""Health is grpc.health.v1.Health of a router. gRPC's own servicer lets anybody watch without bound, and writes to its
watchers while it holds the lock that a change of the status needs: one that never reads stops them all.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from cluster.front.bounds.limits import refuse, retry_after

RETRY_AFTER_S = 5.0
Response = health_pb2.HealthCheckResponse


class Health:
    """SERVING or not, for the router and for each of its services alike; other names are unknown."""

    def __init__(self, services: tuple[str, ...], *, max_watches: int, max_stall_s: float) -> None:
        self.num_watches = 0
        self._services = ("", *services)
        self.max_watches = max_watches
        self._max_stall_s = max_stall_s
        self._status = Response.NOT_SERVING
        self._changed = asyncio.Event()  # replaced by each change

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        read, written = health_pb2.HealthCheckRequest.FromString, Response.SerializeToString
        return {
            "Check": grpc.unary_unary_rpc_method_handler(self.check, read, written),
            "Watch": grpc.unary_stream_rpc_method_handler(self.watch, read, written),
        }

    def set(self, *, is_serving: bool) -> None:
        self._status = Response.SERVING if is_serving else Response.NOT_SERVING
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        if request.service not in self._services:
            await refuse(context, grpc.StatusCode.NOT_FOUND, "there is no such service")
        return Response(status=self._status)

    async def watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        if self.num_watches >= self.max_watches:
            reason = f"{self.num_watches} watch this router's health, of {self.max_watches}; ask with Check"
            await refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, reason, retry_after(RETRY_AFTER_S))
        self.num_watches += 1
        try:
            await self._watch(request.service in self._services, context)
        except TimeoutError:
            reason = f"its client took nothing for {self._max_stall_s:g} s"
            await refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, reason, retry_after(RETRY_AFTER_S))
        finally:
            self.num_watches -= 1

    async def _watch(self, is_known: bool, context: Any) -> None:
        """Ends with who takes nothing for so long. Of statuses that came meanwhile only the last is sent."""
        last = None
        while True:
            changed, status = self._changed, self._status if is_known else Response.SERVICE_UNKNOWN
            if status != last:
                async with asyncio.timeout(self._max_stall_s):
                    await context.write(Response(status=status))
            last = status
            await changed.wait()
