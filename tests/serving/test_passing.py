"""Prompts leave a worker that stops while it reads them: another one reads the rest, and nothing is read twice."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cluster.deploy.local import LocalCluster
from kvrelay.client.client import AsyncClient
from kvrelay.client.types import Completion
from tests.serving.conftest import ModelDir
from tests.serving.harness import (
    Gate,
    counters,
    engine_with,
    random_prompt,
    replays,
    router_with,
    state_of,
    transformers_tokens,
    until,
    worker_with,
)

LENGTHS = (150, 96, 40, 129, 64)  # the first has been read in part when the worker stops, the others wait
PROMPTS = [random_prompt(length, seed=length) for length in LENGTHS]
NEW_TOKENS = 12
ALL_MIXED = {"prefill": 0, "decode": 0, "mixed": 2}


@pytest.fixture(scope="module")
def expected(model_dir: ModelDir) -> list[list[int]]:
    return transformers_tokens(model_dir("llama"), PROMPTS, NEW_TOKENS)


def _cluster(
    directory: Path, transport: str = "shared_memory", num_pages: int = 192, record: str = "", **roles: Any
) -> LocalCluster:
    worker = worker_with(transports=(transport,), report_interval_s=0.05, record=record, max_batch_tokens=24)
    engine, router = engine_with(num_pages=num_pages), router_with(record=record)
    return LocalCluster(str(directory), **roles, engine=engine, worker=worker, router=router)


async def _ask(client: AsyncClient, **wanted: Any) -> list[Completion]:
    common: dict[str, Any] = {"max_tokens": NEW_TOKENS, "ignore_eos": True, "temperature": 0.0, "timeout_s": 60}
    return await asyncio.gather(*(client.generate(prompt, **common | wanted) for prompt in PROMPTS))


async def _stop_reading(
    cluster: LocalCluster, client: AsyncClient, worker: Any, gate: Gate, *, passes: bool = True
) -> None:
    """It stops in the middle of its first prompt."""
    await gate.reached()
    await client.drain(worker.options.name, force=True)
    await until(lambda: state_of(cluster, worker.options.name)[1].startswith("drain"), "routers have heard of it")
    await until(lambda: not passes or _passes(worker), "it was told to pass some on")
    gate.open()
    await until(lambda: state_of(cluster, worker.options.name)[1] == "drained", "it is left by all")


def _passes(worker: Any) -> bool:
    is_told = any(request.is_passing for request in worker.role.requests.values() if hasattr(request, "is_passing"))
    return is_told or worker.report().counters["prompts_passed"] > 0


@pytest.mark.parametrize(
    ("roles", "transport"),
    [
        ({"prefill": 1, "decode": 0, "mixed": 1}, "shared_memory"),
        ({"prefill": 1, "decode": 0, "mixed": 1}, "tcp"),
        ({"prefill": 1, "decode": 0, "mixed": 1}, "process_group"),
        ({"prefill": 1, "decode": 2, "mixed": 1}, "loopback"),
        (ALL_MIXED, "shared_memory"),
    ],
)
async def test_what_is_read_in_part_is_read_on_elsewhere(
    roles: dict[str, int], transport: str, model_dir: ModelDir, expected: list[list[int]], tmp_path: Path
) -> None:
    cluster = _cluster(model_dir("llama"), transport, record=str(tmp_path), **roles)
    async with cluster, AsyncClient(cluster.endpoint) as client:
        readers = [each for each in cluster.workers if each.options.role != "decode"]
        stops = readers[0]
        if roles is ALL_MIXED:  # so that all of it is sent there
            await client.drain(readers[1].options.name)
            await until(lambda: state_of(cluster, readers[1].options.name)[1] == "drained", "one takes all")
        gate = Gate(stops.engine, at=3)
        answers = asyncio.create_task(_ask(client, logprobs=1))
        await gate.reached()
        if roles is ALL_MIXED:
            await client.drain(readers[1].options.name, undo=True)
            await until(lambda: state_of(cluster, readers[1].options.name)[1] == "ready", "it takes some again")
        await _stop_reading(cluster, client, stops, gate)
        done = await answers
        await cluster.settled()
        cluster.check_invariants()
        total, at_last = counters(cluster), stops.report().counters
    assert [list(answer.token_ids) for answer in done] == expected
    timelines = [answer.timeline for answer in done if answer.timeline]
    assert [each.attempts for each in timelines] == [1] * len(LENGTHS)
    passed, moved = total["prompts_passed"], total["moves_done"]
    assert passed + moved == sum(each.moves for each in timelines)
    assert passed == total["prompts_taken_over"] >= 1
    assert (total["router_retries"], total["router_recomputed_tokens"]) == (0, 0)
    assert 0 < at_last["prompt_tokens"] < sum(LENGTHS) == total["prompt_tokens"], "nothing is read twice"
    receipts = [answer.receipt for answer in done if answer.receipt]
    assert sum(receipt.bytes > 0 and receipt.checksums_ok for receipt in receipts) >= 1
    assert all(sum(each.checksums_ok for each in a.moved) == a.timeline.moves for a in done if a.timeline)
    replays(*(tmp_path / f"{worker.options.name}.jsonl" for worker in cluster.workers), tmp_path / "router-0.jsonl")


async def test_where_nobody_else_reads_it_is_read_to_its_end(model_dir: ModelDir, expected: list[list[int]]) -> None:
    async with (
        _cluster(model_dir("llama"), prefill=2, decode=1) as cluster,
        AsyncClient(cluster.endpoint) as client,
    ):
        gate = Gate(cluster.prefill[0].engine, at=2)
        answers = asyncio.create_task(_ask(client))
        await _stop_reading(cluster, client, cluster.prefill[0], gate, passes=False)
        done = await answers
        total = counters(cluster)
    assert [list(answer.token_ids) for answer in done] == expected
    assert (total["prompts_passed"], total["router_retries"]) == (0, 0)


async def test_what_finds_no_pages_there_is_read_on_here(model_dir: ModelDir, expected: list[list[int]]) -> None:
    """Room for one of them at the other worker, or for none."""
    cluster = _cluster(model_dir("llama"), prefill=1, decode=1, mixed=1, num_pages=13)
    async with cluster, AsyncClient(cluster.endpoint) as client:
        gate = Gate(cluster.prefill[0].engine, at=2)
        answers = asyncio.create_task(_ask(client))
        await _stop_reading(cluster, client, cluster.prefill[0], gate, passes=False)
        await client.drain("prefill-0", undo=True)
        done = await answers
        await cluster.settled()
        cluster.check_invariants()
    assert [list(answer.token_ids) for answer in done] == expected


async def test_what_the_other_has_cached_is_not_sent(model_dir: ModelDir, expected: list[list[int]]) -> None:
    """Of 96 tokens all six pages are cached there, and the last is computed again for its logits."""
    cluster = _cluster(model_dir("llama"), prefill=1, decode=1, mixed=1)
    async with cluster, AsyncClient(cluster.endpoint) as client:
        wanted: dict[str, Any] = {"max_tokens": NEW_TOKENS, "ignore_eos": True, "temperature": 0.0}
        await client.drain("prefill-0", force=True)
        await until(lambda: state_of(cluster, "prefill-0")[1] == "drained", "the other one reads")
        await client.generate(PROMPTS[1], **wanted)
        await client.drain("mixed-0", force=True)
        await until(lambda: state_of(cluster, "mixed-0")[1] == "drained", "it takes nothing")
        await client.drain("prefill-0", undo=True)
        await until(lambda: state_of(cluster, "prefill-0")[1] == "ready", "it reads again")
        gate = Gate(cluster.prefill[0].engine, at=2)
        answer = asyncio.create_task(client.generate(PROMPTS[1], **wanted))
        await gate.reached()
        await client.drain("mixed-0", undo=True)
        await until(lambda: state_of(cluster, "mixed-0")[1] == "ready", "it may take it")
        await _stop_reading(cluster, client, cluster.prefill[0], gate)
        done = await answer
        total = counters(cluster)
        await cluster.settled()
        cluster.check_invariants()
    assert list(done.token_ids) == expected[1]
    assert total["prompts_passed"] == 1
    assert done.receipt is not None
    assert (done.receipt.bytes, done.receipt.recomputed_tokens) == (0, 0)


async def test_its_client_may_leave_meanwhile(model_dir: ModelDir) -> None:
    cluster = _cluster(model_dir("llama"), prefill=1, decode=0, mixed=1)
    async with cluster, AsyncClient(cluster.endpoint) as client:
        gate = Gate(cluster.prefill[0].engine, at=2)
        answers = [asyncio.create_task(client.generate(prompt, max_tokens=NEW_TOKENS)) for prompt in PROMPTS]
        await gate.reached()
        await client.drain("prefill-0", force=True)
        await until(lambda: _passes(cluster.prefill[0]), "it was told to pass some on")
        for answer in answers:
            answer.cancel()
        await asyncio.gather(*answers, return_exceptions=True)
        gate.open()
        await cluster.settled()
        cluster.check_invariants()
        assert not any(worker.role.requests for worker in cluster.workers)


async def test_one_of_which_the_other_dies_is_sent_again(model_dir: ModelDir, expected: list[list[int]]) -> None:
    cluster = _cluster(model_dir("llama"), prefill=1, decode=0, mixed=2)
    async with cluster, AsyncClient(cluster.endpoint) as client:
        gate = Gate(cluster.prefill[0].engine, at=3)
        answers = asyncio.create_task(_ask(client))
        await gate.reached()
        held = {worker: Gate(worker.engine) for worker in cluster.mixed}
        await client.drain("prefill-0", force=True)
        await until(lambda: _passes(cluster.prefill[0]), "it was told to pass some on")
        gate.open()
        await until(lambda: counters(cluster)["prompts_taken_over"], "one reads on")
        dies = next(worker for worker in cluster.mixed if worker.report().counters["prompts_taken_over"])
        await dies._server.stop(0)
        for each in held.values():
            each.open()
        done = await answers
        assert counters(cluster)["router_retries"] > 0
    assert [list(answer.token_ids) for answer in done] == expected
