"""A request that its client leaves, or whose deadline passes, is dropped wherever it stands, and its pages come back
within SOON_S of the moment when nobody reads or writes them any more.

Each test holds a request in one place (a gate before the engine's step, a transport that stands still), ends it there
in one of three ways, and looks at what everybody holds, before and after.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from cluster.deploy.local import LocalCluster
from cluster.router.live.requests import Submission
from kv_transfer.base import Segment
from kv_transfer.transports.faulty import Faults
from kvrelay.client.client import AsyncClient
from kvrelay.client.types import Completion, KvrelayError
from tests.serving.conftest import ModelDir
from tests.serving.harness import (
    ENGINE,
    WAIT_S,
    WORKER,
    Gate,
    counters,
    engine_with,
    random_prompt,
    router_with,
    until,
    worker_with,
)

SOON_S = 10.0  # a third of lease_ttl_s, which would bring them back too
PROMPT = random_prompt(100, seed=1)
NEW_TOKENS = 30
ENDINGS = ("the client closes", "the connection breaks", "the deadline passes")

Running = Callable[[str], Awaitable[None]]


class Request:
    """One request on a connection of its own, and the way it ends. Its deadline passes when the test says so."""

    def __init__(self, cluster: LocalCluster, ending: str, prompt: list[int] = PROMPT) -> None:
        assert cluster.server is not None
        self._client = AsyncClient(cluster.endpoint)
        self._ending = ending
        self._timers: list[Callable[[], None]] = []
        cluster.server.router._call_at = self._keep  # type: ignore[method-assign]
        self._stream = self._client.stream(
            prompt, timeout_s=WAIT_S, temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True
        )
        self._reader = asyncio.create_task(self._read())

    def _keep(self, at_s: float, submission: Submission, call: Callable[[], None]) -> None:
        self._timers.append(call)

    async def _read(self) -> Completion:
        async for _ in self._stream:
            pass
        return self._stream.completion()

    async def end(self) -> None:
        if self._ending == "the client closes":
            self._reader.cancel()
        elif self._ending == "the connection breaks":
            await self._client.close()
        else:
            self._timers[0]()
        answer = (await asyncio.gather(self._reader, return_exceptions=True))[0]
        await self._client.close()
        assert isinstance(answer, asyncio.CancelledError | KvrelayError), f"it was answered: {answer}"
        if self._ending == "the deadline passes":
            assert isinstance(answer, KvrelayError)
            assert answer.code == "DEADLINE_EXCEEDED"


@asynccontextmanager
async def _serving(cluster: LocalCluster) -> AsyncIterator[LocalCluster]:
    """The cluster, which serves like any other afterwards."""
    async with cluster, AsyncClient(cluster.endpoint) as client:
        yield cluster
        await cluster.settled(SOON_S)
        cluster.check_invariants()
        assert cluster.server is not None
        assert cluster.server.router.num_submissions == cluster.server.router.num_in_flight == 0
        counts = counters(cluster)
        assert counts["router_cancelled"] == 1
        assert counts["router_failed"] == 0
        answer = await client.generate(PROMPT, max_tokens=NEW_TOKENS, ignore_eos=True, timeout_s=WAIT_S)
        assert len(answer.token_ids) == NEW_TOKENS


def _is_forgotten(cluster: LocalCluster) -> bool:
    assert cluster.server is not None
    return cluster.server.router.metrics.counts["cancelled"] == 1


@pytest.mark.parametrize("ending", ENDINGS)
async def test_while_it_waits_in_the_router(ending: str, model_dir: ModelDir) -> None:
    cluster = LocalCluster(
        str(model_dir("llama")),
        engine=ENGINE,
        decode_engine=engine_with(num_pages=9),
        worker=WORKER,
        router=router_with(overcommit=0.0),
    )
    async with _serving(cluster), AsyncClient(cluster.endpoint) as client:
        assert cluster.server is not None
        policy = cluster.server.router.policy
        gate = Gate(cluster.decode[0].engine)
        first = asyncio.create_task(client.generate(PROMPT, max_tokens=NEW_TOKENS, ignore_eos=True, timeout_s=WAIT_S))
        await gate.reached()
        request = Request(cluster, ending)
        await until(lambda: policy.num_queued == 1, "the second request waits in the router")
        await request.end()
        await until(lambda: policy.num_queued == 0, "it has left the queue")
        assert cluster.prefill[0].counters["prompt_tokens"] == len(PROMPT)
        gate.open()
        assert len((await first).token_ids) == NEW_TOKENS


@pytest.mark.parametrize("ending", ENDINGS)
async def test_while_its_prompt_is_computed(ending: str, model_dir: ModelDir) -> None:
    cluster = LocalCluster(str(model_dir("llama")), engine=ENGINE, worker=WORKER, router=router_with())
    async with _serving(cluster):
        prefill, decode = cluster.prefill[0], cluster.decode[0]
        gate = Gate(prefill.engine, at=2)  # the second of three chunks
        request = Request(cluster, ending)
        await gate.reached()
        await until(lambda: decode.role.reservations.handoffs.leases.leased_pages == 7, "decode has granted a lease")
        await request.end()
        await until(lambda: _is_forgotten(cluster), "the router dropped it")
        await until(lambda: decode.role.policy.request_ids == [], "decode dropped it")
        assert prefill.pool.usage.held == 7, "a step in flight writes into these pages"
        gate.open()
        await cluster.settled(SOON_S)
        assert prefill.counters["generated_tokens"] == 0
        assert prefill.counters["steps"] == 2
        assert decode.counters["steps"] == 0


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
@pytest.mark.parametrize("ending", ENDINGS)
async def test_while_its_kv_is_handed_over(ending: str, transport: str, model_dir: ModelDir) -> None:
    stands, go = threading.Event(), threading.Event()

    def before_send(_: Segment) -> None:
        stands.set()
        go.wait(WAIT_S)

    cluster = LocalCluster(
        str(model_dir("llama")),
        engine=ENGINE,
        worker=worker_with(transports=(transport,), timeout_s=WAIT_S, lease_ttl_s=WAIT_S),
        router=router_with(),
        faults=Faults(before_send=before_send),
    )
    async with _serving(cluster):
        prefill, decode = cluster.prefill[0], cluster.decode[0]
        request = Request(cluster, ending)
        await until(stands.is_set, "the first segment is about to be sent")
        await until(lambda: prefill.counters["generated_tokens"] == 1, "prefill has its token")
        await request.end()
        await until(lambda: _is_forgotten(cluster), "the router dropped it")
        assert prefill.pool.usage.held == 7, "the transport reads these pages"
        if transport == "shared_memory":
            assert decode.pool.usage.held == 7, "the transport writes into these pages"
        go.set()
        await cluster.settled(SOON_S)
        assert decode.counters["steps"] == 0
        assert prefill.counters["receipts_good"] == 0


@pytest.mark.parametrize("ending", ENDINGS)
async def test_while_it_waits_for_decode_pages(ending: str, model_dir: ModelDir) -> None:
    cluster = LocalCluster(
        str(model_dir("llama")),
        engine=ENGINE,
        decode_engine=engine_with(num_pages=9),
        worker=WORKER,
        router=router_with(overcommit=1.0),
    )
    async with _serving(cluster), AsyncClient(cluster.endpoint) as client:
        prefill, decode = cluster.prefill[0], cluster.decode[0]
        gate = Gate(decode.engine)
        first = asyncio.create_task(client.generate(PROMPT, max_tokens=NEW_TOKENS, ignore_eos=True, timeout_s=WAIT_S))
        await gate.reached()
        request = Request(cluster, ending, prompt=random_prompt(100, seed=2))
        await until(lambda: prefill.counters["handoffs_stalled"] == 1, "the handoff stalls")
        await until(lambda: prefill.counters["generated_tokens"] == 2, "prefill has its token")
        assert prefill.pool.usage.held == 7
        await request.end()
        await until(lambda: prefill.pool.usage.held == 0, "prefill gave its pages back")
        assert len(decode.role.policy.request_ids) == 1
        gate.open()
        assert len((await first).token_ids) == NEW_TOKENS


@pytest.mark.parametrize("ending", ENDINGS)
async def test_while_it_is_decoded(ending: str, model_dir: ModelDir) -> None:
    cluster = LocalCluster(str(model_dir("llama")), engine=ENGINE, worker=WORKER, router=router_with())
    async with _serving(cluster):
        decode = cluster.decode[0]
        gate = Gate(decode.engine, at=5)
        request = Request(cluster, ending)
        await gate.reached()
        await request.end()
        await until(lambda: decode.counters["cancelled"] == 1, "decode has heard of it")
        assert decode.pool.usage.held == 7, "a step in flight writes into these pages"
        gate.open()
        await cluster.settled(SOON_S)
        assert decode.counters["steps"] == 5
