"""KV in int8 through the whole cluster: less exact than the model's own, the same tokens wherever a request runs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import pytest_asyncio

from cluster.deploy.local import LocalCluster
from kvrelay.client.client import AsyncClient
from tests.serving.conftest import ModelDir
from tests.serving.harness import (
    ROUTER,
    Gate,
    counters,
    engine_with,
    generate_all,
    leave,
    random_prompt,
    tokens_of,
    worker_with,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

NEW_TOKENS = 40
PROMPTS = [random_prompt(length, seed=length) for length in (70, 33, 16, 5, 90, 64)]
TRANSPORTS = ("loopback", "shared_memory", "process_group", "tcp")


def cluster_of(model: Any, *, decode_pages: int = 96, **more: Any) -> LocalCluster:
    changes = more.pop("worker_changes", {})
    return LocalCluster(
        str(model),
        engine=engine_with(kv_dtype="int8"),
        decode_engine=engine_with(kv_dtype="int8", num_pages=decode_pages),
        worker=worker_with(max_batch_tokens=40, **changes),
        router=ROUTER,
        **more,
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def wanted(model_dir: ModelDir) -> list[list[int]]:
    """Of one worker, with nothing handed over."""
    async with (
        cluster_of(model_dir("llama"), prefill=0, decode=0, mixed=1) as cluster,
        AsyncClient(cluster.endpoint) as client,
    ):
        return tokens_of(await generate_all(client, PROMPTS, NEW_TOKENS))


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_it_is_handed_over(transport: str, model_dir: ModelDir, wanted: list[list[int]]) -> None:
    changes = {"transports": (transport,)}
    async with (
        cluster_of(model_dir("llama"), decode_pages=22, worker_changes=changes) as cluster,
        AsyncClient(cluster.endpoint) as client,
    ):
        answers = await generate_all(client, PROMPTS, NEW_TOKENS)
        again = await generate_all(client, PROMPTS, NEW_TOKENS)  # from what is cached
        await cluster.settled()
        cluster.check_invariants()
        assert cluster.decode[0].engine.layout.page_bytes() == 3 * 2 * 16 * 2 * (16 + 4)
    assert tokens_of(answers) == tokens_of(again) == wanted
    assert {each.receipt.transport for each in answers if each.receipt and each.receipt.pages} == {transport}


async def test_it_moves(model_dir: ModelDir, wanted: list[list[int]]) -> None:
    async with cluster_of(model_dir("llama"), decode=2) as cluster, AsyncClient(cluster.endpoint) as client:
        first = cluster.decode[0]
        gate = Gate(first.engine, at=6)
        running = asyncio.create_task(generate_all(client, PROMPTS, NEW_TOKENS))
        await gate.reached()
        await leave(first, gate, drains=True)
        answers = await running
        await cluster.settled()
        cluster.check_invariants()
        assert counters(cluster)["moves_done"] > 0
    assert tokens_of(answers) == wanted
