"""A soak: many requests of many kinds and fates at once, each held to tokens that are known beforehand.

A Template is a prompt with options, asked alone on an idle cluster first; so every token of every later stream is
known, also of one that is cut off. A Fate is what happens to one request. All but the timing follows from one seed.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from cluster.deploy.local import LocalCluster
from engine.types import FinishReason
from kvrelay.client.client import AsyncClient
from kvrelay.client.types import Choice, Completion, GenerateOptions, KvrelayError
from tests.serving.harness import random_prompt

PROMPT_LENS = (1, 2, 15, 16, 17, 30, 47, 48, 49, 64, 90, 120, 150)  # tokens
SHARED_PREFIX = random_prompt(64, seed=999)
TIMEOUT_S = 120.0  # of requests that have no deadline of their own: a test that hangs says who
MAX_TRIES = 50
RETRY_S = 0.05

Fate = Literal["end", "cancel", "cancel at once", "deadline", "duplicate", "invalid"]
FATES: dict[Fate, int] = {"end": 60, "cancel": 14, "cancel at once": 8, "deadline": 8, "duplicate": 4, "invalid": 6}
INVALID = (
    GenerateOptions(top_p=2.0),
    GenerateOptions(max_tokens=0),
    GenerateOptions(temperature=float("nan")),
    GenerateOptions(n=65),
    GenerateOptions(stop_token_ids=[100_000]),
    GenerateOptions(model="another"),
)


@dataclass(frozen=True, slots=True)
class Template:
    prompt: list[int]
    options: GenerateOptions
    choices: tuple[Choice, ...] = ()


def draw_template(rng: random.Random) -> Template:
    prompt = random_prompt(rng.choice(PROMPT_LENS), seed=rng.randrange(1000))
    if rng.random() < 0.3:
        prompt = SHARED_PREFIX + prompt[:40]
    options = GenerateOptions(
        max_tokens=1 if rng.random() < 0.1 else rng.randrange(2, 40),
        temperature=rng.choice((0.0, 0.7, 1.2)),
        seed=rng.randrange(1 << 40),
        n=rng.choice((1, 1, 1, 1, 2, 3)),
    )
    if rng.random() < 0.3:
        options["top_p"] = 0.9
    if rng.random() < 0.2:
        options["repetition_penalty"] = 1.1
        options["presence_penalty"] = 0.5
    if rng.random() < 0.2:
        options["logprobs"] = 2
    return Template(prompt, options)


async def learn(client: AsyncClient, rng: random.Random, count: int) -> list[Template]:
    """Templates with the answers they get one after another on an idle cluster; some with a stop string in them."""
    templates = []
    for _ in range(count):
        template = draw_template(rng)
        answer = await client.generate(template.prompt, timeout_s=TIMEOUT_S, **template.options)
        text = answer.text
        if len(text) > 8 and rng.random() < 0.4:
            at = rng.randrange(len(text) - 4)
            template.options["stop"] = [text[at : at + 3], "never to be seen"]
            answer = await client.generate(template.prompt, timeout_s=TIMEOUT_S, **template.options)
        templates.append(replace(template, choices=answer.choices))
    return templates


class Soak:
    def __init__(self, cluster: LocalCluster, templates: Sequence[Template], seed: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._cluster = cluster
        self._templates = templates
        self._seed = seed

    async def run(self, client: AsyncClient, num_requests: int, concurrency: int) -> None:
        """All of them, at most `concurrency` at once."""
        numbers = iter(range(num_requests))

        async def worker() -> None:
            for number in numbers:
                await self._request(client, number)

        await asyncio.gather(*(worker() for _ in range(concurrency)))

    async def _request(self, client: AsyncClient, number: int) -> None:
        """One request; it comes again, as it was, while the queues are full."""
        for _ in range(MAX_TRIES):
            rng = random.Random(self._seed * 1_000_003 + number)
            template = rng.choice(self._templates)
            fate = rng.choices(list(FATES), weights=list(FATES.values()))[0]
            try:
                outcome = await self._meet(client, rng, template, fate, number)
            except KvrelayError as error:
                outcome = error.code
                self._judge_error(fate, error, number)
            self.outcomes[outcome] += 1
            if outcome != "RESOURCE_EXHAUSTED":
                return
            await asyncio.sleep(RETRY_S)

    async def _meet(self, client: AsyncClient, rng: random.Random, template: Template, fate: Fate, number: int) -> str:
        match fate:
            case "end":
                return self._judge(await self._whole(client, rng, template), template, number)
            case "duplicate":
                return await self._twice(client, template, number)
            case "deadline":
                timeout_s = rng.choice((0.001, 0.01, 0.05, 0.2))
                return self._judge(
                    await client.generate(template.prompt, timeout_s=timeout_s, **template.options), template, number
                )
            case "invalid":
                options = GenerateOptions(**{**template.options, **rng.choice(INVALID)})
                await client.generate(template.prompt, timeout_s=TIMEOUT_S, **options)
                return "answered"
            case "cancel at once":
                stream = client.stream(template.prompt, timeout_s=TIMEOUT_S, **template.options)
                await asyncio.sleep(rng.choice((0.0, 0.0, 0.002, 0.01, 0.05)))
                await stream.aclose()
                return "closed"
            case "cancel":
                return await self._cut(client, rng, template, number)

    async def _whole(self, client: AsyncClient, rng: random.Random, template: Template) -> Completion:
        if rng.random() < 0.5:
            return await client.generate(template.prompt, timeout_s=TIMEOUT_S, **template.options)
        stream = client.stream(template.prompt, timeout_s=TIMEOUT_S, **template.options)
        async for _ in stream:
            pass
        return stream.completion()

    async def _cut(self, client: AsyncClient, rng: random.Random, template: Template, number: int) -> str:
        """Close the stream after some messages: what has come must begin what would have come."""
        stream = client.stream(template.prompt, timeout_s=TIMEOUT_S, **template.options)
        messages_left = rng.randrange(1, 25)
        async for _ in stream:
            messages_left -= 1
            if not messages_left:
                break
        await stream.aclose()
        for choice in stream.completion().choices:
            whole = template.choices[choice.index].token_ids
            if whole[: len(choice.token_ids)] != choice.token_ids:
                self.wrong.append(f"request {number}, cut off: {choice.token_ids} of {whole}")
        return "closed"

    async def _twice(self, client: AsyncClient, template: Template, number: int) -> str:
        """Two calls with one id at once: one is served, the other refused, unless the first had ended."""
        name = f"twice-{self._seed}-{number}"
        options: Any = template.options
        calls = [client.generate(template.prompt, timeout_s=TIMEOUT_S, request_id=name, **options) for _ in range(2)]
        served = 0
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(answer, Completion):
                self._judge(answer, template, number)
                served += 1
            elif isinstance(answer, KvrelayError) and answer.code in ("ALREADY_EXISTS", "RESOURCE_EXHAUSTED"):
                self.outcomes["second " + answer.code] += 1
            else:
                raise answer
        return f"twice: {served} served"

    def _judge(self, answer: Completion, template: Template, number: int) -> str:
        got = [(c.token_ids, c.text, c.finish_reason, c.stop_string) for c in answer.choices]
        wanted = [(c.token_ids, c.text, c.finish_reason, c.stop_string) for c in template.choices]
        if got != wanted:
            self.wrong.append(f"request {number}: {got} instead of {wanted}")
        if any(choice.finish_reason in (None, FinishReason.ABORT) for choice in answer.choices):
            self.wrong.append(f"request {number} did not end: {got}")
        return "answered"

    def _judge_error(self, fate: Fate, error: KvrelayError, number: int) -> None:
        allowed = {"RESOURCE_EXHAUSTED"}
        if error.code == "RESOURCE_EXHAUSTED" and not error.retry_after_s:
            self.wrong.append(f"request {number} ({fate}) was not told when to come again: {error}")
        if fate == "deadline":
            allowed.add("DEADLINE_EXCEEDED")
        if fate == "invalid":
            allowed |= {"INVALID_ARGUMENT", "NOT_FOUND"}
        if error.code not in allowed:
            self.wrong.append(f"request {number} ({fate}): {error}")
