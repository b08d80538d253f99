"""What each key used, as it is told to who asks over gRPC: operators of all keys, others of their own."""

from __future__ import annotations

from typing import NamedTuple

import grpc

from cluster.router.live.requests import RequestFailed
from cluster.usage.accounting import HOUR_S, Accounting
from cluster.usage.database import DatabaseError, Used
from cluster.usage.options import Prices
from engine.types import InvalidRequest
from kvrelay.v1 import cluster_pb2
from worker.wire.door import CALLER
from worker.wire.tokens import OPERATORS

MAX_S = 1e12  # seconds since 1970; databases' integers hold more


class Usage(NamedTuple):
    accounting: Accounting | None  # None: nothing is counted
    prices: Prices | None


async def get_usage(usage: Usage, asked: cluster_pb2.GetUsageRequest) -> cluster_pb2.GetUsageResponse:
    """Raises RequestFailed, InvalidRequest."""
    if usage.accounting is None:
        why = "nothing is counted here: router.usage_db is off; give a file, a URL, or null for the usual file"
        raise RequestFailed(grpc.StatusCode.FAILED_PRECONDITION, why)
    for name, value in (("since_s", asked.since_s), ("until_s", asked.until_s)):
        if not 0 <= value <= MAX_S:
            raise InvalidRequest(f"{name} is {value:g}; give seconds since 1970, from 0 to {MAX_S:g}")
    key = None if (caller := CALLER.get()) in OPERATORS else caller
    try:
        used = await usage.accounting.read(asked.since_s, asked.until_s, key)
    except DatabaseError as error:
        raise RequestFailed(grpc.StatusCode.UNAVAILABLE, f"the usage cannot be read now: {error}") from None
    told = cluster_pb2.GetUsageResponse(database=usage.accounting.identity, usage=map(_told, used))
    if (prices := usage.prices) is not None:
        told.prices.currency, told.prices.prompt = prices.currency, prices.prompt
        told.prices.cached, told.prices.generated = prices.cached, prices.generated
    return told


def _told(used: Used) -> cluster_pb2.KeyUsage:
    counts = used.counts
    return cluster_pb2.KeyUsage(
        hour_s=used.hour * HOUR_S,
        key=used.key,
        requests=counts.requests,
        prompt_tokens=counts.prompt_tokens,
        cached_tokens=counts.cached_tokens,
        generated_tokens=counts.generated_tokens,
        prefill_s=counts.prefill_us / 1e6,
        handoff_s=counts.handoff_us / 1e6,
        decode_s=counts.decode_us / 1e6,
    )
