"""What goes wrong inside a worker: another one serves, a broken or hung engine says so, and nothing is left behind."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest

from cluster.deploy.local import LocalCluster
from engine.engine import Engine
from engine.errors import EngineBroken
from engine.types import SampledToken, Step
from kv_transfer.base import Segment
from kv_transfer.prefill_side.pair import PrefillPair
from kv_transfer.transports.faulty import Faults
from kvrelay.client.client import AsyncClient
from kvrelay.client.types import KvrelayError
from kvrelay.v1 import worker_pb2 as pb
from tests.serving.conftest import ModelDir
from tests.serving.harness import ENGINE, ROUTER, WAIT_S, WORKER, Gate, random_prompt, until, worker_with
from worker.driver import Worker

PROMPT = random_prompt(40, seed=1)
FOUR_TOKENS: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True, "timeout_s": WAIT_S}


def _cluster(model_dir: ModelDir, prefill: int = 1, decode: int = 1, **worker: object) -> LocalCluster:
    return LocalCluster(
        str(model_dir("llama")),
        prefill=prefill,
        decode=decode,
        engine=ENGINE,
        worker=worker_with(**worker),
        router=ROUTER,
    )


def _fail_steps(engine: Engine, fails: Callable[[Step], bool]) -> None:
    step_well = engine.step

    def step(step: Step) -> list[SampledToken]:
        if fails(step):
            raise RuntimeError("no such kernel")
        return step_well(step)

    engine.step = step  # type: ignore[method-assign]


async def _replaced(worker: Worker[Any]) -> str:
    """What a process would do whose worker is broken; returns why it is."""
    with pytest.raises(EngineBroken) as caught:
        await worker.wait_broken()
    await worker.stop()
    return str(caught.value)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_that_fails_every_step_is_given_up_and_no_request_fails(model_dir: ModelDir, role: str) -> None:
    async with _cluster(model_dir, prefill=2, decode=2) as cluster, AsyncClient(cluster.endpoint) as client:
        [bad, _] = cluster.prefill if role == "prefill" else cluster.decode
        _fail_steps(bad.engine, lambda step: True)
        keeping = asyncio.create_task(_replaced(bad))
        answers = await asyncio.gather(*(client.generate(PROMPT, **FOUR_TOKENS) for _ in range(8)))
        assert [len(answer.token_ids) for answer in answers] == [4] * 8
        assert await keeping == "3 steps in a row failed, the last one by RuntimeError: no such kernel"


async def test_a_request_that_no_worker_can_compute_breaks_none_and_fails_no_other(model_dir: ModelDir) -> None:
    poison = random_prompt(40, seed=66)

    def is_poison(step: Step) -> bool:
        return any(list(chunk.token_ids[:4]) == poison[:4] for chunk in step.chunks)

    async with _cluster(model_dir, prefill=2) as cluster, AsyncClient(cluster.endpoint) as client:
        for worker in cluster.prefill:
            _fail_steps(worker.engine, is_poison)
        for _ in range(4):
            bystander = asyncio.create_task(client.generate(PROMPT, **FOUR_TOKENS))
            with pytest.raises(KvrelayError, match="no such kernel"):
                await client.generate(poison, **FOUR_TOKENS)
            assert len((await bystander).token_ids) == 4
        assert sum(worker.counters["chunks_failed"] for worker in cluster.prefill) >= 8
        keeping = asyncio.gather(*(worker.wait_broken() for worker in cluster.prefill))
        await asyncio.sleep(0)
        assert not keeping.done()  # at once, if a step loop had ended
        keeping.cancel()


async def test_a_step_that_hangs_is_told_while_it_hangs_and_ends_its_worker(model_dir: ModelDir) -> None:
    async with _cluster(model_dir, prefill=2, step_timeout_s=1.0) as cluster, AsyncClient(cluster.endpoint) as client:
        [hung, _] = cluster.prefill
        gate = Gate(hung.engine)
        keeping = asyncio.create_task(_replaced(hung))
        asking = [asyncio.create_task(client.generate(PROMPT, **FOUR_TOKENS)) for _ in range(8)]
        await gate.reached()
        assert cluster.server is not None
        router = cluster.server.router

        def told_age_ms() -> int:
            reports = [report for link, report, _ in router.workers() if link.name == "prefill-0"]
            return max(report.step_age_ms if report is not None else 0 for report in reports)

        await until(lambda: told_age_ms() > 500, "the router hears of the step's age")
        answers = await asyncio.gather(*asking)  # though the thread still hangs
        assert [len(answer.token_ids) for answer in answers] == [4] * 8
        gate.open()
        assert re.match(r"a step of \d+ requests, .* has not ended after \d+\.\d s; step_timeout_s is 1", await keeping)
        await cluster.settled()


async def test_what_a_failed_chunk_left_in_its_pages_is_never_cached(model_dir: ModelDir) -> None:
    """Not even when its request was cancelled meanwhile."""
    async with _cluster(model_dir) as cluster:
        prefill = cluster.prefill[0]
        _fail_steps(prefill.engine, lambda step: bool(step.chunks[0].request_id))  # a probe is nobody's
        gate = Gate(prefill.engine)
        client = AsyncClient(cluster.endpoint)
        asking = asyncio.create_task(client.generate(PROMPT, **FOUR_TOKENS))
        await gate.reached()
        asking.cancel()
        await until(lambda: prefill.counters["cancelled"], "the cancel has come")
        gate.open()
        await cluster.settled()
        assert prefill.pool.usage.cached == 0
        await client.close()


async def test_a_pair_that_breaks_while_it_is_opened_fails_the_request(
    model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*args: object, **kwargs: object) -> PrefillPair:
        raise RuntimeError("not expected by anybody")

    monkeypatch.setattr("worker.peers.peers.connect", broken)
    async with _cluster(model_dir) as cluster:
        client = AsyncClient(cluster.endpoint)
        with pytest.raises(KvrelayError, match="not expected by anybody"):
            await client.generate(PROMPT, **FOUR_TOKENS)
        assert not cluster.prefill[0].report().request_ids
        await client.close()


async def test_a_handoff_that_got_its_pages_stays_where_it_is(model_dir: ModelDir) -> None:
    """A reassignment crossed the grant: a request that is nearly handed over would run on both decode workers."""
    writing, go_on = threading.Event(), threading.Event()

    def hold(_: Segment) -> None:
        writing.set()
        assert go_on.wait(WAIT_S)

    async with LocalCluster(
        str(model_dir("llama")), decode=2, engine=ENGINE, worker=WORKER, router=ROUTER, faults=Faults(before_send=hold)
    ) as cluster:
        client, prefill = AsyncClient(cluster.endpoint), cluster.prefill[0]
        asking = asyncio.create_task(client.generate(PROMPT, **FOUR_TOKENS))
        assert await asyncio.to_thread(writing.wait, WAIT_S)
        request = next(iter(prefill.role.requests.values()))
        request.is_stalled = True  # as it was before the grant
        other = next(worker for worker in cluster.decode if worker.options.name != request.decode.name)
        prefill.on_reassign(pb.Reassign(request_id=request.id, decode=other.address))
        go_on.set()
        assert len((await asking).token_ids) == 4
        assert other.report().counters["leases_granted"] == 0
        await client.close()


async def test_a_cluster_that_cannot_start_says_why(model_dir: ModelDir) -> None:
    nowhere = worker_with(host="192.0.2.1")  # of TEST-NET-1: no machine has it
    with pytest.raises(OSError, match=r"cannot listen on 192\.0\.2\.1"):
        async with LocalCluster(str(model_dir("llama")), engine=ENGINE, worker=nowhere, router=ROUTER):
            pass


async def test_workers_at_an_address_of_ipv6_are_reached(model_dir: ModelDir) -> None:
    """By the router, and by each other: for what they say, and for KV."""
    there = worker_with(host="::1", transports=("tcp",))
    async with LocalCluster(str(model_dir("llama")), engine=ENGINE, worker=there, router=ROUTER) as cluster:
        assert cluster.decode[0].address.address.startswith("[::1]:")
        client = AsyncClient(cluster.endpoint)
        answer = await client.generate(PROMPT, **FOUR_TOKENS)
        assert answer.receipt is not None
        assert (answer.receipt.transport, answer.receipt.checksums_ok) == ("tcp", True)
        await client.close()


async def test_a_lost_decode_worker_is_forgotten(model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each start of a decode worker is another peer: whoever kept the old ones would grow by one with each crash."""
    monkeypatch.setattr("worker.peers.peers.WANTED_S", 0.2)
    async with _cluster(model_dir, decode=2) as cluster:
        client = AsyncClient(cluster.endpoint)
        await asyncio.gather(*(client.generate(PROMPT, **FOUR_TOKENS) for _ in range(8)))
        prefill = cluster.prefill[0]
        assert {name for name, _ in prefill.role.handoffs.peers._connections} == {"decode-0", "decode-1"}
        await cluster.decode[0].stop()
        await until(lambda: len(prefill.role.handoffs.peers._connections) == 1, "the lost peer is forgotten")
        completion = await client.generate(PROMPT, **FOUR_TOKENS)
        assert len(completion.token_ids) == 4
        await client.close()


