"""What a plan went by for one worker of each pool, small enough for a spec: `kvrelay doctor` holds life against it.

It is said of one prompt, read in one step, for that is what can be measured while a cluster serves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvrelay.plan.catalogs import catalogs
from kvrelay.plan.request import PlanRequest
from placement.catalogs.base import Catalog, Offer
from placement.latency.base import LatencyModel, decode_s
from placement.latency.roofline import narrowed
from placement.plan import Candidate, PoolPlan

PROMPT_TOKENS = 512  # long enough that arithmetic counts, short enough for a cluster that serves
DIGITS = 4


def assumed_by(request: PlanRequest, candidate: Candidate) -> list[Mapping[str, Any] | None]:
    """cluster.spec.assumed.Assumed as plain data, for each pool; None where the plan's catalogs do not know it."""
    kinds = catalogs(request)
    within_node = len(kinds) == 1 and candidate.gpus <= kinds[0].gpus_per_node  # two kinds share no node
    offers = [_offer(kinds, pool, within_node=within_node) for pool in candidate.pools]
    most = min(pool.max_batch_tokens for pool in candidate.pools if pool.role != "decode")
    decodes = [o.latency for o, pool in zip(offers, candidate.pools, strict=True) if o and pool.role != "prefill"]
    return [
        None
        if offer is None
        else assumed_of(narrowed(offer.latency, decodes), pool.role, min(PROMPT_TOKENS, most), offer.error)
        for offer, pool in zip(offers, candidate.pools, strict=True)
    ]


def _offer(kinds: Sequence[Catalog], pool: PoolPlan, *, within_node: bool) -> Offer | None:
    """Of a machine under a power cap there is none: its times are not the catalog's."""
    catalog = next((kind for kind in kinds if len(kinds) == 1 or kind.hardware == pool.hardware), None)
    if catalog is None or pool.power_cap != 1:
        return None
    offer = catalog.offer(pool.degrees, within_node=within_node)
    return offer if isinstance(offer, Offer) else None


def assumed_of(latency: LatencyModel, role: str, prompt_tokens: int, error: float) -> Mapping[str, Any]:
    stages = latency.stages
    told: dict[str, Any] = {"prompt_tokens": prompt_tokens}
    if role != "decode":
        told["prefill_s"] = latency.prefill_s([(prompt_tokens, 0)]) * stages
        told["transfer_s"] = latency.transfer_s(prompt_tokens)
    if role != "prefill":
        told["decode_s"] = decode_s(latency, 1, prompt_tokens + 1) * stages
    told["error"] = error
    return {key: value if isinstance(value, int) else float(f"{value:.{DIGITS}g}") for key, value in told.items()}
