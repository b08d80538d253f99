"""Bounds say by arithmetic what a simulation need not find out: how fast a worker answers with nobody else there, and
more requests a second than it could ever keep up with.

    floor   a prompt alone in a step; a decode step of one request. No batching, no queue: nothing is faster
    bound   prompts packed as full as a step may be, or one by one, whichever is faster; decode steps of as many
    requests
            as the pages hold and the TPOT target lets into a step

A bound leaves a margin for the requests that it is drawn from; the search raises it where a simulation shows more.
"""

from __future__ import annotations

import math

import numpy as np

from placement.catalogs.base import Offer
from placement.goodput.targets import Targets
from placement.latency.base import decode_s
from placement.plan import Slo
from placement.workload.requests import Floats, Workload

SAMPLE = 512
MARGIN = 1.1
LATE_SHARE = 1.1  # steps may be so much longer than the TPOT target on the mean, while most requests meet it


def prefill_alone_s(offer: Offer, prompt_len: int) -> float:
    """Arrival to first token with nobody else there: its chunks one after another, through all stages."""
    latency, spent_s, begun = offer.latency, 0.0, 0
    while begun < prompt_len:
        length = min(offer.max_batch_tokens, prompt_len - begun)
        stage_s = latency.prefill_s([(length, begun)])
        begun += length
        spent_s += offer.step_overhead_s + (stage_s if begun < prompt_len else stage_s * latency.stages)
    return spent_s


def decode_alone_s(offer: Offer, context_tokens: int) -> float:
    """One decode step of one request."""
    return decode_s(offer.latency, 1, context_tokens) * offer.latency.stages + offer.step_overhead_s


def floors_s(prefill: Offer | None, decode: Offer | None, workload: Workload) -> tuple[Floats, Floats]:
    """TTFT and TPOT of each of the workload's first requests alone; 0 for a phase that is not asked about."""
    sample = workload.first(SAMPLE)
    prompts, outputs = sample.prompt_len.tolist(), sample.output_len.tolist()
    ttft, tpot = np.zeros(len(prompts)), np.zeros(len(prompts))
    if prefill is not None:
        known = {length: prefill_alone_s(prefill, length) for length in set(prompts)}
        ttft = np.array([known[length] for length in prompts])
    if decode is not None:
        rows = zip(prompts, outputs, strict=True)
        tpot = np.array([decode_alone_s(decode, p + o // 2) if o > 1 else 0.0 for p, o in rows])
    return ttft, tpot


def floor_share(prefill: Offer | None, decode: Offer | None, workload: Workload, targets: Targets) -> float:
    """The attainment less its target with nobody else there: below 0, no rate keeps the SLO."""
    ttft, tpot = floors_s(prefill, decode, workload)
    ttft_s, tpot_s = targets.limits_s(workload.first(SAMPLE))
    met = (ttft <= ttft_s) & (tpot <= tpot_s)
    slacks = []
    for is_of, wanted in targets.groups(workload.first(SAMPLE)).values():
        if is_of.any():
            slacks.append(float(met[is_of > 0].mean()) - wanted)
    return min(slacks)


def _served(offer: Offer, workload: Workload) -> tuple[Workload, float]:
    """Those that a router does not refuse for their length, which cost nothing, and their share."""
    is_served = workload.prompt_len + workload.output_len <= (offer.max_len or math.inf)
    if is_served.all() or not is_served.any():
        return workload, 1.0
    return workload.lengths_of(np.flatnonzero(is_served).astype(np.int64)), float(is_served.mean())


def prefill_bound(offer: Offer, workload: Workload) -> float:
    """Prompts a second that one worker cannot exceed."""
    workload, share = _served(offer, workload)
    prompts = workload.prompt_len[:SAMPLE].tolist()
    alone_s = sum(_stage_s(offer, [(length, 0)]) for length in prompts)
    packed_s, step, left = 0.0, [], offer.max_batch_tokens
    for length in prompts:
        begun = 0
        while begun < length:
            part = min(left, length - begun)
            step.append((part, begun))
            begun, left = begun + part, left - part
            if not left:
                packed_s += _stage_s(offer, step)
                step, left = [], offer.max_batch_tokens
    if step:
        packed_s += _stage_s(offer, step)
    return MARGIN * len(prompts) / min(alone_s, packed_s) / share


def _stage_s(offer: Offer, chunks: list[tuple[int, int]]) -> float:
    return offer.latency.prefill_s(chunks) + offer.step_overhead_s


def mean_context(workload: Workload) -> float:
    """Tokens that a decode step attends to for one request, on the mean over steps."""
    made = np.maximum(workload.output_len - 1, 0).astype(np.float64)
    if not made.any():
        return float(workload.prompt_len.mean())
    return float((made * (workload.prompt_len + made / 2)).sum() / made.sum())


def decode_batch(offer: Offer, workload: Workload, tpot_s: float) -> int:
    """The largest batch that the pages hold and whose step is not too long; at least 1."""
    context = mean_context(workload)
    most = max(1, min(offer.max_batch_size, int(offer.kv_tokens / context)))
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        if _step_s(offer, middle, context) <= LATE_SHARE * tpot_s:
            low = middle
        else:
            high = middle - 1
    return low


def link_bound(offer: Offer, workload: Workload) -> float:
    """Prompts a second whose KV one worker can send, or take, over its link."""
    workload, share = _served(offer, workload)
    prompts = workload.prompt_len[:SAMPLE].tolist()
    wire_s = sum(offer.latency.transfer_s(length) for length in prompts) / len(prompts)
    return 1 / wire_s / share if wire_s else math.inf


def decode_bound(offer: Offer, workload: Workload, tpot_s: float) -> float:
    """Requests a second whose tokens one worker cannot exceed."""
    workload, share = _served(offer, workload)
    steps = float(np.maximum(workload.output_len - 1, 0).mean())
    if not steps:
        return math.inf
    batch = decode_batch(offer, workload, tpot_s)
    return MARGIN * batch / (_step_s(offer, batch, mean_context(workload)) * steps) / share


def _step_s(offer: Offer, batch: int, context: float) -> float:
    """In which each of so many requests has a token: with pipeline stages, each stage has a share of them."""
    share = math.ceil(batch / offer.latency.stages)
    return decode_s(offer.latency, share, math.ceil(share * context)) * offer.latency.stages + offer.step_overhead_s


def relaxed(targets: Targets, *, ttft: bool = False, tpot: bool = False) -> Targets:
    """The same targets with one of the two let go."""

    def loose(slo: Slo) -> Slo:
        return Slo(
            ttft_s=math.inf if ttft else slo.ttft_s,
            tpot_s=math.inf if tpot else slo.tpot_s,
            attainment=slo.attainment,
        )

    classes = tuple(type(each)(name=each.name, share=each.share, slo=loose(each.slo)) for each in targets.classes)
    return Targets(slo=loose(targets.slo), classes=classes)
