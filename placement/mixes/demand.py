"""Demand: the machine time that requests ask for, by arithmetic alone, and so where to look for mixes that serve them.

A first guess, a floor that no mix is below, a rate that a budget may reach: all are where a search begins, none is an
answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from placement.mixes.designs import Design, Resource
from placement.mixes.grid import Limit, Space
from placement.mixes.scenario import Scenario
from placement.workload.requests import Workload

EFFICIENT_TOKENS = (256, 512, 1024, 2048, 4096, 8192)  # of prompt steps among which the most efficient is looked for
OVERLOAD = 1.1  # more work than this for the machines there are, in their most efficient steps, is not simulated
BUSY = 0.75  # of machines, at the first guess
BASELINE_TOKEN_SHARE = 0.3  # of decode's time that a baseline does not hide in its prompt steps, at the first guess


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Machine-seconds that a mean request asks for, in the most efficient steps there are: no mix does with less."""

    prompt_s: float
    token_s: float


def work(design: Design, workload: Workload, max_tbt_s: float = float("inf")) -> Work:
    """`max_tbt_s`: a decode step may take no longer, which keeps batches small."""
    first, second = design.machines
    prompts, outputs = workload.prompt_len, workload.output_len
    prefill = first.latency.prefill_s
    per_token_s = min(prefill([(tokens, 0)]) / tokens for tokens in EFFICIENT_TOKENS)
    lengths, counts = np.unique(prompts, return_counts=True)
    alone_s = np.array([prefill([(int(length), 0)]) for length in lengths])
    prompt_s = float((np.minimum(alone_s, per_token_s * lengths) * counts).sum() / len(prompts))
    context = mean_context(workload)
    stages = second.latency.stages  # with a batch in each
    roomy = max(1, min(second.offer.max_batch_size, second.offer.kv_tokens // context) // stages)
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if size <= roomy]
    times = {size: second.latency.decode_line(size, size * context).step_s for size in sizes}
    token_s = min(step_s / size for size, step_s in times.items() if size == 1 or step_s * stages <= max_tbt_s)
    return Work(prompt_s=prompt_s, token_s=float((outputs - 1).mean()) * token_s)


def mean_context(workload: Workload) -> int:
    """Tokens that a decoding request attends to, on average over its life."""
    return round(float(workload.prompt_len.mean() + workload.output_len.mean() / 2))


def search_space(design: Design, rate: float, scenario: Scenario, resource: Resource) -> Space:
    """Where to look for mixes that hold the rate. Where either kind may do the other's work, only the work of prompts
    on a baseline, and of both where none does, bounds the counts."""
    prompt, token = _busy_machines(design, rate, scenario)
    least = work(design, scenario.load.source)
    floor = (1, 1)
    if design.is_baseline or (design.is_split and not scenario.rules.is_lending):
        floor = (
            max(1, math.ceil(rate * least.prompt_s / OVERLOAD)),
            max(1, math.ceil(rate * least.token_s / OVERLOAD)),
        )
    return Space(
        guess=(max(1, math.ceil(prompt)), 0 if design.is_baseline else max(1, math.ceil(token))),
        floor=(floor[0], 0) if design.is_baseline else floor,
        unit_costs=design.unit_costs(resource),
        is_baseline=design.is_baseline,
    )


def rate_within(design: Design, limits: Sequence[Limit], scenario: Scenario) -> float:
    """What the limits may serve, at a guess."""
    prompt, token = _busy_machines(design, 1.0, scenario)
    return min(limit.at_most / (limit.unit_costs[0] * prompt + limit.unit_costs[1] * token) for limit in limits)


def _busy_machines(design: Design, rate: float, scenario: Scenario) -> tuple[float, float]:
    """Prompt and token machines that the rate keeps busy, at a guess."""
    asked = work(design, scenario.load.source, scenario.targets.longest_step_s)
    if design.is_baseline:
        return rate * (asked.prompt_s + BASELINE_TOKEN_SHARE * asked.token_s) / BUSY, 0.0
    return rate * asked.prompt_s / BUSY, rate * asked.token_s / BUSY
