"""Probes ask a running cluster single questions by its ordinary API: how long a prefill step, a decode step, a handoff.

Each sends a few requests and reads when tokens came and what the server's timelines say. They neither repeat nor judge:
kvrelay/calibrate/measuring.py does. Prompts are random tokens that no prefix cache has, unless a probe says
otherwise.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvrelay.bench.load import Planned, play
from kvrelay.bench.metrics import Outcome
from kvrelay.client.client import AsyncClient
from kvrelay.client.messages import build_request
from kvrelay.client.types import KvrelayError, ServedModel

WAIT_S = 120.0  # for any one probe
LEAST_STEPS = 6  # in a window, or it says nothing
LAST = 1_000_000  # a priority behind everybody's
AT_ONCE_MS = 0.001  # a TPOT target for which a busy router keeps no token: a step is timed by when its tokens come


class ProbeError(Exception):
    """The cluster answered in a way that nothing can be read from: one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSample:
    """`seconds`: from the first chunk's begin to the sampled token."""

    worker: str
    prompt_len: int
    cached: int
    seconds: float
    queue_s: float
    route_s: float
    answer_s: float  # from the sampled token to the router's sending it on
    outside_s: float  # of what the client waited for the first token, not in the server's account
    first_token_s: float  # when, on the client's clock


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffSample:
    tokens: int
    bytes: int
    pages: int
    seconds: float
    exposed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSample:
    """The mean step while all of the batch ran; `context_tokens` in the window's middle."""

    batch_size: int
    context_tokens: int
    seconds: float
    steps: int
    begun_s: float
    ended_s: float


class Prober:
    def __init__(self, client: AsyncClient, model: ServedModel, seed: int, prompt_tokens: int = 2) -> None:
        """`prompt_tokens`: that a prompt makes which is asked for its own sake; 2: one here and one at the worker that
        decodes, so that it is handed over; 1: its worker decodes nothing of it beside the next one."""
        self._client = client
        self._prompt_tokens = prompt_tokens
        self.model = model
        self._rng = np.random.default_rng(seed)
        self._zero_s = time.perf_counter()
        ends = set(model.eos_token_ids)
        self._ids = np.array([i for i in range(model.vocab_size) if i not in ends], dtype=np.int64)

    def prompt(self, length: int) -> list[int]:
        return self._rng.choice(self._ids, size=length).tolist()  # type: ignore[no-any-return]

    async def send(self, requests: Sequence[tuple[Sequence[int], int]]) -> list[Outcome]:
        """All at once: (prompt, tokens to make). All probes have one clock. Raises KvrelayError if one fails."""
        plan = [self._planned(prompt, num_tokens, slo_tpot_ms=AT_ONCE_MS) for prompt, num_tokens in requests]
        begun_s = time.perf_counter() - self._zero_s
        outcomes, _ = await play(self._client, plan, timeout_s=WAIT_S)
        for outcome in outcomes:
            outcome.due_s += begun_s
            outcome.token_times_s = [at + begun_s for at in outcome.token_times_s]
        return [_good(outcome) for outcome in outcomes]

    async def through(self, pair: tuple[str, str], prompt: Sequence[int], steps: int, wait_s: float) -> Outcome:
        """One request, read and written by these two workers, behind all others. Raises KvrelayError."""
        prefill, decode = pair
        named: dict[str, str | float] = {"prefill_worker": prefill, "decode_worker": decode, "priority": LAST}
        outcomes, _ = await play(self._client, [self._planned(prompt, steps + 2, **named)], timeout_s=wait_s)
        return _good(outcomes[0])

    def _planned(self, prompt: Sequence[int], num_tokens: int, **more: str | float) -> Planned:
        options = {
            **more,
            "model": self.model.name,
            "max_tokens": num_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "seed": 0,
        }
        return Planned(request=build_request(prompt, options), at_s=0.0, input_len=len(prompt))  # type: ignore[arg-type]

    async def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[list[PrefillSample], list[HandoffSample]]:
        """Prompts sent at once."""
        outcomes = await self.send([(prompt, self._prompt_tokens) for prompt in prompts])
        return [_prefill_sample(outcome) for outcome in outcomes], _handoffs(outcomes)

    async def remember(self, prompts: Sequence[Sequence[int]]) -> None:
        """Compute prompts so that the prefill worker has them cached, where it caches."""
        await self.send([(prompt, 1) for prompt in prompts])

    async def decode(self, prompts: Sequence[Sequence[int]], steps: int) -> list[DecodeSample]:
        """Decode `prompts` together: one for each decode worker that had all of its share running for long enough."""
        return _decode_samples(await self.send([(prompt, steps + 2) for prompt in prompts]))

    async def decode_beside_prefill(
        self, prompts: Sequence[Sequence[int]], steps: int, prompt_len: int, feeders: int
    ) -> tuple[list[DecodeSample], list[PrefillSample]]:
        """The same while `feeders` keep prefill busy with prompts of `prompt_len`; and what prefill took meanwhile."""
        running = asyncio.ensure_future(self.send([(prompt, steps + 2) for prompt in prompts]))
        feeding = [asyncio.ensure_future(self._feed(running, prompt_len)) for _ in range(feeders)]
        try:
            samples = _decode_samples(await running)
            fed = [sample for each in await asyncio.gather(*feeding) for sample in each]
        finally:
            for task in (running, *feeding):
                task.cancel()
        begun_s = max((sample.begun_s for sample in samples), default=0.0)
        ended_s = min((sample.ended_s for sample in samples), default=0.0)
        return samples, [
            sample
            for sample in fed
            if begun_s <= sample.first_token_s - sample.seconds <= sample.first_token_s <= ended_s
        ]

    async def _feed(self, until: asyncio.Future[list[Outcome]], prompt_len: int) -> list[PrefillSample]:
        samples: list[PrefillSample] = []
        while not until.done():
            samples += (await self.prefill([self.prompt(prompt_len)]))[0]
        return samples


