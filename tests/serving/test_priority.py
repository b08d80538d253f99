"""A request's priority reaches the prefill worker, and who may ask for which."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from cluster.deploy.local import LocalCluster
from kvrelay.client.client import AsyncClient
from kvrelay.client.types import KvrelayError
from tests.serving.conftest import ModelDir
from tests.serving.harness import Gate, engine_with, router_with, until, worker_with

PROMPT = [11] * 40


async def test_a_request_of_a_lower_number_overtakes_those_that_wait(model_dir: ModelDir) -> None:
    async with LocalCluster(str(model_dir("llama")), engine=engine_with(), worker=worker_with()) as cluster:
        gate = Gate(cluster.prefill[0].engine)
        names = ("first", "urgent", "usual", "batch")

        async with AsyncClient(cluster.endpoint) as client:

            async def ask(name: str, priority: int) -> None:
                await client.generate(PROMPT, max_tokens=2, priority=priority, ignore_eos=True, request_id=name)

            def has_come(count: int) -> bool:
                return len(cluster.prefill[0].role.requests) == count

            asked = [asyncio.create_task(ask("first", 0))]
            await gate.reached()
            for count, (name, priority) in enumerate((("batch", 5), ("usual", 0), ("urgent", -1)), start=2):
                asked.append(asyncio.create_task(ask(name, priority)))
                await until(partial(has_come, count), "it has come")
            gate.open()
            await asyncio.gather(*asked)
        assert [name for each in gate.seen for name in names if name in each] == [*names]


async def test_a_named_client_may_go_later_and_not_before_others(model_dir: ModelDir) -> None:
    operator, chat = "o" * 32, "c" * 32
    router = router_with(auth=True, tokens=f"operator:{operator}\nchat:{chat}")
    async with LocalCluster(str(model_dir("llama")), engine=engine_with(), router=router) as cluster:
        async with AsyncClient(cluster.endpoint, token=chat) as client:
            with pytest.raises(KvrelayError, match="priority is -1; the token of 'chat' may give 0 or more") as refused:
                await client.generate(PROMPT, max_tokens=2, priority=-1)
            assert refused.value.code == "PERMISSION_DENIED"
            with pytest.raises(KvrelayError, match="may not say which workers serve a request") as refused:
                await client.generate(PROMPT, max_tokens=2, prefill_worker="prefill-0", decode_worker="decode-0")
            assert refused.value.code == "PERMISSION_DENIED"
            await client.generate(PROMPT, max_tokens=2, priority=7)
        async with AsyncClient(cluster.endpoint, token=operator) as client:
            await client.generate(PROMPT, max_tokens=2, priority=-1)
