"""What an operator asks a router and whoever keeps its workers decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from cluster.front.operating.operate import ClusterService
from cluster.router.live.requests import RequestFailed
from cluster.router.takers import Takers, why_alone, without
from engine.types import InvalidRequest
from kvrelay.v1 import cluster_pb2
from tests.cluster.harness import serving


class Kept:
    """Two decode workers, which never say that they drain."""

    def __init__(self) -> None:
        self.leaving: list[str] = []
        self.asked: list[object] = []  # of the spec

    async def pools(self) -> dict[str, list[str]]:
        return {"decode": [name for name in ("decode-0", "decode-1") if name not in self.leaving]}

    async def size(self, pool: str) -> int:
        return len((await self.pools())[pool])

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

    async def spec(self) -> dict[str, Any]:
        rollout = {"running": True, "reason": "decode-0 is at weights", "current": 1, "total": 2}
        return {"rows": [("pools[1].replicas", 2, "cluster.yaml:4")], "rollout": rollout}

    async def apply_spec(
        self, data: object, sources: Mapping[str, str], max_surge: int | None, *, dry_run: bool
    ) -> dict[str, Any]:
        self.asked.append((data, dict(sources), max_surge, dry_run))
        change = {"key": "page_size", "before": 16, "after": 8, "how": "fixed", "why": "KV is"}
        return {"why_not": "" if dry_run else "KV is", "changes": [change]}

    async def set_adapters(self, add: Mapping[str, str], remove: Sequence[str]) -> str:
        self.asked.append((dict(add), list(remove)))
        return "there is no adapter 'x'; there is none" if "x" in remove else ""

    async def roll(self, pools: Sequence[str], max_surge: int | None) -> str:
        self.asked.append((list(pools), max_surge))
        return "there is no pool 'chat'; there are decode" if "chat" in pools else ""

    async def take_back(self, worker: str) -> bool:
        self.leaving.remove(worker)
        return True


async def test_the_last_of_a_phase_is_removed_by_force_alone() -> None:
    async with serving(1, 2) as h:
        kept = Kept()
        service = ClusterService(h.server.catalog, kept)
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
        answer = await service.scale(none)
        assert sorted(each.name for each in answer.pending) == ["decode-0", "decode-1"]
        assert answer.replicas == 0


async def test_a_spec_goes_to_who_keeps_it_and_comes_back_as_it_is_kept() -> None:
    async with serving(1, 2) as h:
        kept = Kept()
        service = ClusterService(h.server.catalog, kept)
        known = await service.get_spec(cluster_pb2.GetSpecRequest())
        assert (known.values[0].key, known.values[0].value) == ("pools[1].replicas", "2")
        assert (known.rollout.current, known.rollout.reason) == (1, "decode-0 is at weights")
        asked = cluster_pb2.ApplySpecRequest(spec='{"model": "m"}', sources={"model": "--model"}, dry_run=True)
        answer = await service.apply_spec(asked)
        assert [(change.key, change.after, change.how) for change in answer.changes] == [("page_size", "8", "fixed")]
        asked.dry_run = False
        with pytest.raises(RequestFailed, match="KV is") as refused:
            await service.apply_spec(asked)
        assert refused.value.code is grpc.StatusCode.FAILED_PRECONDITION
        await service.roll_pools(cluster_pb2.RollPoolsRequest(pools=["decode"], max_surge=0))
        data = {"model": "m"}
        assert kept.asked == [
            (data, {"model": "--model"}, None, True),
            (data, {"model": "--model"}, None, False),
            (["decode"], 0),
        ]


async def test_a_pool_that_is_not_there_is_not_found_whatever_is_asked_of_it() -> None:
    async with serving(1, 2) as h:
        service = ClusterService(h.server.catalog, Kept())
        scaled = service.scale(cluster_pb2.ScaleRequest(pool="chat", replicas=1))
        rolled = service.roll_pools(cluster_pb2.RollPoolsRequest(pools=["chat"]))
        for asking in (scaled, rolled):
            with pytest.raises(RequestFailed, match="there is no pool 'chat'; there are decode") as refused:
                await asking
            assert refused.value.code is grpc.StatusCode.NOT_FOUND


async def test_adapters_go_to_who_keeps_them_and_are_listed_as_the_router_knows_them(tmp_path: Path) -> None:
    async with serving(1, 1) as h:
        book = h.server.catalog.first.adapters
        book.known = book.read({"a": str(tmp_path)})
        service = ClusterService(h.server.catalog, kept := Kept())
        [listed] = (await service.list_adapters(cluster_pb2.ListAdaptersRequest())).adapters
        assert (listed.name, listed.path, listed.rank) == ("a", str(tmp_path), 0)
        assert listed.why_not.startswith(f"{tmp_path} has no adapter_config.json")
        await service.set_adapters(cluster_pb2.SetAdaptersRequest(add={"b": "/b"}, remove=["a"]))
        assert kept.asked == [({"b": "/b"}, ["a"])]
        with pytest.raises(RequestFailed, match="there is no adapter 'x'; there is none") as refused:
            await service.set_adapters(cluster_pb2.SetAdaptersRequest(remove=["x"]))
        assert refused.value.code is grpc.StatusCode.FAILED_PRECONDITION
        with pytest.raises(InvalidRequest, match="add and remove are empty"):
            await service.set_adapters(cluster_pb2.SetAdaptersRequest())


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (cluster_pb2.ApplySpecRequest(spec="{"), "spec is no JSON"),
        (cluster_pb2.ApplySpecRequest(spec="{}", max_surge=2), "max_surge is 2; give 0 or 1"),
    ],
)
async def test_what_is_no_spec_is_refused_in_a_sentence(asked: cluster_pb2.ApplySpecRequest, sentence: str) -> None:
    async with serving(1, 1) as h:
        with pytest.raises(InvalidRequest, match=sentence):
            await ClusterService(h.server.catalog, Kept()).apply_spec(asked)
