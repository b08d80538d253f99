"""What each key is counted is what it was delivered: over gRPC and HTTP, two routers at one file, with stop strings,
several choices and clients that leave."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from cluster.deploy.local import LocalCluster
from cluster.front.server import RouterServer
from kvrelay.client.client import AsyncClient, Client
from kvrelay.client.types import GenerateOptions
from kvrelay.client.usage import NUMBERS, KeyUsage, grouped_by, of_all
from tests.serving.conftest import ModelDir
from tests.serving.harness import ENGINE, WAIT_S, WORKER, random_prompt, router_with

NAMES = ("reader", "leaver", "web", "operator")
TOKENS = {name: f"the-token-of-{name}-01" for name in NAMES}
REQUESTS = 300


class Load:
    """`delivered`: what clients have read, by key."""

    def __init__(self, routers: list[RouterServer]) -> None:
        self.delivered: dict[str, Counter[str]] = {name: Counter() for name in NAMES}
        at = [f"127.0.0.1:{router.port}" for router in routers]
        urls = [f"http://127.0.0.1:{router.http_port}/v1" for router in routers]
        self._readers = [AsyncClient(each, token=TOKENS["reader"]) for each in at]
        self._leavers = [AsyncClient(each, token=TOKENS["leaver"]) for each in at]
        self._webs = [AsyncOpenAI(base_url=url, api_key=TOKENS["web"]) for url in urls]
        self._rng = random.Random(11)
        self._room = asyncio.Semaphore(12)

    async def play(self) -> None:
        await asyncio.gather(*(self._one(i) for i in range(REQUESTS)))
        for client in (*self._readers, *self._leavers):
            await client.close()
        for web in self._webs:
            await web.close()

    async def _one(self, index: int) -> None:
        prompt = random_prompt(20 + index % 10, seed=index % 10)
        async with self._room:
            ask = (self._read, self._leave, self._over_http)[index % 3]
            await ask(index // 3 % 2, prompt, index)

    def _options(self, index: int) -> GenerateOptions:
        options = GenerateOptions(max_tokens=4 + index % 9, temperature=1.0, seed=index, n=1 + index % 2)
        return GenerateOptions(**options, stop=["e", "a"]) if index % 4 == 1 else options

    async def _read(self, router: int, prompt: list[int], index: int) -> None:
        answer = await self._readers[router].generate(prompt, timeout_s=WAIT_S, **self._options(index))
        assert answer.usage is not None
        self._note("reader", prompt, answer.usage.cached_tokens, sum(len(c.token_ids) for c in answer.choices))

    async def _leave(self, router: int, prompt: list[int], index: int) -> None:
        leave_at, read = self._rng.randrange(1, 12), 0
        stream = self._leavers[router].stream(prompt, timeout_s=WAIT_S, max_tokens=40, ignore_eos=True)
        async for delta in stream:
            read += len(delta.token_ids)
            if read >= leave_at:
                break
        await stream.aclose()
        self._note("leaver", prompt, 0, read)

    async def _over_http(self, router: int, prompt: list[int], index: int) -> None:
        options: Any = {**self._options(index), "model": "llama", "prompt": prompt}
        answer = await self._webs[router].completions.create(**options)
        assert answer.usage is not None
        details = answer.usage.prompt_tokens_details
        cached = (details.cached_tokens or 0) if details is not None else 0
        self._note("web", prompt, cached, answer.usage.completion_tokens)

    def _note(self, key: str, prompt: list[int], cached: int, generated: int) -> None:
        self.delivered[key].update(
            requests=1, prompt_tokens=len(prompt), cached_tokens=cached, generated_tokens=generated
        )


def told_by(routers: list[RouterServer], name: str) -> dict[str, KeyUsage]:
    clients = [Client(f"127.0.0.1:{router.port}", token=TOKENS[name]) for router in routers]
    told = [client.usage() for client in clients]
    assert len({usage.database for usage in told}) == 1
    for client in clients:
        client.close()
    return grouped_by(of_all(told), lambda used: used.key)


async def test_tokens_counted_are_tokens_delivered(model_dir: ModelDir, tmp_path: Path) -> None:
    tokens = "\n".join(f"{name}:{token}" for name, token in TOKENS.items())
    options = router_with(usage_db=tmp_path / "usage.db", auth=True, tokens=tokens, http_ports=(0,), model_name="llama")
    async with LocalCluster(str(model_dir("llama")), engine=ENGINE, worker=WORKER, router=options) as cluster:
        await cluster.add_router()
        load = Load(cluster.routers)
        await load.play()
        await cluster.settled()
        used = await asyncio.to_thread(told_by, cluster.routers, "operator")
        for key in ("reader", "web"):
            counted = {name: getattr(used[key], name) for name in load.delivered[key]}
            assert counted == dict(load.delivered[key]), key
        generated = sum(router.router.metrics.counts["generation_tokens"] for router in cluster.routers)
        read, left = load.delivered["leaver"], used["leaver"]
        assert (left.requests, left.prompt_tokens) == (read["requests"], read["prompt_tokens"])
        assert read["generated_tokens"] <= left.generated_tokens <= 40 * read["requests"]
        assert sum(each.generated_tokens for each in used.values()) <= generated
        assert [*await asyncio.to_thread(told_by, cluster.routers, "leaver")] == ["leaver"]
        assert all(getattr(used["reader"], name) > 0 for name in NUMBERS)