def failure_of(outcome: Outcome, wait_s: float) -> KvrelayError:
    """Nobody gave the deadline that it may have missed."""
    if outcome.code != "DEADLINE_EXCEEDED":
        return KvrelayError(outcome.code, outcome.message)
    why = (
        f"an answer to {outcome.input_len} prompt tokens took more than {wait_s:g} s: the workers are slow, or others "
        "ask them, too; calibrate when nobody does, or give the cluster a smaller max_model_len"
    )
    return KvrelayError(outcome.code, why)


def _good(outcome: Outcome) -> Outcome:
    if not outcome.succeeded:
        raise failure_of(outcome, WAIT_S)
    if outcome.timeline is None or outcome.usage is None:
        raise ProbeError("an answer came without its timeline; the server is no kvrelay router of this version")
    return outcome


def _prefill_sample(outcome: Outcome) -> PrefillSample:
    assert outcome.timeline is not None
    assert outcome.usage is not None
    phases = outcome.timeline.phases_s
    until_token_s = sum(phases.get(name, 0.0) for name in ("route", "prefill_queue", "prefill"))
    return PrefillSample(
        worker=outcome.timeline.prefill_worker,
        prompt_len=outcome.usage.prompt_tokens,
        cached=outcome.usage.cached_tokens,
        seconds=phases.get("prefill", 0.0),
        queue_s=phases.get("prefill_queue", 0.0),
        route_s=phases.get("route", 0.0),
        answer_s=max(0.0, outcome.timeline.ttft_s - until_token_s),
        outside_s=outcome.ttft_s - outcome.timeline.ttft_s,
        first_token_s=outcome.token_times_s[0],
    )


def _handoffs(outcomes: Sequence[Outcome]) -> list[HandoffSample]:
    return [
        HandoffSample(
            tokens=outcome.usage.prompt_tokens,
            bytes=outcome.receipt.bytes,
            pages=outcome.receipt.pages,
            seconds=outcome.receipt.transfer_s,
            exposed_s=outcome.receipt.exposed_s,
        )
        for outcome in outcomes
        if outcome.receipt is not None and outcome.usage is not None and outcome.receipt.bytes
    ]


def _decode_samples(outcomes: Sequence[Outcome]) -> list[DecodeSample]:
    by_worker: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        assert outcome.timeline is not None
        by_worker.setdefault(outcome.timeline.decode_worker, []).append(outcome)
    samples = [_decode_sample(group) for group in by_worker.values()]
    return [sample for sample in samples if sample is not None]


def _decode_sample(outcomes: Sequence[Outcome]) -> DecodeSample | None:
    """Between the last first token of the decode worker and the first end, by the client's clock. One message may have
    brought several tokens: then nothing tells their steps apart."""
    begun_s = max((outcome.token_times_s[1] for outcome in outcomes if len(outcome.token_times_s) > 1), default=0.0)
    ended_s = min(outcome.token_times_s[-1] for outcome in outcomes)
    inside = [[at for at in outcome.token_times_s if begun_s <= at <= ended_s] for outcome in outcomes]
    steps = min(len(times) for times in inside) - 1
    if steps < LEAST_STEPS:
        return None
    middle_s = (begun_s + ended_s) / 2
    made = [sum(at <= middle_s for at in outcome.token_times_s) for outcome in outcomes]
    context = sum(outcome.input_len + count for outcome, count in zip(outcomes, made, strict=True))
    return DecodeSample(
        batch_size=len(outcomes),
        context_tokens=context,
        seconds=statistics.median((times[-1] - times[0]) / (len(times) - 1) for times in inside),
        steps=steps,
        begun_s=begun_s,
        ended_s=ended_s,
    )
