"""DistServeLatency is a LatencyModel by DistServe's formulas. T are a step's prompt tokens, B its requests:

    prefill stage  (a + b T + c sum(l^2)) / pp + 1.0 pp       ms; a chunk behind a context of k counts (k + l)^2 - k^2
    decode stage   (a + b sum(context) + c B) / pp            ms; one set of coefficients below 95 requests, one from 95

Its coefficients are placement/papers/distserve/coefficients.py's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from placement.latency.base import DecodeLine

Engine = Literal["distserve", "vllm"]
STAGE_OVERHEAD_MS = 1.0
LARGE_BATCH = 95


@dataclass(frozen=True, slots=True, kw_only=True)
class DistServeLatency:
    """`max_batch_tokens`: prompt tokens that DistServe lets into one prefill step of this configuration."""

    model: str
    tp: int
    pp: int
    engine: Engine
    prefill: tuple[float, float, float]
    decode_small: tuple[float, float, float]
    decode_large: tuple[float, float, float]
    max_batch_tokens: int
    link_s_per_token: float = 0.0  # DistServe's simulator lets KV pass in no time

    @property
    def source(self) -> str:
        return f"DistServe's coefficients of {self.model} on A100-80G, {self.engine} engine, TP {self.tp}, PP {self.pp}"

    @property
    def stages(self) -> int:
        return self.pp

    def prefill_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        a, b, c = self.prefill
        tokens = sum(length for length, _ in chunks)
        squares = sum(length * (length + 2 * context) for length, context in chunks)
        return ((a + b * tokens + c * squares) / self.pp + STAGE_OVERHEAD_MS * self.pp) / 1e3

    def decode_line(self, batch_size: int, context_tokens: int) -> DecodeLine:
        a, b, c = self.decode_small if batch_size < LARGE_BATCH else self.decode_large
        per_token_s = b / self.pp / 1e3
        return DecodeLine((a + c * batch_size) / self.pp / 1e3 + per_token_s * context_tokens, per_token_s)

    def mixed_s(self, chunks: Sequence[tuple[int, int]], batch_size: int, context_tokens: int) -> float:
        """Not published: the prompt's step, and what the decode's adds to its own constant part."""
        if not chunks:
            return self.decode_line(batch_size, context_tokens).step_s
        if not batch_size:
            return self.prefill_s(chunks)
        a = self.decode_small[0] if batch_size < LARGE_BATCH else self.decode_large[0]
        return self.prefill_s(chunks) + self.decode_line(batch_size, context_tokens).step_s - a / self.pp / 1e3

    def transfer_s(self, num_tokens: int) -> float:
        return self.link_s_per_token * num_tokens
