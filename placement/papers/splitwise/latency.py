"""SplitwiseLatency is a LatencyModel by Splitwise's measured times: curves over x = prompt size * batch, interpolated
linearly, extrapolated at the ends. A prompt step of T tokens takes prompt_time(T). For a decode step of n requests
there are two rules:

    "table"      token_time(512 n): how the rows were measured, 512 tokens of prompt for each request
    "published"  token_time(n): what Splitwise's simulator does. It reads a table made over tokens with a number of
                 requests, so its decode does not slow down with the batch: 35.5 ms for 64 requests on an H100 machine
                 whose own row says 63.8. Kept to reproduce its results, and named so that nobody takes it for truth.

A step with both takes 1.1 times prompt_time(prompt tokens + requests).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from placement.latency.base import DecodeLine

DecodeRule = Literal["table", "published"]
ROW_PROMPT_TOKENS = 512
MIXED_FACTOR = 1.1
GIB = 2**30
KV_BYTES_PER_TOKEN = {  # 2 * hidden * layers * 2 bytes, as Splitwise counts it: Llama2-70B's GQA is not in it
    "bloom-176b": 2 * 14336 * 70 * 2,
    "llama2-70b": 2 * 8192 * 80 * 2,
}
WEIGHT_BYTES = {"bloom-176b": 329_000_000_000, "llama2-70b": 135_000_000_000}
GPU_BYTES = 80 * GIB


class Curve:
    """Straight lines through points; beyond the ends the outermost line goes on. Remembers what it was asked."""

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        self._xs = [x for x, _ in points]
        self._ys = [y for _, y in points]
        self._known: dict[float, float] = {}

    def __reduce__(self) -> tuple[type[Curve], tuple[list[tuple[float, float]]]]:
        """Sent to another process without what it remembers."""
        return Curve, (list(zip(self._xs, self._ys, strict=True)),)

    def __call__(self, x: float) -> float:
        y = self._known.get(x)
        if y is None:
            i = min(max(bisect_right(self._xs, x) - 1, 0), len(self._xs) - 2)
            slope = (self._ys[i + 1] - self._ys[i]) / (self._xs[i + 1] - self._xs[i])
            y = self._known[x] = slope * (x - self._xs[i]) + self._ys[i]
        return y


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitwiseLatency:
    model: str
    hardware: str
    tp: int
    rule: DecodeRule
    prompt_s: Curve
    token_s: Curve
    link_bytes_per_s: float = 200.0 * GIB

    @property
    def source(self) -> str:
        how = "read at 512 tokens a request" if self.rule == "table" else "read as its simulator reads it"
        return f"Splitwise's table of {self.model} on {self.hardware}, TP {self.tp}, decode {how}"

    @property
    def stages(self) -> int:
        return 1

    @property
    def kv_bytes_per_token(self) -> int:
        return KV_BYTES_PER_TOKEN[self.model]

    @property
    def kv_capacity_bytes(self) -> int:
        """What a machine of eight GPUs, or the TP group, has left beside the weights."""
        return GPU_BYTES * self.tp - WEIGHT_BYTES[self.model]

    def prefill_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        """A later chunk takes what it adds to the prompt's time, and no less than a first one of its length: the table
        has whole prompts only, and Splitwise never cuts one."""
        return self._prompts_s(chunks, 0)

    def _prompts_s(self, chunks: Sequence[tuple[int, int]], requests: int) -> float:
        tokens = sum(length for length, _ in chunks) + requests
        before = sum(computed for _, computed in chunks)
        if not before:
            return self.prompt_s(tokens)
        return max(self.prompt_s(tokens), self.prompt_s(before + tokens) - self.prompt_s(before))

    def decode_line(self, batch_size: int, context_tokens: int) -> DecodeLine:
        """The table has no column for the context: a step's time depends on the batch alone."""
        x = batch_size if self.rule == "published" else ROW_PROMPT_TOKENS * batch_size
        return DecodeLine(self.token_s(x), 0.0)

    def unloaded_tbt_s(self, prompt_len: int) -> float:
        """Its simulator reads the table at the prompt's length for a request that is alone."""
        return self.token_s(prompt_len)

    def mixed_s(self, chunks: Sequence[tuple[int, int]], batch_size: int, context_tokens: int) -> float:
        if not chunks:
            return self.decode_line(batch_size, context_tokens).step_s
        if not batch_size:
            return self.prefill_s(chunks)
        return self._prompts_s(chunks, batch_size) * MIXED_FACTOR

    def transfer_s(self, num_tokens: int) -> float:
        return num_tokens * self.kv_bytes_per_token / self.link_bytes_per_s
