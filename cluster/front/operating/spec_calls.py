"""What of the gRPC service Cluster is about the spec that a cluster runs with: between its messages and whoever keeps
the spec. It decides nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import grpc

from cluster.front.models.adapters import AdapterBook, KnownAdapter
from cluster.router.live.requests import RequestFailed
from engine.types import InvalidRequest
from kvrelay.v1 import cluster_pb2 as pb

MAX_SURGE = 1


class SpecKeeper(Protocol):
    """Each raises RequestFailed when it does not answer."""

    async def spec(self) -> Mapping[str, Any]:
        """rows: key, value and source of each; rollout: how far a change is."""

    async def apply_spec(
        self, data: object, sources: Mapping[str, str], max_surge: int | None, *, dry_run: bool
    ) -> Mapping[str, Any]:
        """changes: what changes; why_not: why it is not done, empty if it is."""

    async def set_adapters(self, add: Mapping[str, str], remove: Sequence[str]) -> str:
        """Returns why not; empty if it is so."""

    async def roll(self, pools: Sequence[str], max_surge: int | None) -> str:
        """Returns which pool there is not; empty if it is so."""


async def get_spec(keeper: SpecKeeper) -> pb.GetSpecResponse:
    known = await keeper.spec()
    values = [pb.SpecValue(key=key, value=json.dumps(value), source=source) for key, value, source in known["rows"]]
    return pb.GetSpecResponse(values=values, rollout=pb.Rollout(**known["rollout"]))


async def apply_spec(keeper: SpecKeeper, asked: pb.ApplySpecRequest) -> pb.ApplySpecResponse:
    try:
        data = json.loads(asked.spec)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"spec is no JSON: {error}") from None
    done = await keeper.apply_spec(data, asked.sources, _max_surge(asked), dry_run=asked.dry_run)
    if done["why_not"]:
        raise RequestFailed(grpc.StatusCode.FAILED_PRECONDITION, done["why_not"])
    return pb.ApplySpecResponse(changes=[_change(change) for change in done["changes"]])


def _change(change: Mapping[str, Any]) -> pb.SpecChange:
    before, after = json.dumps(change["before"]), json.dumps(change["after"])
    return pb.SpecChange(key=change["key"], before=before, after=after, how=change["how"], reason=change["why"])


async def set_adapters(keeper: SpecKeeper, asked: pb.SetAdaptersRequest) -> pb.SetAdaptersResponse:
    if not asked.add and not asked.remove:
        raise InvalidRequest("add and remove are empty; give one or the other")
    if why := await keeper.set_adapters(asked.add, asked.remove):
        raise RequestFailed(grpc.StatusCode.FAILED_PRECONDITION, why)
    return pb.SetAdaptersResponse()


def list_adapters(book: AdapterBook) -> pb.ListAdaptersResponse:
    return pb.ListAdaptersResponse(adapters=[_adapter(known) for known in book.known.values()])


def _adapter(known: KnownAdapter) -> pb.AdapterInfo:
    told = pb.AdapterInfo(name=known.name, path=known.path, why_not=known.why_not)
    if (files := known.files) is not None:
        told.digest, told.rank, told.num_params = files.digest, files.rank, files.num_params
    return told


async def roll_pools(keeper: SpecKeeper, asked: pb.RollPoolsRequest) -> pb.RollPoolsResponse:
    if why := await keeper.roll(asked.pools, _max_surge(asked)):
        raise RequestFailed(grpc.StatusCode.NOT_FOUND, why)
    return pb.RollPoolsResponse()


def _max_surge(asked: pb.ApplySpecRequest | pb.RollPoolsRequest) -> int | None:
    """Raises InvalidRequest."""
    if not asked.HasField("max_surge"):
        return None
    if asked.max_surge > MAX_SURGE:
        raise InvalidRequest(f"max_surge is {asked.max_surge}; give 0 or {MAX_SURGE}")
    return asked.max_surge
