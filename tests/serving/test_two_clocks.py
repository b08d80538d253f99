"""One policy, two clocks: what a live cluster decided, its policies decide again when they are told the same.

The live run has prefix hits, preemptions, a client that leaves and a worker that is lost. Replay must give every
decision of every policy again, exactly.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from cluster.local import LocalCluster
from kvrelay.client import AsyncClient
from placement.replay import Recording, main, read_recording, replay
from tests.serving.conftest import ModelDir
from tests.serving.harness import WAIT_S, counters, engine_with, random_prompt, router_with, until, worker_with

SYSTEM = random_prompt(48, seed=0)  # three pages that many prompts begin with
REQUESTS = 30
NAMES = ("router-0", "prefill-0", "prefill-1", "decode-0", "decode-1")


async def _serve(client: AsyncClient, index: int) -> None:
    prompt = (SYSTEM if index % 3 else []) + random_prompt(10 + index * 7 % 60, seed=index)
    new_tokens = 40 + index * 5 % 40
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
        router=router_with(record=str(folder), dead_after_s=2.0),
    )
    async with cluster, AsyncClient(cluster.endpoint) as client:
        tasks = [asyncio.create_task(_leave(client))]
        for index in range(REQUESTS):
            tasks.append(asyncio.create_task(_serve(client, index)))
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
