"""Workers whose stages are ranks each serve as one: whatever the degrees of two pools, whole pages go from one to the
other, and the tokens are transformers' own. Whichever process dies, and when, another worker goes on.
"""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from typing import Any

import psutil
import pytest

from cluster.deploy.local import LocalCluster
from cluster.spec.load import parse_spec
from cluster.spec.resolve import Machine, resolve, workers_of
from engine.engine import Engine
from engine.errors import EngineBroken
from engine.options import EngineOptions
from engine.parallel.processes import Processes
from kv_transfer.base import Segment
from kv_transfer.transports.faulty import Faults
from kvrelay.client.client import AsyncClient
from kvrelay.plan import cluster_file
from placement.catalogs.base import Degrees
from placement.plan import Candidate
from tests.kvrelay.plan.plan_fixture import apart, goodput
from tests.serving.conftest import ModelDir
from tests.serving.harness import (
    ROUTER,
    counters,
    engine_with,
    generate_all,
    tokens_of,
    transformers_tokens,
    until,
    worker_with,
)
from tests.serving.test_pipeline import NEW_TOKENS, PROMPTS, cluster_of, kept, settled_without
from worker.driver import Worker


def grid(stages: int, ranks: int) -> dict[str, int]:
    return {"pipeline_parallel": stages, "tensor_parallel": ranks}


@pytest.mark.parametrize(
    ("reads", "writes", "transport"),
    [
        (grid(2, 1), grid(1, 2), "tcp"),
        (grid(2, 2), grid(1, 1), "shared_memory"),
        (grid(1, 1), grid(2, 2), "process_group"),
    ],
)
async def test_pools_of_unequal_degrees_hand_over_to_each_other(
    reads: dict[str, int], writes: dict[str, int], transport: str, model_dir: ModelDir
) -> None:
    wanted = transformers_tokens(model_dir("llama"), PROMPTS, NEW_TOKENS)
    async with (
        cluster_of(model_dir("llama"), reads, writes, worker={"transports": (transport,)}) as cluster,
        AsyncClient(cluster.endpoint) as client,
    ):
        assert tokens_of(await generate_all(client, PROMPTS, NEW_TOKENS)) == wanted
        moved = counters(cluster)
        assert moved["receipts_good"] == 2 * len(PROMPTS)  # each side counts them
        assert moved["resends"] == moved["handoffs_failed"] == 0
        await cluster.settled()
        cluster.check_invariants()


async def test_what_a_planner_writes_is_served(model_dir: ModelDir) -> None:
    wanted = transformers_tokens(model_dir("llama"), PROMPTS, NEW_TOKENS)
    readers, writers = apart((1, 1), (1, 1)).pools
    chosen = Candidate(pools=(replace(readers, degrees=Degrees(2)), replace(writers, degrees=Degrees(2, 2))))
    written = cluster_file.spec_data(goodput(chosen, 9.0), str(model_dir("llama")), None, has_gpus=False)
    spec = resolve(parse_spec(written), Machine(cores=(0, 1), memory_bytes=4 << 30))
    small: dict[str, Any] = {"dtype": "float32", "kv_bytes": 8 << 20, "rank_cpus": (), "parity_check": False}
    reads, writes = (replace(EngineOptions(**plan.engine), **small) for plan in workers_of(spec))
    assert [(each.pipeline_parallel, each.tensor_parallel) for each in (reads, writes)] == [(1, 2), (2, 2)]
    local = LocalCluster(reads.model, engine=reads, decode_engine=writes, worker=worker_with(), router=ROUTER)
    async with local as cluster, AsyncClient(cluster.endpoint) as client:
        assert tokens_of(await generate_all(client, PROMPTS, NEW_TOKENS)) == wanted


def kill_one(worker: Worker[Any]) -> int:
    """The second rank of the first stage."""
    pid = worker.engine.model.ranks.pids[2]  # type: ignore[union-attr]
    os.kill(pid, signal.SIGKILL)
    return int(pid)


@pytest.mark.parametrize("when", ["it reads", "it hands over", "it decodes"])
async def test_a_rank_of_a_stage_that_is_killed_takes_its_worker_and_no_more(
    when: str, model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, grids = Engine.load, list[EngineOptions]()

    def load_one_in_a_grid(options: EngineOptions) -> Engine:
        """The other one of its pool is of one process: a machine has only so many cores."""
        if options.num_processes == 1 or grids:
            return load(replace(options, **grid(1, 1)))  # type: ignore[arg-type]
        grids.append(options)
        return load(options)

    monkeypatch.setattr(Engine, "load", load_one_in_a_grid)
    wanted = transformers_tokens(model_dir("llama"), PROMPTS, NEW_TOKENS)
    reads, writes = (grid(1, 1), grid(2, 2)) if when == "it decodes" else (grid(2, 2), grid(1, 1))
    counts, faults = {"decode": 2} if when == "it decodes" else {"prefill": 2}, Faults()
    async with (
        cluster_of(model_dir("llama"), reads, writes, faults=faults, **counts) as cluster,
        AsyncClient(cluster.endpoint) as client,
    ):
        [lost] = (worker for worker in cluster.workers if worker.engine.model.ranks is not None)
        keeping, pids = asyncio.create_task(kept(lost)), list[int]()

        def kill_in_the_middle(segment: Segment) -> None:
            if segment.layers.start and not pids:
                pids.append(kill_one(lost))

        faults.before_send = kill_in_the_middle if when == "it hands over" else None
        asking = asyncio.create_task(generate_all(client, PROMPTS, NEW_TOKENS))
        if when == "it hands over":
            await until(lambda: bool(pids), "one is killed")
        else:
            await until(lambda: lost.counters["steps"] > 3 * (when == "it decodes"), when)
            pids.append(kill_one(lost))
        [pid] = pids
        assert await keeping == f"rank 1 of stage 1 (process {pid}) was ended by signal 9"
        assert tokens_of(await asking) == wanted
        await until(lambda: not psutil.pid_exists(pid), "it is gone")
        await settled_without(cluster, lost)


async def test_one_that_is_killed_while_it_loads_is_told(model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Processes.wait_loaded
    pids: list[int] = []

    def kill_last(self: Processes, timeout_s: float) -> None:
        pids.extend(self.pids)
        os.kill(pids[-1], signal.SIGKILL)
        original(self, timeout_s)

    monkeypatch.setattr(Processes, "wait_loaded", kill_last)
    options = engine_with(model=str(model_dir("llama")), **grid(2, 2))
    with pytest.raises(EngineBroken, match=r"^rank 1 of stage 1 \(process \d+\) was ended by signal 9$"):
        await asyncio.to_thread(Engine.load, options)
    await until(lambda: not any(map(psutil.pid_exists, pids)), "all are waited for")
