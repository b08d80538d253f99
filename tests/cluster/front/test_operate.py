"""What an operator asks a router and whoever keeps its workers decides."""

from __future__ import annotations

import grpc
import pytest

from cluster.front.operate import ClusterService
from cluster.router.live.requests import RequestFailed
from cluster.router.takers import Takers, why_alone, without
from kvrelay.v1 import cluster_pb2
from tests.cluster.harness import serving


class Kept:
    """Two decode workers, which never say that they drain."""

    def __init__(self) -> None:
        self.leaving: list[str] = []

    async def pools(self) -> dict[str, list[str]]:
        return {"decode": [name for name in ("decode-0", "decode-1") if name not in self.leaving]}

    async def scale(self, pool: str, replicas: int, takers: Takers | None) -> str:
        return self._leave((await self.pools())[pool][replicas:], takers)

    async def pending(self, pool: str) -> list[tuple[str, str, str]]:
        return [(name, "leaving", "") for name in self.leaving]

    async def remove(self, worker: str, takers: Takers | None) -> str | None:
        return self._leave([worker], takers) if worker.startswith("decode") else None

    def _leave(self, names: list[str], takers: Takers | None) -> str:
        why = "" if takers is None else why_alone(names, without(takers, self.leaving))
        self.leaving += [] if why else names
        return why

    async def take_back(self, worker: str) -> bool:
        self.leaving.remove(worker)
        return True


async def test_the_last_of_a_phase_is_removed_by_force_alone() -> None:
    async with serving(1, 2) as h:
        kept = Kept()
        service = ClusterService(h.router, kept)
        await service.drain(cluster_pb2.DrainRequest(worker="decode-0", remove=True))
        last = cluster_pb2.DrainRequest(worker="decode-1", remove=True)
        none = cluster_pb2.ScaleRequest(pool="decode", replicas=0)
        for asking in (service.drain(last), service.scale(none)):
            with pytest.raises(RequestFailed, match="decode-1 is the only worker for decode that takes") as refused:
                await asking
            assert refused.value.code is grpc.StatusCode.FAILED_PRECONDITION
        with pytest.raises(RequestFailed, match="there is no worker 'clerk' in any pool"):
            await service.drain(cluster_pb2.DrainRequest(worker="clerk", remove=True))
        await service.drain(cluster_pb2.DrainRequest(worker="decode-0", undo=True))
        h.router.drain("decode-0")
        with pytest.raises(RequestFailed, match="decode-1 is the only worker for decode that takes"):
            await service.drain(last)
        none.force = True
        pending = (await service.scale(none)).pending
        assert sorted(each.name for each in pending) == ["decode-0", "decode-1"]
