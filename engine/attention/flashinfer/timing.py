"""How long a decode kernel takes, as it will run: CALLS of them in one captured graph, at a size of the pool's own.

Each call reads pages of its own, like the layers of a model: a call that found the last one's keys in the GPU's cache
would look faster than it is. Where a kernel cannot be captured it is timed as it is launched, and that is said.

Legend: T rows, H query heads, D head_dim.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.attention.base import AttentionCall, StepMeta
from engine.attention.flashinfer.backend import FlashInferBackend
from engine.attention.flashinfer.shapes import Shape
from engine.attention.flashinfer.trial import call_of, step_over
from engine.device import Capture

logger = logging.getLogger(__name__)

CALLS = 20
REPEATS = 10
BATCHES = (1, 32, 128)  # sequences
CONTEXTS = (1024, 8192)  # keys of each
BEYOND_CACHES = 256 << 20  # bytes: several times what any GPU's cache holds
SHARE_OF_FREE_MEMORY = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of the decode steps that there will be."""

    sequences: int = BATCHES[-1]  # of the largest graph
    keys: int = CONTEXTS[-1]  # of the longest sequence
    pages: int | None = None  # of the pool, where it is known


@dataclass(frozen=True, slots=True)
class Stopwatch:
    capture: Capture | None  # None: nothing can be captured here
    seconds: Callable[[Callable[[], object]], float]

    @classmethod
    def on(cls, device: torch.device, capture: Capture | None = None) -> Stopwatch:
        """By the device's own clock; off CUDA nothing is timed."""
        return cls(capture, seconds_of if device.type == "cuda" else _untimed)


def seconds_of(run: Callable[[], object]) -> float:
    """The median, after a warm-up."""
    times: list[float] = []
    for _ in range(REPEATS + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times[2:])


def _untimed(run: Callable[[], object]) -> float:
    run()
    return 0.0


def sizes(shape: Shape, limits: Limits, most_bytes: int) -> list[tuple[int, int]]:
    """(sequences, keys of each) to measure: those that the pool and the memory hold, and the smallest in any case."""
    batches = sorted({min(size, limits.sequences) for size in BATCHES})
    contexts = sorted({min(size, limits.keys) for size in CONTEXTS})
    wanted = [(batch, keys) for batch in batches for keys in contexts]

    def fits(size: tuple[int, int]) -> bool:
        pages = size[0] * -(-size[1] // shape.page_size)
        return pages * shape.page_bytes <= most_bytes and (limits.pages is None or pages <= limits.pages)

    return [size for size in wanted if fits(size)] or wanted[:1]


def most_bytes(device: torch.device) -> int:
    """That a measurement's pages may take."""
    if device.type != "cuda":
        return BEYOND_CACHES
    return int(torch.cuda.mem_get_info(device)[0] * SHARE_OF_FREE_MEMORY)


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """Decode steps over pages of their own, in the order of the layers; all of one shape, of the same tables."""

    q_THD: torch.Tensor
    pages: Sequence[tuple[torch.Tensor, torch.Tensor]]  # K and V, one for each call, by turns
    meta: StepMeta
    call: AttentionCall

    @classmethod
    def of(cls, shape: Shape, sequences: int, keys: int, device: torch.device) -> DecodeStep:
        each = -(-keys // shape.page_size)
        count = sequences * each
        different = max(1, min(CALLS, -(-BEYOND_CACHES // (count * shape.page_bytes))))
        kept = [_some_pages(shape, different * count, device).split(count) for _ in "kv"]
        tables = np.random.default_rng(0).permutation(count).astype(np.int32).reshape(sequences, each)
        one_row_each = np.arange(sequences + 1, dtype=np.int32)
        starts = np.full(sequences, keys - 1, dtype=np.int32)
        meta = step_over(one_row_each, starts, tables, shape.page_size, device)
        assert meta.tables is not None
        meta = replace(meta, tables=replace(meta.tables, is_static=True))  # as a graph's are
        sinks = torch.zeros(shape.heads, device=device) if shape.sinks else None
        q_THD = torch.randn(sequences, shape.heads, shape.head_dim, device=device).to(shape.dtype)
        return cls(q_THD, list(zip(*kept, strict=True)), meta, call_of(shape, sinks))


def _some_pages(shape: Shape, count: int, device: torch.device) -> torch.Tensor:
    """Of bytes that are small numbers in any dtype."""
    size = (count, shape.page_size, shape.kv_heads, shape.head_dim * shape.kv_dtype.itemsize)
    return torch.empty(size, dtype=torch.uint8, device=device).random_(0, 60).view(shape.kv_dtype)


def seconds_of_a_call(name: str, backend: FlashInferBackend, step: DecodeStep, stopwatch: Stopwatch) -> float:
    """`backend` has the kernel called `name` for the step's shape."""

    def calls() -> torch.Tensor:
        for i in range(CALLS):
            k_pages, v_pages = step.pages[i % len(step.pages)]
            out = backend.attend(step.q_THD, k_pages, v_pages, step.meta, step.call)
        return out

    return seconds_of_one(name, calls, stopwatch)


def seconds_of_one(name: str, calls: Callable[[], torch.Tensor], stopwatch: Stopwatch) -> float:
    """Of the CALLS that `calls` makes."""
    calls()  # plans; what is compiled or allocated at first use is so outside the capture
    run: Callable[[], object] = calls
    if stopwatch.capture is not None:
        try:
            run, _ = stopwatch.capture(calls)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:200]
            logger.warning("%s cannot be captured, and is timed with its launches: %s", name, reason)
    return stopwatch.seconds(run) / CALLS
