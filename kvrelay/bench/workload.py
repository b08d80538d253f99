"""From WorkloadOptions to requests: arrival times, prompt and output lengths, prompt tokens.

Pure: files are read, nothing is sent, and all chance comes from the generator that the caller passes, so that one seed
always makes one workload. Times are seconds since the first request, lengths are tokens. Traces and arrival times are
placement.workload.traces', so that the planner and the load generator mean the same by them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvrelay.bench.options import WorkloadOptions
from placement.workload.requests import Workload, from_shapes
from placement.workload.traces import (
    MOONCAKE_BLOCK_TOKENS,
    MOST_LENGTH,
    Shape,
    WorkloadError,
    arrivals_s,
    read_trace,
)

RANDOM_REQUESTS = 4096  # where no number is asked for: a simulation draws from them
__all__ = [
    "MOONCAKE_BLOCK_TOKENS",
    "Shape",
    "WorkloadError",
    "arrivals_s",
    "at_speed",
    "check_lengths",
    "fit",
    "prompts",
    "random_shapes",
    "read_trace",
    "shapes_of",
    "source_workload",
    "timed_shapes",
    "timed_workload",
]


def shapes_of(options: WorkloadOptions, rng: np.random.Generator) -> list[Shape]:
    """The trace's requests, or as many random ones as are asked for. Raises WorkloadError."""
    if options.num_prompts is not None:
        _check_count("--num-prompts", options.num_prompts)
    if options.trace is not None:
        shapes, scale = read_trace(options.trace, options.num_prompts), options.trace_scale
    elif options.random_input_len is None or options.random_output_len is None:
        raise WorkloadError("no requests are given; give --trace, or --random-input-len and --random-output-len")
    else:
        num, lengths = options.num_prompts or RANDOM_REQUESTS, (options.random_input_len, options.random_output_len)
        scale = 1.0
        shapes = random_shapes(num, *lengths, options.random_range_ratio, options.random_prefix_len, rng)
    return fit(shapes, scale=scale, max_input_len=options.max_input_len, max_output_len=options.max_output_len)


def source_workload(options: WorkloadOptions) -> Workload:
    """The requests that a simulation draws from: lengths, and the trace's own times. Raises WorkloadError."""
    return from_shapes(shapes_of(options, np.random.default_rng(options.seed)), options.name)


def timed_shapes(options: WorkloadOptions) -> list[tuple[Shape, float]]:
    """What to send and when. Lengths and arrivals draw from generators of their own: a new rate keeps the lengths.
    Raises WorkloadError."""
    _check(options)
    shapes = shapes_of(options, np.random.default_rng([options.seed, 0]))
    if options.trace_timestamps:
        return list(zip(shapes, at_speed(shapes, options.trace_speedup), strict=True))
    rng = np.random.default_rng([options.seed, 1])
    return list(zip(shapes, arrivals_s(len(shapes), options.request_rate, options.burstiness, rng), strict=True))


def timed_workload(options: WorkloadOptions) -> Workload:
    """The same as the simulator takes it. Clients that are played stay to the end."""
    shapes = [replace(shape, at_s=at_s, cancel_after_s=math.inf) for shape, at_s in timed_shapes(options)]
    return from_shapes(shapes, options.name)


def _check(options: WorkloadOptions) -> None:
    if not 0 <= options.seed < 2**62:
        raise WorkloadError(f"--seed is {options.seed}; give a whole number of 0 to 2**62 - 1")
    if options.trace is None and options.trace_timestamps:
        raise WorkloadError("--trace-timestamps needs --trace FILE, whose times it replays")


def random_shapes(
    num: int, input_len: int, output_len: int, range_ratio: float, prefix_len: int, rng: np.random.Generator
) -> list[Shape]:
    """Lengths drawn evenly from [len * (1 - range_ratio), len * (1 + range_ratio)]; `prefix_len` is added to inputs."""
    _check_count("random input length", input_len)
    _check_count("random output length", output_len)
    _check_count("random prefix length", prefix_len, least=0)
    if not 0 <= range_ratio < 1:
        raise WorkloadError(f"random range ratio is {range_ratio:g}; give 0 or more, below 1")
    inputs = _lengths(num, input_len, range_ratio, rng)
    outputs = _lengths(num, output_len, range_ratio, rng)
    return [Shape(input_len=prefix_len + i, output_len=o) for i, o in zip(inputs, outputs, strict=True)]


