"""Several routers over the same workers: each has streams of its own, and what one loses is its own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cluster.deploy.local import LocalCluster
from kvrelay.client.client import AsyncClient
from kvrelay.client.types import KvrelayError
from tests.serving.conftest import ModelDir
from tests.serving.harness import ENGINE, ROUTER, WAIT_S, WORKER, Gate, random_prompt, transformers_tokens, until

NEW_TOKENS = 12
PROMPTS = [random_prompt(length, seed=length) for length in (20, 70, 33, 90)]


async def test_two_routers_serve_the_same_tokens_from_the_same_workers(model_dir: ModelDir) -> None:
    directory = model_dir("llama")
    expected = transformers_tokens(directory, PROMPTS, NEW_TOKENS)
    async with LocalCluster(str(directory), engine=ENGINE, worker=WORKER, router=ROUTER) as cluster:
        second = await cluster.add_router()
        clients = [AsyncClient(cluster.endpoint), AsyncClient(f"127.0.0.1:{second.port}")]
        answers = await asyncio.gather(
            *(
                clients[i % 2].generate(prompt, max_tokens=NEW_TOKENS, min_tokens=NEW_TOKENS, temperature=0.0)
                for i, prompt in enumerate(PROMPTS)
            )
        )
        assert [list(answer.token_ids) for answer in answers] == expected
        assert all(server.router.metrics.counts["finished"] == 2 for server in cluster.routers)
        await cluster.settled()
        cluster.check_invariants()
        for client in clients:
            await client.close()


async def test_a_lost_router_takes_only_its_own_requests_with_it(model_dir: ModelDir) -> None:
    directory = model_dir("llama")
    [expected] = transformers_tokens(directory, PROMPTS[:1], NEW_TOKENS)
    async with LocalCluster(str(directory), engine=ENGINE, worker=WORKER, router=ROUTER) as cluster:
        second = await cluster.add_router()
        kept, lost = AsyncClient(cluster.endpoint), AsyncClient(f"127.0.0.1:{second.port}")
        gate = Gate(cluster.decode[0].engine)
        ask: dict[str, Any] = {
            "max_tokens": NEW_TOKENS,
            "min_tokens": NEW_TOKENS,
            "temperature": 0.0,
            "timeout_s": WAIT_S,
        }
        goes_on = asyncio.create_task(kept.generate(PROMPTS[0], **ask))
        goes_down = asyncio.create_task(lost.generate(PROMPTS[1], **ask))
        decode = cluster.decode[0]
        await until(lambda: len(decode.role.policy.request_ids) == 2, "both requests are at the decode worker")
        await gate.reached()
        await second.stop()
        await until(lambda: decode.streams.link(second.router.router_id) is None, "the worker has seen it go")
        gate.open()
        assert list((await goes_on).token_ids) == expected
        with pytest.raises(KvrelayError) as error:
            await goes_down
        assert error.value.code == "UNAVAILABLE"
        await cluster.settled()
        cluster.check_invariants()
        await kept.close()
        await lost.close()
