"""Workers of pipeline stages serve as one: pools of unequal stages hand over whole pages, and the tokens are
transformers' own, while pages run short, and while a stage is killed: another worker goes on, and nothing is left held.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster.deploy.local import LocalCluster
from engine.errors import EngineBroken
from kvrelay.client.client import AsyncClient
from tests.serving.conftest import ModelDir
from tests.serving.harness import (
    ROUTER,
    counters,
    engine_with,
    generate_all,
    random_prompt,
    replays,
    tokens_of,
    transformers_tokens,
    until,
    worker_with,
)
from worker.driver import Worker

PROMPT_LENS = (70, 5, 33, 16, 100, 47)
PROMPTS = [random_prompt(length, seed) for seed, length in enumerate(PROMPT_LENS)]
NEW_TOKENS = 24


def cluster_of(directory: Any, reads: dict[str, Any], writes: dict[str, Any], **changes: Any) -> LocalCluster:
    worker = worker_with(max_batch_tokens=32, layers_per_group=1, **changes.pop("worker", {}))
    engines: Any = {"engine": engine_with(**reads), "decode_engine": engine_with(**writes)}
    return LocalCluster(str(directory), **engines, worker=worker, router=ROUTER, **changes)


def most_begun(worker: Worker[Any]) -> list[int]:
    """Grows with the number of steps that are under way, each time that one is begun."""
    counts, under_way = [0], 0
    begin = worker.engine.begin

    class Watched:
        def __init__(self, pending: Any) -> None:
            self.pending = pending

        def result(self) -> Any:
            nonlocal under_way
            under_way -= 1
            return self.pending.result()

    def watched(step: Any) -> Any:
        nonlocal under_way
        pending = begin(step)
        under_way += 1
        counts.append(under_way)
        return Watched(pending)

    worker.engine.begin = watched  # type: ignore[method-assign]
    return counts


async def kept(worker: Worker[Any]) -> str:
    """What a process would do whose worker is broken; returns why it is."""
    with pytest.raises(EngineBroken) as caught:
        await worker.wait_broken()
    await worker.stop()
    return str(caught.value)


async def kill_a_stage(worker: Worker[Any]) -> None:
    """And wait until the worker has ended of it."""
    keeping = asyncio.create_task(kept(worker))
    pid = worker.engine.model.ranks.pids[0]  # type: ignore[union-attr]
    os.kill(pid, signal.SIGKILL)
    assert await keeping == f"stage 1 (process {pid}) was ended by signal 9"
    await until(lambda: not psutil.pid_exists(pid), "it is gone")


async def settled_without(cluster: LocalCluster, lost: Worker[Any]) -> None:
    """Nobody else holds a page for what it had."""
    await until(lambda: cluster.held_pages().keys() <= {lost.options.name}, "pages come back")
    for worker in cluster.workers:
        if worker is not lost:
            worker.check_invariants()


async def test_pools_of_two_and_of_three_stages(model_dir: ModelDir, tmp_path: Path) -> None:
    wanted = transformers_tokens(model_dir("llama"), PROMPTS, NEW_TOKENS)
    stages = {"pipeline_parallel": 2}, {"pipeline_parallel": 3}
    async with (
        cluster_of(model_dir("llama"), *stages, worker={"transports": ("tcp",), "record": str(tmp_path)}) as cluster,
        AsyncClient(cluster.endpoint) as client,
    ):
        read, decoded = most_begun(cluster.prefill[0]), most_begun(cluster.decode[0])
        assert tokens_of(await generate_all(client, PROMPTS, NEW_TOKENS)) == wanted
        moved = counters(cluster)
        assert moved["receipts_good"] == 2 * len(PROMPTS)  # each side counts them
        assert moved["resends"] == moved["handoffs_failed"] == 0
        assert (max(read), max(decoded)) == (2, 3), "each stage had a step of its own"
        await cluster.settled()
        cluster.check_invariants()
    replays(tmp_path / "prefill-0.jsonl", tmp_path / "decode-0.jsonl")


async def test_one_that_decodes_in_stages_with_few_pages_and_loses_one(model_dir: ModelDir) -> None:
    wanted = transformers_tokens(model_dir("llama"), PROMPTS, NEW_TOKENS)
    pools: Any = {}, {"pipeline_parallel": 2, "num_pages": 18}
    async with (
        cluster_of(model_dir("llama"), *pools, decode=2) as cluster,
        AsyncClient(cluster.endpoint) as client,
    ):
        assert tokens_of(await generate_all(client, PROMPTS * 2, NEW_TOKENS)) == wanted * 2
        assert counters(cluster)["preemptions"] > 0
        lost = cluster.decode[0]
        steps = lost.counters["steps"]
        asking = asyncio.create_task(generate_all(client, PROMPTS, NEW_TOKENS))
        await until(lambda: lost.counters["steps"] > steps + 4, "it decodes")
        await kill_a_stage(lost)
        assert tokens_of(await asking) == wanted
        await settled_without(cluster, lost)


async def test_one_that_reads_in_stages_and_loses_one(model_dir: ModelDir) -> None:
    wanted = transformers_tokens(model_dir("llama"), PROMPTS, NEW_TOKENS)
    pools: Any = {"pipeline_parallel": 2}, {}
    async with (
        cluster_of(model_dir("llama"), *pools, prefill=2, worker={"prefix_cache": False}) as cluster,
        AsyncClient(cluster.endpoint) as client,
    ):
        lost = cluster.prefill[0]
        asking = asyncio.create_task(generate_all(client, PROMPTS, NEW_TOKENS))
        await until(lambda: lost.counters["steps"] > 0, "it reads")
        await kill_a_stage(lost)
        assert tokens_of(await asking) == wanted
        await settled_without(cluster, lost)


async def test_one_that_does_both_in_stages(model_dir: ModelDir, tmp_path: Path) -> None:
    wanted = transformers_tokens(model_dir("llama"), PROMPTS, NEW_TOKENS)
    pools: Any = {"pipeline_parallel": 2}, {}
    async with (
        cluster_of(
            model_dir("llama"), *pools, prefill=0, decode=0, mixed=1, worker={"record": str(tmp_path)}
        ) as cluster,
        AsyncClient(cluster.endpoint) as client,
    ):
        begun = most_begun(cluster.workers[0])
        assert tokens_of(await generate_all(client, PROMPTS, NEW_TOKENS)) == wanted
        await cluster.settled()
        cluster.check_invariants()
        assert max(begun) == 2, "each stage had a step of its own"
    replays(tmp_path / "mixed-0.jsonl")
