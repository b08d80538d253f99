"""LatencyModel says how long one worker takes for a prefill step, a decode step and the handoff of a prompt's KV.

Times are seconds, lengths are tokens. A model is for one worker: one model, one kind of GPU, one parallel degree. With
pipeline stages its times are those of one stage, and a step passes `stages` of them; a worker has a step in each, of
other requests. It never reads a clock and keeps no state, so that processes can share it.

A decode step's time is affine in the tokens attended to, piece by piece, for any batch size: that is what lets the
simulator pass over thousands of steps at once (`DecodeLine`), and what every model here is anyway: a roofline is the
greater of two lines, a table is interpolated by lines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class LatencyError(ValueError):
    """A latency model that cannot be had: one sentence naming the key, the value and the mend."""


@dataclass(frozen=True, slots=True)
class DecodeLine:
    """A decode step takes step_s at the context asked for, and per_token_s more for each token of context added to it,
    up to and including `until_tokens` of context."""

    step_s: float
    per_token_s: float
    until_tokens: float = math.inf


class LatencyModel(Protocol):
    @property
    def source(self) -> str:
        """Where the figures come from, for the report: one sentence."""

    @property
    def stages(self) -> int:
        """Pipeline stages; the times of a step are those of one stage."""

    def prefill_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        """One step over chunks of prompts, each (tokens computed, tokens before them in the context)."""

    def decode_line(self, batch_size: int, context_tokens: int) -> DecodeLine:
        """One step that makes a token for each of `batch_size` requests. `context_tokens`: all that is attended to, the
        new tokens counted; it grows by batch_size from step to step."""

    def mixed_s(self, chunks: Sequence[tuple[int, int]], batch_size: int, context_tokens: int) -> float:
        """One step that does both at once, as colocated workers do; either part may be empty."""

    def transfer_s(self, num_tokens: int) -> float:
        """How long the KV of `num_tokens` occupies the link between two workers, alone on it."""


def decode_s(model: LatencyModel, batch_size: int, context_tokens: int) -> float:
    """One decode step."""
    return model.decode_line(batch_size, context_tokens).step_s


def decode_run_s(line: DecodeLine, batch_size: int, steps: int) -> float:
    """`steps` decode steps in a row on one line, the context growing by batch_size each."""
    return steps * line.step_s + line.per_token_s * batch_size * (steps * (steps - 1) / 2)


def steps_within(line: DecodeLine, batch_size: int, elapsed_s: float, at_most: int) -> int:
    """How many of the steps on the line, `at_most` so many, have ended when `elapsed_s` have passed.

    The root of the quadratic of decode_run_s, put right by a step where rounding misplaced it.
    """
    growth_s = line.per_token_s * batch_size
    if abs(growth_s) * at_most < 1e-12 * line.step_s:
        guess = elapsed_s / line.step_s
    else:
        half = line.step_s - growth_s / 2
        guess = (math.sqrt(max(0.0, half * half + 2 * growth_s * elapsed_s)) - half) / growth_s
    steps = max(0, min(at_most, int(guess)))
    while steps < at_most and decode_run_s(line, batch_size, steps + 1) <= elapsed_s:
        steps += 1
    while steps > 0 and decode_run_s(line, batch_size, steps) > elapsed_s:
        steps -= 1
    return steps
