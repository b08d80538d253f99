"""One policy, two clocks: what a live cluster decided, its policies decide again when they are told the same.

The live run has prefix hits, preemptions, a client that leaves and a worker that is lost. Replay must give every
decision of every policy again, exactly. Apart from that, a calm run's arrivals are simulated with step times as they
were recorded: where the choices depend on arrivals and not on a loaded machine's pauses, they must be the same.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cluster.deploy.local import LocalCluster
from kvrelay.client.client import AsyncClient
from placement.checks.replay import Recording, main, read_recording, replay
from tests.rerun import rerun
from tests.serving.conftest import ModelDir
from tests.serving.harness import WAIT_S, counters, engine_with, random_prompt, router_with, until, worker_with

pytestmark = pytest.mark.alone

SYSTEM = random_prompt(48, seed=0)  # three pages that many prompts begin with
REQUESTS = 30
NAMES = ("router-0", "prefill-0", "prefill-1", "decode-0", "decode-1")


async def _serve(client: AsyncClient, index: int, new_tokens: int) -> None:
    prompt = (SYSTEM if index % 3 else []) + random_prompt(10 + index * 7 % 60, seed=index)
    await client.generate(prompt, temperature=0.0, max_tokens=new_tokens, min_tokens=new_tokens, timeout_s=WAIT_S)


async def _leave(client: AsyncClient) -> None:
    """After the first tokens."""
    async with asyncio.timeout(WAIT_S):
        async with client.stream(random_prompt(40, seed=99), max_tokens=200, ignore_eos=True) as stream:
            async for _ in stream:
                break


async def _run(model: Path, folder: Path) -> Counter[str]:
    cluster = LocalCluster(
        str(model),
        prefill=2,
        decode=2,
        engine=engine_with(),
        decode_engine=engine_with(num_pages=32),
        worker=worker_with(record=str(folder), transports=("loopback",)),
        router=router_with(record=str(folder)),
    )
    async with cluster, AsyncClient(cluster.endpoint) as client:
        tasks = [asyncio.create_task(_leave(client))]
        for index in range(REQUESTS):
            tasks.append(asyncio.create_task(_serve(client, index, 40 + index * 5 % 40)))
            if index == REQUESTS // 2:
                await until(lambda: counters(cluster)["preemptions"] > 0, "pages ran short")
                await cluster.decode[1]._server.stop(0)
            await asyncio.sleep(0.01)
        await asyncio.gather(*tasks)
        return counters(cluster)


@pytest.fixture(scope="module")
def recordings(model_dir: ModelDir, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recording]:
    folder = tmp_path_factory.mktemp("recordings")
    total = asyncio.run(_run(model_dir("llama"), folder))
    assert min(total[name] for name in ("preemptions", "prefix_hit_tokens", "cancelled", "router_workers_lost")) > 0
    assert total["router_finished"] == REQUESTS
    assert main([str(folder / f"{name}.jsonl") for name in NAMES]) == 0
    return {name: read_recording(folder / f"{name}.jsonl") for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_replay_gives_every_live_decision_again(recordings: dict[str, Recording], name: str) -> None:
    recording = recordings[name]
    replayed = replay(recording)
    assert replayed.difference is None, str(replayed.difference)
    assert replayed.calls == len(recording.calls)
    assert replayed.decisions > REQUESTS // 4


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("router-0", {"overcommit": 0.9}),
        ("router-0", {"max_backlog_tokens": 20}),
        ("prefill-0", {"max_batch_tokens": 32}),
        ("decode-0", {"watermark": 0.5}),
        ("decode-0", {"max_batch_size": 1}),
    ],
)
def test_a_policy_with_another_option_decides_otherwise(
    recordings: dict[str, Recording], name: str, changed: dict[str, float]
) -> None:
    difference = replay(recordings[name], **changed).difference
    assert difference is not None
    assert difference.replayed != difference.call.result
    assert f"call {difference.at}, {difference.call.method}(" in str(difference)


CHOICES_TOLERANCE = 0.25  # of the requests may get another worker: this machine's pauses are not simulated
WAVES = 8
NEW_TOKENS = 10
GAP_S = 0.25  # so that a simulated wave, too, has ended before the next one comes


async def _run_calmly(model: Path, folder: Path, pools: dict[str, Any]) -> None:
    """Waves of three prompts at once, each after the last one's end."""
    cluster = LocalCluster(
        str(model),
        **pools,
        engine=engine_with(),
        worker=worker_with(record=str(folder), transports=("loopback",)),
        router=router_with(record=str(folder)),
    )
    async with cluster, AsyncClient(cluster.endpoint) as client:
        for wave in range(WAVES):
            await asyncio.gather(*(_serve(client, 3 * wave + index, NEW_TOKENS) for index in range(3)))
            await cluster.settled()
            await asyncio.sleep(GAP_S)


@pytest.mark.parametrize("pools", [{"prefill": 2, "decode": 2}, {"prefill": 0, "decode": 0, "mixed": 2}])
def test_the_same_arrivals_simulated_go_to_the_same_workers(
    pools: dict[str, Any], model_dir: ModelDir, tmp_path: Path
) -> None:
    asyncio.run(_run_calmly(model_dir("llama"), tmp_path, pools))
    names = [f"{role}-{i}" for role, count in pools.items() for i in range(count)]
    router, *workers = (read_recording(tmp_path / f"{name}.jsonl") for name in ("router-0", *names))
    found = rerun(router, workers)
    assert len(found.live) == len(found.simulated) == 3 * WAVES
    used = {name for course in found.simulated for name in (course.prefill, course.decode)}
    assert used == set(names)
    for role in ("prefill", "decode"):
        assert found.same(role) >= 1 - CHOICES_TOLERANCE, found
    for what in ("ttft_s", "e2e_s"):  # how near they are is for a quiet machine to say
        assert found.ratio(what) > 0
