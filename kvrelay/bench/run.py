"""A benchmark from its settings to what became of each request: make the workload, warm up, play.

Nothing is printed and nothing is judged here: see kvrelay.bench.metrics and kvrelay.bench.report. One seed always makes
the same requests at the same times; lengths, arrivals and prompts draw from generators of their own, so that another
rate keeps the lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from kvrelay.bench import workload
from kvrelay.bench.load import Planned, play
from kvrelay.bench.metrics import Outcome
from kvrelay.client.client import AsyncClient
from kvrelay.client.messages import build_request
from kvrelay.client.types import ServedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What `kvrelay bench` may be told; see its --help. Lengths in tokens, times in seconds."""

    num_prompts: int = 1000
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    random_prefix_len: int = 0
    trace: Path | None = None
    trace_timestamps: bool = False
    trace_speedup: float = 1.0
    trace_scale: float = 1.0
    max_input_len: int | None = None
    max_output_len: int | None = None
    seed: int = 0
    prompt_seed: int | None = None  # of the prompts' tokens; None: seed. Prompts nobody cached, lengths as before
    ignore_eos: bool = True
    temperature: float = 0.0
    num_warmups: int = 0
    timeout_s: float | None = None


def timed_shapes(settings: Settings) -> list[tuple[workload.Shape, float]]:
    """What to send and when. Lengths and arrivals draw from generators of their own: a new rate keeps the lengths."""
    _check(settings)
    shapes = _shapes(settings)
    if settings.trace_timestamps:
        return list(zip(shapes, workload.at_speed(shapes, settings.trace_speedup), strict=True))
    rng = np.random.default_rng([settings.seed, 1])
    times_s = workload.arrivals_s(len(shapes), settings.request_rate, settings.burstiness, rng)
    return list(zip(shapes, times_s, strict=True))


def _check(settings: Settings) -> None:
    if settings.num_prompts < 1:
        raise workload.WorkloadError(f"--num-prompts is {settings.num_prompts}; give 1 or more")
    if not 0 <= settings.seed < 2**62:
        raise workload.WorkloadError(f"--seed is {settings.seed}; give a whole number of 0 to 2**62 - 1")
    if settings.num_warmups < 0:
        raise workload.WorkloadError(f"--num-warmups is {settings.num_warmups}; give 0 or more")
    if settings.max_concurrency is not None and settings.max_concurrency < 1:
        raise workload.WorkloadError(f"--max-concurrency is {settings.max_concurrency}; give 1 or more, or leave it")
    if settings.timeout_s is not None and not settings.timeout_s > 0:
        raise workload.WorkloadError(f"--timeout is {settings.timeout_s:g}; give seconds above 0")
    if settings.trace is None and settings.trace_timestamps:
        raise workload.WorkloadError("--trace-timestamps needs --trace FILE, whose times it replays")


def _shapes(settings: Settings) -> list[workload.Shape]:
    if settings.trace is not None:
        shapes = workload.read_trace(settings.trace, settings.num_prompts)
        return _fitted(shapes, settings, settings.trace_scale)
    drawn = workload.random_shapes(
        settings.num_prompts,
        settings.random_input_len,
        settings.random_output_len,
        settings.random_range_ratio,
        settings.random_prefix_len,
        np.random.default_rng([settings.seed, 0]),
    )
    return _fitted(drawn, settings, 1.0)


def _fitted(shapes: list[workload.Shape], settings: Settings, scale: float) -> list[workload.Shape]:
    return workload.fit(
        shapes, scale=scale, max_input_len=settings.max_input_len, max_output_len=settings.max_output_len
    )


def plan_requests(
    settings: Settings, model: ServedModel, timed: list[tuple[workload.Shape, float]]
) -> tuple[list[Planned], list[Planned]]:
    """The requests, and the warm-ups: shapes of the first ones, prompts of their own, all due at once."""
    shapes = [shape for shape, _ in timed]
    workload.check_lengths(shapes, model.max_model_len)
    warm = [shapes[i % len(shapes)] for i in range(settings.num_warmups)]
    warm_times = [(shape, 0.0) for shape in warm]
    return _planned(settings, model, timed, 2), _planned(settings, model, warm_times, 3)


def _planned(
    settings: Settings, model: ServedModel, timed: list[tuple[workload.Shape, float]], stream: int
) -> list[Planned]:
    shapes = [shape for shape, _ in timed]
    rng = np.random.default_rng([settings.seed if settings.prompt_seed is None else settings.prompt_seed, stream])
    prefix_len = settings.random_prefix_len if settings.trace is None else 0
    prompts = workload.prompts(shapes, model.vocab_size, model.eos_token_ids, rng, prefix_len=prefix_len)
    return [
        Planned(
            request=build_request(
                prompt,
                {
                    "max_tokens": shape.output_len,
                    "temperature": settings.temperature,
                    "ignore_eos": settings.ignore_eos,
                    "seed": settings.seed + index,
                },
            ),
            at_s=at_s,
            input_len=shape.input_len,
        )
        for index, ((shape, at_s), prompt) in enumerate(zip(timed, prompts, strict=True))
    ]


async def run(
    endpoint: str,
    settings: Settings,
    *,
    secret: str = "",
    watch: Callable[[int], AbstractContextManager[Callable[[Outcome], None]]],
) -> tuple[ServedModel, list[Outcome], float]:
    """Play against a router; returns its model, the outcomes in order, and seconds from the start to the last end.

    `watch(number of requests)` is entered while they are played, after the warm-ups; what it yields is told each
    outcome. Raises WorkloadError, and KvrelayError if the router cannot be asked at all.
    """
    timed = timed_shapes(settings)
    async with AsyncClient(endpoint, secret=secret) as client:
        model = await client.model_info()
        plan, warmups = plan_requests(settings, model, timed)
        send = partial(play, client, max_concurrency=settings.max_concurrency, timeout_s=settings.timeout_s)
        await send(warmups)
        with watch(len(plan)) as on_end:
            outcomes, duration_s = await send(plan, on_end=on_end)
    return model, outcomes, duration_s
