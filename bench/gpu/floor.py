"""What a machine can do at most, measured on the spot, and what a step of a model must do at least.

    bandwidth   a copy of a large buffer, bytes read plus bytes written
    matmul      a square bfloat16 product on random data (zeros run faster, and say nothing)

The floor of a decode step is the bytes it must read (weights, KV) over the bandwidth; that of a prefill is its
multiplications over the matmul rate.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.engine import Engine

DATASHEET_BANDWIDTH = {"H200": 4.8e12, "H100": 3.35e12, "A100": 2.04e12}  # bytes/s, by what the GPU's name holds
REPEATS = 7


@dataclass(frozen=True, slots=True)
class Ceilings:
    bandwidth: float  # bytes/s
    matmul: float  # floating-point operations/s
    datasheet_bandwidth: float | None  # bytes/s


def ceilings(device: torch.device, *, is_small: bool) -> Ceilings:
    size, side = (1 << 24, 256) if is_small else (4 << 30, 8192)
    copy_s, product_s = _copy_s(size, device), _product_s(side, device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    datasheet = next((rate for key, rate in DATASHEET_BANDWIDTH.items() if key in name), None)
    return Ceilings(2 * size / copy_s, 2 * side**3 / product_s, datasheet)


def _copy_s(size: int, device: torch.device) -> float:
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    into = torch.empty_like(source)
    return seconds(lambda: into.copy_(source), device)


def _product_s(side: int, device: torch.device) -> float:
    a, b = (torch.randn(side, side, device=device).to(torch.bfloat16) for _ in range(2))
    return seconds(lambda: a @ b, device)


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """The median, by the device's own clock where it has one."""
    run()
    return statistics.median(_once(run, device) for _ in range(REPEATS))


def _once(run: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        began_s = time.perf_counter()
        run()
        return time.perf_counter() - began_s
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


@dataclass(frozen=True, slots=True)
class Work:
    """What a model must do for a token, from its config."""

    read_weight_bytes: float  # of every weight that a step multiplies by, the head included
    layer_params: float  # of the layers alone
    head_params: float
    kv_bytes_per_token: float
    attention_flops: float  # for one query and one key, over all layers and heads

    @classmethod
    def of(cls, engine: Engine, config: Any) -> Work:
        text = config.get_text_config()
        embedding = text.vocab_size * text.hidden_size
        copies = 1 if text.tie_word_embeddings else 2
        layers = engine.info.num_params - copies * embedding
        itemsize = engine.info.weight_bytes / engine.info.num_params
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return cls(
            read_weight_bytes=(layers + embedding) * itemsize,
            layer_params=layers,
            head_params=embedding,
            kv_bytes_per_token=engine.layout.page_bytes() / engine.layout.page_size,
            attention_flops=4.0 * text.num_hidden_layers * text.num_attention_heads * head_dim,
        )

    def decode_bytes(self, batch: int, context: int) -> float:
        return self.read_weight_bytes + batch * context * self.kv_bytes_per_token

    def prefill_flops(self, tokens: int) -> float:
        """Causal: half of all pairs; the head runs on the last token only."""
        return 2.0 * (self.layer_params * tokens + self.head_params) + self.attention_flops * tokens * tokens / 2
