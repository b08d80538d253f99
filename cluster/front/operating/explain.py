"""Where the time of requests went, as it is told to who asks over gRPC or HTTP: operators of all, others of their own.

What is known is the router's (cluster/router/explaining/); here it is found and made into messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import merge
from itertools import islice

import grpc

from cluster.front.models.catalog import Catalog
from cluster.router.explaining.kept import Record
from cluster.router.explaining.spans import Span
from cluster.router.live.requests import RequestFailed
from kvrelay.v1 import cluster_pb2
from worker.wire.door import CALLER
from worker.wire.tokens import OPERATORS


def explain(catalog: Catalog, request_id: str) -> cluster_pb2.ExplainResponse:
    """Of the newest call of this id, whatever model it asked for. Raises RequestFailed where the caller may know of
    none."""
    now = catalog.first.router.now
    found = [served.router.records(request_id) for served in catalog.all]
    newest = max(filter(None, found), key=lambda records: records[0].timeline.arrived_s, default=[])
    records = [record for record in newest if _may_see(record)]
    if not records:
        kept = [served.router.kept for served in catalog.all]
        why = f"request_id is {request_id[:200]!r}, of which nothing is known here"
        most = f"a router keeps the last {kept[0].most} requests and as many slow ones (explained_requests)"
        raise RequestFailed(grpc.StatusCode.NOT_FOUND, f"{why}; {most}, and has {sum(map(len, kept))} now")
    return cluster_pb2.ExplainResponse(choices=[_explained(now, record, is_whole=True) for record in records])


def list_slow(catalog: Catalog, last: int) -> cluster_pb2.ListSlowResponse:
    """`last` 0: all."""
    now = catalog.first.router.now
    slow = merge(*(served.router.kept.slow() for served in catalog.all), key=lambda record: -record.end_s)
    records = islice((record for record in slow if _may_see(record)), last or None)
    return cluster_pb2.ListSlowResponse(requests=[_explained(now, record) for record in records])


def _may_see(record: Record) -> bool:
    caller = CALLER.get()
    return caller in OPERATORS or record.owner == caller


def _explained(now: float, record: Record, *, is_whole: bool = False) -> cluster_pb2.ExplainedRequest:
    names_others = CALLER.get() in OPERATORS
    return cluster_pb2.ExplainedRequest(
        request_id=record.request_id,
        choice=record.choice,
        state=record.state,
        reason=record.reason,
        age_s=now - record.timeline.arrived_s,
        ttft_s=record.ttft_s,
        tpot_s=record.tpot_s,
        e2e_s=record.e2e_s,
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        output_tokens=record.output_tokens,
        attempts=record.attempts,
        moves=record.moves,
        slow=record.is_slow,
        why=record.why(),
        spans=_told(record.spans(names_others=names_others)) if is_whole else (),
    )


def _told(spans: Sequence[Span]) -> list[cluster_pb2.Span]:
    return [
        cluster_pb2.Span(
            name=span.name,
            begin_s=span.begin_s,
            end_s=span.end_s,
            worker=span.worker,
            attempt=span.attempt,
            words=span.words,
            details=_told(span.details),
        )
        for span in spans
    ]
