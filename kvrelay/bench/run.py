"""A benchmark from its options to what became of each request: make the workload, warm up, play.

Nothing is printed and nothing is judged here: see kvrelay.bench.metrics and kvrelay.bench.report. One seed always makes
the same requests at the same times; lengths, arrivals and prompts draw from generators of their own, so that another
rate keeps the lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import numpy as np

from kvrelay.bench.load import Planned, play
from kvrelay.bench.metrics import Outcome
from kvrelay.bench.openai import OpenAIBackend, OpenAITarget
from kvrelay.bench.options import PlayOptions, WorkloadOptions
from kvrelay.bench.workload import Shape, WorkloadError, check_lengths, prompts, timed_shapes
from kvrelay.client.access import FOUND, Access
from kvrelay.client.client import AsyncClient
from kvrelay.client.messages import build_request
from kvrelay.client.types import ServedModel

AS_IT_COMES = PlayOptions()
TimedShapes = list[tuple[Shape, float]]


def connected(target: str | OpenAITarget, access: Access) -> AsyncClient | OpenAIBackend:
    """To be entered."""
    if isinstance(target, OpenAITarget):
        return OpenAIBackend(target)
    return AsyncClient(target, token=access.token, tls=access.tls)


def check(playing: PlayOptions) -> None:
    """Raises WorkloadError."""
    if playing.num_warmups < 0:
        raise WorkloadError(f"--num-warmups is {playing.num_warmups}; give 0 or more")
    if playing.max_concurrency is not None and playing.max_concurrency < 1:
        raise WorkloadError(f"--max-concurrency is {playing.max_concurrency}; give 1 or more, or leave it")
    if playing.timeout_s is not None and not playing.timeout_s > 0:
        raise WorkloadError(f"--timeout is {playing.timeout_s:g}; give seconds above 0")


def _warmups(timed: TimedShapes, count: int) -> TimedShapes:
    """Shapes of the first ones, all due at once."""
    return [(timed[i % len(timed)][0], 0.0) for i in range(count)]


def _planned(
    options: WorkloadOptions, playing: PlayOptions, model: ServedModel, timed: TimedShapes, stream: int
) -> list[Planned]:
    """Requests with prompts of their own for each `stream`."""
    shapes = [shape for shape, _ in timed]
    rng = np.random.default_rng([options.seed if playing.prompt_seed is None else playing.prompt_seed, stream])
    prefix_len = options.random_prefix_len if options.trace is None else 0
    drawn = prompts(shapes, model.vocab_size, model.eos_token_ids, rng, prefix_len=prefix_len)
    return [
        Planned(
            request=build_request(
                prompt,
                {
                    "max_tokens": shape.output_len,
                    "temperature": playing.temperature,
                    "ignore_eos": playing.ignore_eos,
                    "seed": options.seed + index,
                    "priority": shape.priority,
                },
            ),
            at_s=at_s,
            input_len=shape.input_len,
        )
        for index, ((shape, at_s), prompt) in enumerate(zip(timed, drawn, strict=True))
    ]


def drawn(
    options: WorkloadOptions, playing: PlayOptions, model: ServedModel, timed: TimedShapes
) -> tuple[list[Planned], list[Planned]]:
    """The warm-ups, and the requests, which have other prompts."""
    first = _warmups(timed, playing.num_warmups)
    return _planned(options, playing, model, first, 3), _planned(options, playing, model, timed, 2)


async def run(
    target: str | OpenAITarget,
    options: WorkloadOptions,
    playing: PlayOptions = AS_IT_COMES,
    *,
    access: Access = FOUND,
    watch: Callable[[int], AbstractContextManager[Callable[[Outcome], None]]],
) -> tuple[ServedModel, list[Outcome], float]:
    """Play against a router at an endpoint, or another server; returns its model, the outcomes in order, and seconds
    from the start to the last end.

    `watch(number of requests)` is entered while they are played, after the warm-ups; what it yields is told each
    outcome. Raises WorkloadError, and KvrelayError if the router cannot be asked at all.
    """
    check(playing)
    timed = timed_shapes(options)
    async with connected(target, access) as client:
        model = await client.model_info()
        check_lengths([shape for shape, _ in timed], model.max_model_len)
        warmups, requests = drawn(options, playing, model, timed)
        send = partial(play, client, max_concurrency=playing.max_concurrency, timeout_s=playing.timeout_s)
        await send(warmups)
        with watch(len(requests)) as on_end:
            outcomes, duration_s = await send(requests, on_end=on_end)
    return model, outcomes, duration_s
