"""Workers of several processes serve as one: pools of unequal degrees hand over whole pages, and the tokens are
transformers' own. A worker that loses one of its processes says so, for whoever keeps it to end it.
"""

from __future__ import annotations

import asyncio
import os
import signal

import psutil
import pytest

from cluster.deploy.local import LocalCluster
from engine.errors import EngineBroken
from kvrelay.client.client import AsyncClient
from tests.serving.conftest import ModelDir
from tests.serving.harness import (
    ROUTER,
    WAIT_S,
    counters,
    engine_with,
    random_prompt,
    transformers_tokens,
    until,
    worker_with,
)

PROMPT_LENS = (70, 5, 33, 16, 100)
NEW_TOKENS = 16
DEGREES = ((1, 2), (2, 1), (2, 4), (4, 2))  # of two KV heads
PAIRS = (("process_group", "tcp"), ("loopback", "shared_memory"), ("shared_memory", "tcp"), ("process_group",))


@pytest.mark.parametrize(
    ("model", "prefill", "decode", "transport"),
    [
        *(("llama", *degrees, transport) for degrees, pair in zip(DEGREES, PAIRS, strict=True) for transport in pair),
        ("qwen3_moe", 1, 2, "shared_memory"),  # of four experts
        ("deepseek_v3", 2, 1, "tcp"),
        ("qwen3_moe", 2, 4, "loopback"),
    ],
)
async def test_pools_of_unequal_degrees_give_transformers_tokens(
    model: str, prefill: int, decode: int, transport: str, model_dir: ModelDir
) -> None:
    prompts = [random_prompt(length, seed) for seed, length in enumerate(PROMPT_LENS)]
    wanted = transformers_tokens(model_dir(model), prompts, NEW_TOKENS)
    has_experts = model != "llama"
    local = LocalCluster(
        str(model_dir(model)),
        engine=engine_with(tensor_parallel=prefill, expert_parallel=has_experts and prefill > 1),
        decode_engine=engine_with(tensor_parallel=decode, expert_parallel=has_experts and decode > 1),
        worker=worker_with(max_batch_tokens=32, layers_per_group=1, transports=(transport,)),
        router=ROUTER,
    )
    async with local as cluster, AsyncClient(cluster.endpoint) as client:
        found = await asyncio.gather(
            *(client.generate(p, temperature=0.0, max_tokens=NEW_TOKENS, min_tokens=NEW_TOKENS) for p in prompts)
        )
        moved = counters(cluster)
        assert [list(completion.token_ids) for completion in found] == wanted
        assert moved["receipts_good"] == 2 * len(prompts)  # each side counts them
        assert moved["resends"] == moved["handoffs_failed"] == 0
        assert [each.receipt.transport for each in found if each.receipt is not None] == [transport] * len(prompts)
        await cluster.settled()
        cluster.check_invariants()
        if decode == 2:
            await _lose_a_process(cluster)
        elif decode == 1:
            await _stop_a_process(cluster, client)


async def _stop_a_process(cluster: LocalCluster, client: AsyncClient) -> None:
    """Of a prefill worker, which waits for it in a step, for as long as it takes to be sure."""
    [worker] = cluster.prefill
    waiting = asyncio.create_task(worker.wait_broken())
    [pid] = worker.engine.model.ranks.pids  # type: ignore[union-attr]
    os.kill(pid, signal.SIGSTOP)
    asking = asyncio.create_task(client.generate(random_prompt(20, 1), max_tokens=2, timeout_s=WAIT_S))
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(EngineBroken, match=rf"^rank 1 \(process {pid}\) is stopped$"):
            await waiting
    await until(lambda: not psutil.pid_exists(pid), "a stopped process is ended, too")
    asking.cancel()


async def _lose_a_process(cluster: LocalCluster) -> None:
    """Of a decode worker that stands idle: what keeps the worker is told, and would end it."""
    [worker] = cluster.decode
    waiting = asyncio.create_task(worker.wait_broken())
    pid, *_ = worker.engine.model.ranks.pids  # type: ignore[union-attr]
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(EngineBroken, match=rf"^rank 1 \(process {pid}\) was ended by signal 9$"):
            await waiting