def _check_count(key: str, count: int, *, least: int = 1) -> None:
    if not least <= count <= MOST_LENGTH:
        mend = f"{least} or more" if count < least else f"{MOST_LENGTH} or less"
        raise WorkloadError(f"{key} is {count}; give {mend}")


def _lengths(num: int, length: int, ratio: float, rng: np.random.Generator) -> list[int]:
    low, high = max(1, math.floor(length * (1 - ratio))), math.ceil(length * (1 + ratio))
    return rng.integers(low, high, size=num, endpoint=True).tolist()  # type: ignore[no-any-return]


def fit(
    shapes: Sequence[Shape], *, scale: float = 1.0, max_input_len: int | None = None, max_output_len: int | None = None
) -> list[Shape]:
    """Lengths times `scale` (at least 1), then cut to the limits; arrival times stay."""
    if not (scale > 0 and math.isfinite(scale)):
        raise WorkloadError(f"trace scale is {scale:g}; give a number above 0")
    for key, limit in (("max input length", max_input_len), ("max output length", max_output_len)):
        if limit is not None:
            _check_count(key, limit)
    longest = max((max(shape.input_len, shape.output_len) for shape in shapes), default=0)
    if scale > 1 and longest * scale > MOST_LENGTH:
        raise WorkloadError(
            f"trace scale is {scale:g}, and the longest request has {longest} tokens; give {MOST_LENGTH / longest:.3g} "
            "or less"
        )
    return [
        replace(
            shape,
            input_len=_scaled(shape.input_len, scale, max_input_len),
            output_len=_scaled(shape.output_len, scale, max_output_len),
            block_len=_scaled(shape.block_len, scale, None),
        )
        for shape in shapes
    ]


def _scaled(length: int, scale: float, limit: int | None) -> int:
    scaled = max(1, round(length * scale))
    return scaled if limit is None else min(scaled, limit)


def check_lengths(shapes: Sequence[Shape], max_model_len: int) -> None:
    """Raise WorkloadError if a request is longer than the model takes; the sentence says what would fit."""
    longest = max(shape.input_len + shape.output_len for shape in shapes)
    if longest <= max_model_len:
        return
    over = sum(shape.input_len + shape.output_len > max_model_len for shape in shapes)
    scale = math.floor(100 * max_model_len / longest) / 100
    raise WorkloadError(
        f"{over} of {len(shapes)} requests are longer than the model's {max_model_len} tokens (the longest has "
        f"{longest}); give shorter lengths, or for a trace --trace-scale {scale:g} or --max-input-len and "
        "--max-output-len"
    )


def at_speed(shapes: Sequence[Shape], speedup: float) -> list[float]:
    """The trace's own arrival times, `speedup` times as fast."""
    if not (speedup > 0 and math.isfinite(speedup)):
        raise WorkloadError(f"trace speed-up is {speedup:g}; give a number above 0")
    return [shape.at_s / speedup for shape in shapes]


def prompts(
    shapes: Sequence[Shape], vocab_size: int, avoid: Iterable[int], rng: np.random.Generator, *, prefix_len: int = 0
) -> list[list[int]]:
    """Random token ids for each shape, none of them in `avoid`; the first `prefix_len` are the same in all."""
    ids = np.setdiff1d(np.arange(vocab_size), np.fromiter(avoid, dtype=np.int64))
    if len(ids) == 0:
        raise WorkloadError(f"the model has {vocab_size} token ids and all are special; nothing is left to send")
    prefix = rng.choice(ids, size=prefix_len)
    seed = int(rng.integers(2**63))
    blocks: dict[tuple[int, int], np.ndarray[Any, Any]] = {}
    made = []
    for shape in shapes:
        parts = [prefix[: shape.input_len], *_blocks(shape, ids, seed, blocks)]
        rest = shape.input_len - sum(len(part) for part in parts)
        parts.append(rng.choice(ids, size=max(0, rest)))
        made.append(np.concatenate(parts)[: shape.input_len].tolist())
    return made


def _blocks(
    shape: Shape, ids: np.ndarray[Any, Any], seed: int, known: dict[tuple[int, int], np.ndarray[Any, Any]]
) -> list[np.ndarray[Any, Any]]:
    """The tokens of each of the shape's blocks; they depend on the block's id and the seed alone."""
    for block in shape.blocks:
        if (block, shape.block_len) not in known:
            own = np.random.default_rng([seed, block % 2**63])
            known[block, shape.block_len] = own.choice(ids, size=shape.block_len)
    return [known[block, shape.block_len] for block in shape.blocks]
