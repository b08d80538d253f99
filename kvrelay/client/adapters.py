"""The LoRA adapters that requests may name, as clients see them."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.v1 import cluster_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterInfo:
    name: str
    path: str  # a directory as PEFT saves one
    digest: str  # of its files, when it was named
    rank: int  # the largest of its products
    num_params: int
    why_not: str  # why this router cannot serve it; empty if it can


def adapters_from(answer: pb.ListAdaptersResponse) -> tuple[AdapterInfo, ...]:
    return tuple(
        AdapterInfo(
            name=each.name,
            path=each.path,
            digest=each.digest,
            rank=each.rank,
            num_params=each.num_params,
            why_not=each.why_not,
        )
        for each in answer.adapters
    )
