"""Plays the same requests against one server or two, at one rate or several, in turns and rounds.

    rate 1: A B, B A, A B   rate 2: A B, ...     each round other prompts, for both the same

so that what drifts in the machine meets both alike. With `distinct_prompts` each server has prompts of its own (the
lengths, times and seeds stay the same): for two doors of one cluster, whose cache would know the second's. It plays and
judges nothing but whether targets were met, which a search for the knee goes by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from dataclasses import dataclass, field, replace

from kvrelay.bench.load import play
from kvrelay.bench.metrics import Outcome, meets
from kvrelay.bench.openai import OpenAIBackend, OpenAITarget
from kvrelay.bench.options import PlayOptions, WorkloadOptions
from kvrelay.bench.run import check, connected, drawn
from kvrelay.bench.series.knee import Met, next_rate
from kvrelay.bench.workload import WorkloadError, check_lengths, timed_shapes
from kvrelay.client.access import Access
from kvrelay.client.client import AsyncClient
from kvrelay.client.types import ServedModel

Target = str | OpenAITarget
Watch = Callable[[str, int], AbstractContextManager[Callable[[Outcome], None]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """What is played. `rates` empty: searched from the workload's own, or 1 a second."""

    targets: Mapping[str, Target]  # by name
    rates: Sequence[float]
    rounds: int
    slos_s: Mapping[str, float]
    wanted: float = 0.9  # share of requests that meets them
    distinct_prompts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    side: str
    rate: float
    round: int
    outcomes: Sequence[Outcome]
    duration_s: float


@dataclass(slots=True, kw_only=True)
class Played:
    models: dict[str, ServedModel] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)

    def curve(self, side: str, slos_s: Mapping[str, float]) -> dict[float, Met]:
        """Of all rounds together."""
        rates = {turn.rate for turn in self.turns if turn.side == side}
        return {rate: self._met(side, rate, slos_s) for rate in sorted(rates)}

    def _met(self, side: str, rate: float, slos_s: Mapping[str, float]) -> Met:
        outcomes = [each for t in self.turns if (t.side, t.rate) == (side, rate) for each in t.outcomes]
        return Met(within=sum(meets(each, slos_s) for each in outcomes), requests=len(outcomes))


async def play_series(
    series: Series, workload: WorkloadOptions, playing: PlayOptions, *, access: Access, watch: Watch
) -> Played:
    """`watch(what is played, number of requests)` is entered for each turn. Raises WorkloadError, and KvrelayError if a
    server cannot be asked at all."""
    check(playing)
    timed_shapes(workload)  # what is wrong with it is told before anybody is asked
    played = Played()
    async with AsyncExitStack() as stack:
        clients: dict[str, AsyncClient | OpenAIBackend] = {}
        for name, target in series.targets.items():
            clients[name] = await stack.enter_async_context(connected(target, access))
            played.models[name] = await clients[name].model_info()
        both = _common(list(played.models.values()))
        for index, rate in enumerate(_rates(series, workload, played)):
            for number in range(series.rounds):
                await _round(series, workload, playing, clients, both, rate, number, index, played, watch)
    return played


def _rates(series: Series, workload: WorkloadOptions, played: Played) -> Iterator[float]:
    yield from series.rates
    first = workload.request_rate if math.isfinite(workload.request_rate) else 1.0
    while not series.rates:
        curves = [played.curve(name, series.slos_s) for name in series.targets]
        if (rate := next_rate(curves, series.wanted, first)) is None:
            return
        yield rate


async def _round(
    series: Series,
    workload: WorkloadOptions,
    playing: PlayOptions,
    clients: Mapping[str, AsyncClient | OpenAIBackend],
    model: ServedModel,
    rate: float,
    number: int,
    index: int,
    played: Played,
    watch: Watch,
) -> None:
    timed = timed_shapes(replace(workload, request_rate=rate, seed=workload.seed + number))
    check_lengths([shape for shape, _ in timed], model.max_model_len)
    seed = workload.seed if playing.prompt_seed is None else playing.prompt_seed
    names = list(clients) if (number + index) % 2 == 0 else list(clients)[::-1]
    for name in names:
        own = list(clients).index(name) if series.distinct_prompts else 0
        prompts = replace(playing, prompt_seed=_nth(seed, index, number, own))
        warmups, requests = drawn(workload, prompts, model, timed)
        if index == number == 0:
            await play(clients[name], warmups, timeout_s=playing.timeout_s)
        with watch(f"{name}, {rate:g}/s, round {number + 1}", len(requests)) as on_end:
            outcomes, duration_s = await play(
                clients[name],
                requests,
                max_concurrency=playing.max_concurrency,
                timeout_s=playing.timeout_s,
                on_end=on_end,
            )
        played.turns.append(Turn(side=name, rate=rate, round=number, outcomes=outcomes, duration_s=duration_s))


def _nth(seed: int, *numbers: int) -> int:
    """Another seed for each."""
    for number in numbers:
        seed = (seed * 1_009 + number + 1) % 2**61
    return seed


def _common(models: Sequence[ServedModel]) -> ServedModel:
    """What all of them take, so that the same prompts can be sent to each."""
    return replace(
        models[0],
        vocab_size=min(model.vocab_size for model in models),
        max_model_len=min(model.max_model_len for model in models),
        eos_token_ids=tuple({token for model in models for token in model.eos_token_ids}),
    )


def parse_rates(text: str) -> list[float]:
    """`1,2,4` or `auto`, for which it is empty. Raises WorkloadError."""
    if text == "auto":
        return []
    try:
        rates = sorted({float(part) for part in text.split(",")})
    except ValueError:
        rates = [0.0]
    if not all(rate > 0 and math.isfinite(rate) for rate in rates):
        raise WorkloadError(f"--rates is {text!r}; give requests/s above 0 joined by commas, or auto")
    return rates