async def test_on_mixed_workers_a_suspect_has_decoded_nothing_before_its_turn(
    model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its prompt is read anew there, which draws a token: what ended the last worker may be still to come."""
    model = str(model_dir("llama"))
    cluster = LocalCluster(model, prefill=0, decode=0, mixed=2, engine=ENGINE, worker=worker_with(), router=ROUTER)
    async with cluster, AsyncClient(cluster.endpoint) as client:
        prompts = [random_prompt(20, seed=seed) for seed in range(6)]
        asked = [client.generate(prompt, max_tokens=40, ignore_eos=True, timeout_s=WAIT_S) for prompt in prompts]
        asking = [asyncio.create_task(each) for each in asked]
        dead, other = cluster.mixed
        await until(lambda: all(worker.role.policy.decode.num_running > 1 for worker in (dead, other)), "both decode")
        assert cluster.server is not None
        policy, told = cluster.server.router.policy, list[tuple[str, str]]()
        next_turn, on_decoded = policy.next_turn, policy.on_decoded

        def begins() -> str | None:
            if (turn := next_turn()) is not None:
                told.append(("begins", turn))
            return turn

        def decoded(request_id: str, num_tokens: int) -> bool:
            told.append(("decoded", request_id))
            return on_decoded(request_id, num_tokens)

        monkeypatch.setattr(policy, "next_turn", begins)
        monkeypatch.setattr(policy, "on_decoded", decoded)
        assert dead._server is not None
        await dead._server.stop(0)
        assert all(len(answer.token_ids) == 40 for answer in await asyncio.gather(*asking))
    began = [request_id for what, request_id in told if what == "begins"]
    assert began
    for request_id in began:
        assert told.index(("begins", request_id)) < told.index(("decoded", request_id))
