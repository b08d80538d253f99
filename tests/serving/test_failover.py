"""A worker that goes away while it works: streams go on elsewhere with exactly their tokens, or fail at once.

Real processes that are killed are for the deployment's tests; here a worker's server vanishes, or it stops in order,
at a moment that a gate before its engine's step chooses.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cluster.deploy.local import LocalCluster
from cluster.front.server import ServerOptions
from kvrelay.client.client import AsyncClient
from kvrelay.client.types import Completion, GenerateOptions, KvrelayError
from tests.serving.conftest import ModelDir
from tests.serving.harness import ENGINE, ROUTER, WAIT_S, WORKER, Gate, counters, random_prompt, router_with, until
from worker.driver import Worker

PROMPTS = [random_prompt(length, seed=length) for length in (100, 16, 33)]
NEW_TOKENS = 30
OPTIONS: tuple[Any, ...] = (
    GenerateOptions(temperature=0.0),
    GenerateOptions(temperature=0.9, top_p=0.95, seed=5, regex="([a-f]{3}, ){100}"),
    GenerateOptions(
        temperature=0.9, seed=6, repetition_penalty=1.2, presence_penalty=0.5, logprobs=1, prompt_logprobs=1
    ),
)
WAYS = ("its server vanishes", "it stops in order")


async def _generate(client: AsyncClient, index: int) -> Completion:
    """Streamed: a gap or a repetition in the deltas shows in what they add up to."""
    stream = client.stream(
        PROMPTS[index], max_tokens=NEW_TOKENS, min_tokens=NEW_TOKENS, timeout_s=WAIT_S, **OPTIONS[index]
    )
    async for _ in stream:
        pass
    return stream.completion()


async def _generate_all(client: AsyncClient) -> list[Completion]:
    return await asyncio.gather(*(_generate(client, index) for index in range(len(PROMPTS))))


async def _lose(worker: Worker[Any], way: str, gate: Gate) -> None:
    """The worker is gone for all others when this returns; its engine may still be in its last step."""
    if way == "its server vanishes":
        await worker._server.stop(0)
        gate.open()
    else:
        stopping = asyncio.create_task(worker.stop())
        await until(lambda: worker.streams._links == {}, f"{worker.options.name} has left its router")
        gate.open()
        await stopping


async def _check_nothing_is_held(cluster: LocalCluster, lost: Worker[Any], way: str) -> None:
    """By those that are left; also by the lost one if it runs on. Fenced pages of one that stopped went with it."""
    if way == "it stops in order":
        cluster.prefill = [worker for worker in cluster.prefill if worker is not lost]
        cluster.decode = [worker for worker in cluster.decode if worker is not lost]
    await cluster.settled()
    cluster.check_invariants()


@asynccontextmanager
async def _serving(
    model_dir: ModelDir, *, prefill: int, decode: int, router: ServerOptions = ROUTER
) -> AsyncIterator[tuple[LocalCluster, AsyncClient]]:
    cluster = LocalCluster(
        str(model_dir("llama")), prefill=prefill, decode=decode, engine=ENGINE, worker=WORKER, router=router
    )
    async with cluster, AsyncClient(cluster.endpoint) as client:
        yield cluster, client


def _tokens(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


def _attempts(completions: list[Completion]) -> int:
    return sum(c.timeline.attempts for c in completions if c.timeline is not None)


@pytest.mark.parametrize("way", WAYS)
async def test_streams_go_on_when_a_decode_worker_is_lost(way: str, model_dir: ModelDir) -> None:
    async with _serving(model_dir, prefill=1, decode=2) as (cluster, client):
        expected = await _generate_all(client)
        lost, left = cluster.decode
        gate = Gate(lost.engine, at=10)
        before = counters(cluster)
        requests = asyncio.create_task(_generate_all(client))
        await gate.reached()
        hit = len(lost.role.policy.request_ids)
        assert hit > 0
        await _lose(lost, way, gate)
        answers = await requests
        after = counters(cluster)
        await _check_nothing_is_held(cluster, lost, way)

        assert _tokens(answers) == _tokens(expected)
        assert [a.text for a in answers] == [e.text for e in expected]
        assert [len(a.choices[0].logprobs) for a in answers] == [0, 0, NEW_TOKENS]
        assert [a.prompt_logprobs for a in answers] == [e.prompt_logprobs for e in expected]
        assert _attempts(answers) >= len(answers) + hit
        assert after["router_workers_lost"] - before["router_workers_lost"] == 1
        assert after["router_recomputed_tokens"] > before["router_recomputed_tokens"]
        assert {a.timeline.decode_worker for a in answers if a.timeline} == {left.options.name}
        assert _tokens(await _generate_all(client)) == _tokens(expected)


@pytest.mark.parametrize("way", WAYS)
async def test_prompts_go_elsewhere_when_a_prefill_worker_is_lost(way: str, model_dir: ModelDir) -> None:
    async with _serving(model_dir, prefill=2, decode=1) as (cluster, client):
        expected = await _generate_all(client)
        for worker in cluster.prefill:
            free = worker.pool.allocate(worker.pool.available)
            worker.pool.release(free)  # nothing stays cached
        lost, left = cluster.prefill
        gate = Gate(lost.engine)
        requests = asyncio.create_task(_generate_all(client))
        await gate.reached()
        assert lost.role.policy.num_running > 0
        await _lose(lost, way, gate)
        answers = await requests
        await _check_nothing_is_held(cluster, lost, way)
        assert _tokens(answers) == _tokens(expected)
        assert [len(a.prompt_logprobs) for a in answers] == [0, 0, len(PROMPTS[2]) - 1]
        assert [a.prompt_logprobs for a in answers] == [e.prompt_logprobs for e in expected]
        assert _attempts(answers) > len(answers)
        assert {a.timeline.prefill_worker for a in answers if a.timeline} == {left.options.name}


@pytest.mark.parametrize("way", WAYS)
async def test_losing_prefill_does_not_touch_what_was_handed_over(way: str, model_dir: ModelDir) -> None:
    async with _serving(model_dir, prefill=1, decode=1) as (cluster, client):
        expected = await _generate_all(client)
        [prefill], [decode] = cluster.prefill, cluster.decode
        prefill_gate, gate = Gate(prefill.engine, at=1000), Gate(decode.engine, at=20)
        requests = asyncio.create_task(_generate_all(client))
        await gate.reached()
        await until(lambda: prefill.role.policy.request_ids == [], "all is handed over")
        await _lose(prefill, way, prefill_gate)
        gate.open()
        answers = await requests
        assert _tokens(answers) == _tokens(expected)
        assert _attempts(answers) == len(answers)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_without_a_grace_requests_fail_at_once_when_a_role_is_gone(
    role: str, way: str, model_dir: ModelDir
) -> None:
    no_grace = router_with(unavailable_grace_s=0.0)
    async with _serving(model_dir, prefill=1, decode=1, router=no_grace) as (cluster, client):
        [lost] = cluster.prefill if role == "prefill" else cluster.decode
        [other] = cluster.decode if role == "prefill" else cluster.prefill
        gate = Gate(lost.engine, at=1 if role == "prefill" else 5)
        requests = [asyncio.create_task(_generate(client, index)) for index in range(len(PROMPTS))]
        await gate.reached()
        await until(lambda: lost.role.policy.num_running, "it works")
        await _lose(lost, way, gate)
        for answer in await asyncio.gather(*requests, return_exceptions=True):
            assert isinstance(answer, KvrelayError)
            assert answer.code == "UNAVAILABLE"
            assert f"no {role} worker is ready" in answer.message
        with pytest.raises(KvrelayError) as refused:
            await _generate(client, 0)
        assert refused.value.code == "UNAVAILABLE"
        await until(lambda: other.role.policy.request_ids == [], f"{other.options.name} has dropped them")
        await _check_nothing_is_held(cluster, lost, way)
