"""Latency models and catalogues so simple that what comes out is known by formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from placement.catalogs.base import Degrees, MachineCost, Offer
from placement.latency.base import DecodeLine
from placement.workload.requests import Workload

PROMPT, OUTPUT = 100, 11


@dataclass(frozen=True, slots=True, kw_only=True)
class Toy:
    """A prefill step takes prefill_s by prompt of PROMPT tokens in it, a decode step decode_s and slope_s a request."""

    prompt_s: float = 0.1
    decode_s: float = 0.01
    slope_s: float = 0.0
    link_s: float = 0.0
    stages: int = 1
    source: str = "a toy"

    def prefill_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        return self.prompt_s * sum(length for length, _ in chunks) / PROMPT

    def decode_line(self, batch_size: int, context_tokens: int) -> DecodeLine:
        return DecodeLine(self.decode_s + self.slope_s * batch_size, 0.0)

    def mixed_s(self, chunks: Sequence[tuple[int, int]], batch_size: int, context_tokens: int) -> float:
        return self.prefill_s(chunks) + (self.decode_s + self.slope_s * batch_size if batch_size else 0.0)

    def transfer_s(self, num_tokens: int) -> float:
        return self.link_s


def toy_offer(tp: int = 1, pp: int = 1, *, num_pages: int = 10_000, error: float = 0.0, **latency: float) -> Offer:
    """TP makes everything faster, by less than its GPUs."""
    gain = tp**0.8
    times = {"prompt_s": 0.1, "decode_s": 0.01, "slope_s": 0.0004} | latency
    return Offer(
        degrees=Degrees(tp, pp),
        latency=Toy(stages=pp, **{key: value / gain for key, value in times.items()}),
        num_pages=num_pages * tp * pp,
        max_batch_tokens=PROMPT,
        error=error,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyCatalog:
    """TP 1, 2 and 4 of the toy, and what is said of TP 8."""

    error: float = 0.0
    latency: dict[str, float] = field(default_factory=dict)
    num_pages: int = 10_000
    gpus_per_node: int = 8
    far_s: float = 0.0  # that KV takes between nodes
    largest: int = 4
    model: str = "toy"
    hardware: str = "bench"
    cost: MachineCost = field(default_factory=lambda: MachineCost(usd_per_gpu_hour=2.0, watts_per_gpu=100.0))

    def degrees(self, max_gpus: int) -> list[Degrees]:
        return [Degrees(tp, 1) for tp in (1, 2, 4, 8) if tp <= max_gpus]

    def offer(self, degrees: Degrees, *, within_node: bool = True) -> Offer | str:
        if degrees.tp > self.largest:
            return f"TP {degrees.tp}: the toy has {self.largest} heads; give a TP that divides them"
        latency = self.latency if within_node else self.latency | {"link_s": self.far_s}
        return toy_offer(degrees.tp, degrees.pp, num_pages=self.num_pages, error=self.error, **latency)


def alike(count: int = 400, output: int = OUTPUT) -> Workload:
    """Requests that are all the same, one a second."""
    return Workload(
        arrival_s=np.arange(count, dtype=np.float64),
        prompt_len=np.full(count, PROMPT, dtype=np.int64),
        output_len=np.full(count, output, dtype=np.int64),
        name="alike",
    )
