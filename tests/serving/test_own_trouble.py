"""What goes wrong inside a prefill worker fails the request that it concerns, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import threading

import pytest

from cluster.deploy.local import LocalCluster
from engine.types import SampledToken, Step
from kv_transfer.base import Segment
from kv_transfer.prefill_side.pair import PrefillPair
from kv_transfer.transports.faulty import Faults
from kvrelay.client.client import AsyncClient
from kvrelay.client.types import KvrelayError
from kvrelay.v1 import worker_pb2 as pb
from tests.serving.conftest import ModelDir
from tests.serving.harness import ENGINE, ROUTER, WAIT_S, WORKER, Gate, random_prompt, until, worker_with

PROMPT = random_prompt(40, seed=1)


def _cluster(model_dir: ModelDir, decode: int = 1) -> LocalCluster:
    return LocalCluster(str(model_dir("llama")), decode=decode, engine=ENGINE, worker=WORKER, router=ROUTER)


async def test_what_a_failed_chunk_left_in_its_pages_is_never_cached(model_dir: ModelDir) -> None:
    """Not even when its request was cancelled meanwhile."""

    def fail(step: Step) -> list[SampledToken]:
        raise RuntimeError("no such kernel")

    async with _cluster(model_dir) as cluster:
        prefill = cluster.prefill[0]
        prefill.engine.step = fail  # type: ignore[method-assign]
        gate = Gate(prefill.engine)
        client = AsyncClient(cluster.endpoint)
        asking = asyncio.create_task(client.generate(PROMPT, max_tokens=4, timeout_s=WAIT_S))
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

    monkeypatch.setattr("prefill_worker.peers.connect", broken)
    async with _cluster(model_dir) as cluster:
        client = AsyncClient(cluster.endpoint)
        with pytest.raises(KvrelayError, match="not expected by anybody"):
            await client.generate(PROMPT, max_tokens=4, timeout_s=WAIT_S)
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
        asking = asyncio.create_task(client.generate(PROMPT, max_tokens=4, timeout_s=WAIT_S))
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


async def test_a_lost_decode_worker_is_forgotten(model_dir: ModelDir) -> None:
    """Each start of a decode worker is another peer: whoever kept the old ones would grow by one with each crash."""
    async with _cluster(model_dir, decode=2) as cluster:
        client = AsyncClient(cluster.endpoint)
        await asyncio.gather(*(client.generate(PROMPT, max_tokens=4, timeout_s=WAIT_S) for _ in range(8)))
        prefill = cluster.prefill[0]
        assert {name for name, _ in prefill.role.handoffs.peers._connections} == {"decode-0", "decode-1"}
        await cluster.decode[0].stop()
        await until(lambda: len(prefill.role.handoffs.peers._connections) == 1, "the lost peer is forgotten")
        completion = await client.generate(PROMPT, max_tokens=4, timeout_s=WAIT_S)
        assert len(completion.token_ids) == 4
        await client.close()
