"""Models that keep a state beside KV, whatever becomes of workers: the tokens are those of transformers' generate."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

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
    replays,
    tokens_of,
    transformers_tokens,
    worker_with,
)

NEW_TOKENS = 48
PROMPTS = [random_prompt(length, seed=length) for length in (70, 33, 16, 5, 47, 64)]


def cluster_of(model: Any, **more: Any) -> LocalCluster:
    worker = worker_with(max_batch_tokens=40, **more.pop("worker_changes", {}))
    return LocalCluster(str(model), engine=engine_with(), worker=worker, router=ROUTER, **more)


@pytest.fixture(scope="module")
def wanted(model_dir: ModelDir) -> list[list[int]]:
    return transformers_tokens(model_dir("qwen3_next"), PROMPTS, NEW_TOKENS)


@pytest.mark.parametrize("way", ["decode is lost", "prefill is lost", "decode drains"])
async def test_whatever_becomes_of_a_worker(way: str, model_dir: ModelDir, wanted: list[list[int]]) -> None:
    async with (
        cluster_of(model_dir("qwen3_next"), prefill=2, decode=2) as cluster,
        AsyncClient(cluster.endpoint) as client,
    ):
        first = cluster.prefill[0] if way == "prefill is lost" else cluster.decode[0]
        gate = Gate(first.engine, at=2 if way == "prefill is lost" else 10)
        running = asyncio.create_task(generate_all(client, PROMPTS, NEW_TOKENS))
        await gate.reached()
        await leave(first, gate, drains=way == "decode drains")
        answers = await running
        await cluster.settled()
        cluster.check_invariants()
    assert tokens_of(answers) == wanted
    timelines = [each.timeline for each in answers if each.timeline is not None]
    assert any(each.moves if way == "decode drains" else each.attempts > 1 for each in timelines)


async def test_who_prefills_and_decodes_in_one_place(
    model_dir: ModelDir, wanted: list[list[int]], tmp_path: Any
) -> None:
    changes = {"record": str(tmp_path)}
    async with (
        cluster_of(model_dir("qwen3_next"), prefill=0, decode=0, mixed=2, worker_changes=changes) as cluster,
        AsyncClient(cluster.endpoint) as client,
    ):
        answers = await generate_all(client, PROMPTS, NEW_TOKENS)
        await cluster.settled()
        cluster.check_invariants()
    assert tokens_of(answers) == wanted
    replays(*(tmp_path / f"{worker.options.name}.jsonl" for worker in cluster.workers))


@pytest.mark.parametrize("when", ["before it computes", "behind it"])
async def test_a_step_that_fails_is_run_again_from_what_was_there_before(
    when: str, model_dir: ModelDir, wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unlike KV, a state cannot be written twice; and what the step before has written stays."""
    async with cluster_of(model_dir("qwen3_next")) as cluster, AsyncClient(cluster.endpoint) as client:
        steps = cluster.decode[0].engine.steps
        begin, failed = steps.begin, []

        def fails_where_there_are_several(step: Any) -> Any:
            pending = None
            if len(step.chunks) == 1 or when == "behind it":
                pending = begin(step)
            if len(step.chunks) > 1:
                failed.append(step)
                raise RuntimeError(f"it failed {when}")
            return pending

        monkeypatch.setattr(steps, "begin", fails_where_there_are_several)
        answers = await generate_all(client, PROMPTS, NEW_TOKENS)
        await cluster.settled()
        cluster.check_invariants()
        assert len(failed) > NEW_TOKENS // 2
        assert counters(cluster)["router_retries"] == 0
    assert tokens_of(answers) == wanted


async def test_guesses_are_refused_before_a_request_comes(model_dir: ModelDir) -> None:
    cluster = cluster_of(model_dir("qwen3_next"), worker_changes={"num_speculative_tokens": 2})
    with pytest.raises(
        ValueError, match=r"num_speculative_tokens is 2, but Qwen3NextForCausalLM keeps a state .*give 0"
    ):
        await cluster.start()
    await cluster.stop()
