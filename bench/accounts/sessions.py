"""Clients of bench.accounts, who note what they have read. A session asks one request after another under one key, at
most PER_KEY of them, and goes on under another key after one that was disturbed; one whose client will leave has a key
to itself. So no key has more than one that was disturbed, its last, and what a router counted for the key beyond what
its client read is that request's alone.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import aiohttp
import grpc.aio

from bench.accounts.processes import Router
from kvrelay.v1 import generate_pb2
from tests.fakes import scripted_tokens

PER_KEY = 24
TIMEOUT_S = 120.0
REFUSING = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT)
Part = tuple[int, Sequence[int]]  # a choice, and tokens of it


class RefusedError(Exception):
    """Before anything was done."""


@dataclass
class Key:
    """What its client has read. `ended`: how the last request was disturbed; empty: none was."""

    name: str
    asked: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    ended: str = ""
    unread: int = 0  # most tokens that this one could have had besides
    unread_prompt: int = 0  # its prompt, if no token of it was read

    @property
    def token(self) -> str:
        return f"the-token-of-{self.name}"


@dataclass(frozen=True)
class Wanted:
    prompt: list[int]
    max_tokens: int
    n: int
    is_grpc: bool
    streams: bool
    leaves_at: int  # tokens; 0: its client reads all
    is_bad: bool
    router: int

    @classmethod
    def of(cls, number: int) -> Wanted:
        rng = random.Random(number)
        prompt = [rng.randrange(10, 990) for _ in range(rng.randint(4, 60))]
        streams, max_tokens = rng.random() < 0.75, rng.randint(1, 48)
        return cls(
            prompt=prompt,
            max_tokens=max_tokens,
            n=1 + (rng.random() < 0.2),
            is_grpc=rng.random() < 0.5,
            streams=streams,
            leaves_at=rng.randint(1, max_tokens) if streams and rng.random() < 0.04 else 0,
            is_bad=rng.random() < 0.02,
            router=rng.randrange(2),
        )

    @property
    def way(self) -> str:
        return "a stream" if self.streams else "one message"

    def message(self) -> generate_pb2.GenerateRequest:
        sampling = generate_pb2.SamplingParams(max_tokens=self.max_tokens, n=self.n, ignore_eos=True)
        sampling.temperature = -1.0 if self.is_bad else 1.0
        return generate_pb2.GenerateRequest(token_ids=generate_pb2.TokenIds(ids=self.prompt), sampling=sampling)

    def body(self) -> dict[str, Any]:
        asked = {"prompt": self.prompt, "max_tokens": self.max_tokens, "n": self.n, "ignore_eos": True}
        temperature = -1.0 if self.is_bad else 1.0
        return {**asked, "temperature": temperature, "return_token_ids": True, "stream": self.streams}


async def over_grpc(router: Router, wanted: Wanted, key: Key) -> AsyncGenerator[Part, None]:
    how: dict[str, Any] = {"metadata": (("authorization", f"Bearer {key.token}"),), "timeout": TIMEOUT_S}
    try:
        if not wanted.streams:
            for choice in (await router.stub.GenerateOnce(wanted.message(), **how)).choices:
                yield choice.index, choice.token_ids
            return
        call = router.stub.Generate(wanted.message(), **how)
        try:
            async for response in call:
                yield response.index, response.token_ids
        finally:
            call.cancel()
    except grpc.aio.AioRpcError as error:
        if error.code() in REFUSING:
            raise RefusedError(error.details()) from None
        raise


async def over_http(router: Router, wanted: Wanted, key: Key) -> AsyncGenerator[Part, None]:
    headers = {"Authorization": f"Bearer {key.token}"}
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with router.http.post("/v1/completions", json=wanted.body(), headers=headers, timeout=timeout) as answer:
        if answer.status in (400, 422, 429):
            raise RefusedError(await answer.text())
        answer.raise_for_status()
        if not wanted.streams:
            for choice in (await answer.json())["choices"]:
                yield choice["index"], choice["token_ids"]
            return
        async for line in answer.content:
            if line.startswith(b"data: [DONE]"):
                return
            if line.startswith(b"data: "):
                event = json.loads(line[len("data: ") :])
                if "error" in event:
                    raise aiohttp.ClientPayloadError(event["error"]["message"])
                for choice in event["choices"]:
                    yield choice["index"], choice["token_ids"]
        raise aiohttp.ClientPayloadError("it ended without [DONE]")


@dataclass
class Load:
    """`most`: requests. Of those refused the key has nothing."""

    routers: Sequence[Router]
    most: int
    keys: Iterator[Key]
    on_failure: Callable[[str], None]
    used: list[Key] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    begun: int = 0

    async def play(self, sessions: int) -> None:
        numbers = iter(count())
        await asyncio.gather(*(self._session(numbers) for _ in range(sessions)))

    async def _session(self, numbers: Iterator[int]) -> None:
        key = self._next_key()
        while (number := next(numbers)) < self.most:
            if key.ended or key.asked >= PER_KEY:
                key = self._next_key()
            wanted = Wanted.of(number)
            await self.routers[wanted.router].up.wait()
            self.begun += 1
            key.asked += 1
            await self._ask(wanted, self._next_key() if wanted.leaves_at else key)

    def _next_key(self) -> Key:
        self.used.append(next(self.keys))
        return self.used[-1]

    async def _ask(self, wanted: Wanted, key: Key) -> None:
        got: list[list[int]] = [[] for _ in range(wanted.n)]
        outcome = await self._read(wanted, key, got)
        self.outcomes[outcome] += 1
        if outcome == "refused":
            return
        read = sum(map(len, got))
        if read:
            key.requests += 1
            key.prompt_tokens += len(wanted.prompt)
            key.generated_tokens += read
        if outcome != "whole":
            key.ended, key.unread = f"{outcome}, {wanted.way}", wanted.max_tokens * wanted.n - read
            key.unread_prompt = 0 if read else len(wanted.prompt)
        self._check(wanted, got, is_whole=outcome == "whole")

    async def _read(self, wanted: Wanted, key: Key, got: list[list[int]]) -> str:
        router = self.routers[wanted.router]
        life, ask = router.life, over_grpc if wanted.is_grpc else over_http
        try:
            async with aclosing(ask(router, wanted, key)) as parts:
                async for choice, ids in parts:
                    got[choice] += ids
                    if 0 < wanted.leaves_at <= sum(map(len, got)):
                        return "left"
            return "whole"
        except RefusedError:
            return "refused"
        except (grpc.aio.AioRpcError, aiohttp.ClientError, OSError, TimeoutError) as error:
            if "do not send it again" in str(error):  # two of its workers were killed
                return "failed"
            if router.life == life and router.up.is_set():
                self.on_failure(f"{wanted.way}: {' '.join(str(error).split())}")
                return "failed"
            return "broken"

    def _check(self, wanted: Wanted, got: list[list[int]], *, is_whole: bool) -> None:
        due = scripted_tokens(wanted.prompt, wanted.max_tokens)
        for tokens in got:
            if tokens != (due if is_whole else due[: len(tokens)]):
                self.on_failure(f"{wanted.way}: its tokens are not those that were due")
