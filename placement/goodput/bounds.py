"""Bounds say by arithmetic what a simulation need not find out: how fast a worker answers with nobody else there, and
more requests a second than it could ever keep up with.

    floor   a prompt alone in a step; a decode step of one request. No batching, no queue: nothing is faster
    bound   prompts packed as full as a step may be, or one by one, whichever is faster; decode steps of as many
    requests
            as the pages hold and the TPOT target lets into a step

A bound leaves a margin for the requests that it is drawn from; the search raises it where a simulation shows more.
Of prompts that share prefixes what an earlier one has brought is taken to be cached, here and where they are decoded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from placement.catalogs.base import Offer
from placement.goodput.targets import Targets
from placement.latency.base import decode_s
from placement.plan import Slo
from placement.workload.prefixes import brought_len
from placement.workload.requests import Floats, Ints, Workload

SAMPLE = 512
MARGIN = 1.1
LATE_SHARE = 1.1  # steps may be so much longer than the TPOT target on the mean, while most requests meet it


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Lengths:
    """Of some of a workload's requests. `cached_len`: whole pages at the beginning of each prompt, at most."""

    prompt_len: Ints
    output_len: Ints
    cached_len: Ints

    def at(self, rows: Ints) -> _Lengths:
        return _Lengths(
            prompt_len=self.prompt_len[rows], output_len=self.output_len[rows], cached_len=self.cached_len[rows]
        )

    @property
    def prompts(self) -> list[tuple[int, int]]:
        """Tokens of each, and how many of them are cached."""
        return list(zip(self.prompt_len.tolist(), self.cached_len.tolist(), strict=True))

    @property
    def own_len(self) -> Ints:
        """Tokens of each prompt that are computed, or sent, at least."""
        return self.prompt_len - self.cached_len


def _lengths(offer: Offer, workload: Workload) -> _Lengths:
    return _Lengths(
        prompt_len=workload.prompt_len, output_len=workload.output_len, cached_len=cached_len(offer, workload)
    )


def cached_len(offer: Offer, workload: Workload) -> Ints:
    """Of each prompt, at most: at least one token is computed, for its logits."""
    most: Ints = np.minimum(brought_len(workload), workload.prompt_len - 1)
    return most // offer.page_size * offer.page_size


def sampled_rows(workload: Workload, among: Ints | None = None, most: int = SAMPLE) -> Ints:
    """The requests that are looked at, the same each time: any, as a trace's first ones may be unlike the rest, and of
    prompts that share prefixes find less cached."""
    rows = np.arange(len(workload)) if among is None else among
    if len(rows) <= most:
        return rows
    drawn: Ints = np.sort(np.random.default_rng(0).choice(rows, size=most, replace=False))
    return drawn


def prefill_alone_s(offer: Offer, prompt_len: int, cached_len: int = 0) -> float:
    """Arrival to first token with nobody else there: its chunks one after another, through all stages."""
    latency, spent_s, begun = offer.latency, 0.0, cached_len
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
    """TTFT and TPOT of each of the workload's sampled requests alone; 0 for a phase that is not asked about."""
    rows = sampled_rows(workload)
    ttft, tpot = np.zeros(len(rows)), np.zeros(len(rows))
    if prefill is not None:
        prompts = _lengths(prefill, workload).at(rows).prompts
        known = {prompt: prefill_alone_s(prefill, *prompt) for prompt in set(prompts)}
        ttft = np.array([known[prompt] for prompt in prompts])
    if decode is not None:
        lengths = zip(workload.prompt_len[rows].tolist(), workload.output_len[rows].tolist(), strict=True)
        tpot = np.array([decode_alone_s(decode, p + o // 2) if o > 1 else 0.0 for p, o in lengths])
    return ttft, tpot


def floor_share(prefill: Offer | None, decode: Offer | None, workload: Workload, targets: Targets) -> float:
    """The attainment less its target with nobody else there: below 0, no rate keeps the SLO."""
    ttft, tpot = floors_s(prefill, decode, workload)
    sample = workload.without_prefixes(sampled_rows(workload))
    ttft_s, tpot_s = targets.limits_s(sample)
    met = (ttft <= ttft_s) & (tpot <= tpot_s)
    slacks = []
    for is_of, wanted in targets.groups(sample).values():
        if is_of.any():
            slacks.append(float(met[is_of > 0].mean()) - wanted)
    return min(slacks)


def _served(offer: Offer, workload: Workload) -> tuple[Ints, float]:
    """The rows of those that a router does not refuse for their length, which cost nothing, and their share."""
    is_served = workload.prompt_len + workload.output_len <= (offer.max_len or math.inf)
    if is_served.all() or not is_served.any():
        return np.arange(len(workload)), 1.0
    return np.flatnonzero(is_served).astype(np.int64), float(is_served.mean())


def prefill_bound(offer: Offer, workload: Workload) -> float:
    """Prompts a second that one worker cannot exceed."""
    rows, share = _served(offer, workload)
    prompts = _lengths(offer, workload).at(sampled_rows(workload, rows)).prompts
    alone_s = sum(_stage_s(offer, [(length - cached, cached)]) for length, cached in prompts)
    packed_s, step, left = 0.0, [], offer.max_batch_tokens
    for length, begun in prompts:
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
    return _mean_held(workload.prompt_len, workload.output_len)


def _mean_held(prompt_len: Ints, output_len: Ints) -> float:
    """These tokens of a request's prompt and what it has made, on the mean over steps."""
    made = np.maximum(output_len - 1, 0).astype(np.float64)
    if not made.any():
        return float(prompt_len.mean())
    return float((made * (prompt_len + made / 2)).sum() / made.sum())


def decode_batch(offer: Offer, workload: Workload, tpot_s: float) -> int:
    """The largest batch that the pages hold and whose step is not too long; at least 1."""
    return _largest_batch(offer, _lengths(offer, workload), tpot_s)


def _largest_batch(offer: Offer, lengths: _Lengths, tpot_s: float) -> int:
    """Pages of a prefix are held once, whoever has it."""
    context = _mean_held(lengths.prompt_len, lengths.output_len)
    own = _mean_held(lengths.own_len, lengths.output_len)
    most = max(1, min(offer.max_batch_size, int(offer.kv_tokens / own)))
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
    rows, share = _served(offer, workload)
    sent = _lengths(offer, workload).at(sampled_rows(workload, rows)).own_len.tolist()
    wire_s = sum(offer.latency.transfer_s(length) for length in sent) / len(sent)
    return 1 / wire_s / share if wire_s else math.inf


def decode_bound(offer: Offer, workload: Workload, tpot_s: float) -> float:
    """Requests a second whose tokens one worker cannot exceed."""
    rows, share = _served(offer, workload)
    lengths = _lengths(offer, workload).at(rows)
    steps = float(np.maximum(lengths.output_len - 1, 0).mean())
    if not steps:
        return math.inf
    batch, context = _largest_batch(offer, lengths, tpot_s), _mean_held(lengths.prompt_len, lengths.output_len)
    return MARGIN * batch / (_step_s(offer, batch, context) * steps) / share


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
