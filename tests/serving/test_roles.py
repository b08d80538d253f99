"""A worker changes its role while streams run: they go on, and the others use it for what it is then."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cluster.deploy.local import LocalCluster
from kvrelay.client.client import AsyncClient
from kvrelay.client.types import Completion, KvrelayError
from tests.deploy.running import kvrelay
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

LENGTHS = (3, 16, 21, 40, 64, 75)
PROMPTS = [random_prompt(length, seed=length) for length in LENGTHS]
NEW_TOKENS = 60


@pytest.fixture(scope="module")
def expected(model_dir: ModelDir) -> list[list[int]]:
    return transformers_tokens(model_dir("llama"), PROMPTS, NEW_TOKENS)


def _cluster(directory: Path, record: str = "", max_backlog_tokens: int = 4096, **roles: Any) -> LocalCluster:
    worker = worker_with(transports=("shared_memory",), report_interval_s=0.05, record=record, max_batch_size=7)
    engine, router = engine_with(num_pages=192), router_with(record=record, max_backlog_tokens=max_backlog_tokens)
    return LocalCluster(str(directory), **roles, engine=engine, worker=worker, router=router)


async def _ask(client: AsyncClient) -> list[Completion]:
    wanted: dict[str, Any] = {"max_tokens": NEW_TOKENS, "ignore_eos": True, "temperature": 0.0, "timeout_s": 60}
    return await asyncio.gather(*(client.generate(prompt, **wanted) for prompt in PROMPTS))


async def _become(cluster: LocalCluster, client: AsyncClient, name: str, role: str) -> None:
    await client.set_role(name, role)
    await until(lambda: state_of(cluster, name) == (role, "ready"), f"{name} is a {role} worker")


async def test_any_worker_takes_any_role_while_streams_run(
    model_dir: ModelDir, expected: list[list[int]], tmp_path: Path
) -> None:
    cluster = _cluster(model_dir("llama"), record=str(tmp_path), prefill=1, decode=2)
    steps = [("decode-1", "prefill"), ("decode-1", "mixed"), ("prefill-0", "mixed"), ("decode-0", "prefill")]
    steps += [("decode-1", "decode"), ("prefill-0", "prefill"), ("decode-0", "decode")]
    async with cluster, AsyncClient(cluster.endpoint) as client:
        stop = asyncio.Event()
        answers: list[Completion] = []

        async def go_on_asking() -> None:
            while not stop.is_set():
                answers.extend(await _ask(client))

        asking = asyncio.create_task(go_on_asking())
        for name, role in steps:
            await until(lambda: any(worker.role.requests for worker in cluster.workers), "streams run")
            await _become(cluster, client, name, role)
            limits = next(worker for worker in cluster.workers if worker.options.name == name).options.limits
            assert limits.get("max_batch_size", "7") == "7", "what it was given for its other role"
            answers.extend(await _ask(client))
        stop.set()
        await asking
        await cluster.settled()
        cluster.check_invariants()
        total = counters(cluster)
    assert [list(answer.token_ids) for answer in answers] == expected * (len(answers) // len(PROMPTS))
    assert [answer.timeline.attempts for answer in answers if answer.timeline] == [1] * len(answers)
    assert (total["router_retries"], total["router_workers_lost"], total["preemptions"]) == (0, 0, 0)
    names = ("router-0", "decode-1", "decode-1.1", "decode-1.2")
    replays(*(tmp_path / f"{name}.jsonl" for name in names))


def _has_chunks(worker: Any, size: int) -> bool:
    return bool(worker.role.policy.options.chunk_tokens == size)


async def test_chunks_change_while_streams_run(model_dir: ModelDir, expected: list[list[int]], tmp_path: Path) -> None:
    cluster = _cluster(model_dir("llama"), record=str(tmp_path), prefill=0, decode=0, mixed=1)
    async with cluster, AsyncClient(cluster.endpoint) as client:
        assert cluster.server is not None
        worker = cluster.workers[0]
        answers = asyncio.create_task(_ask(client))
        await until(lambda: worker.role.requests, "streams run")
        for size in (4, 0, 32):
            await client.set_role("mixed-0", "mixed", size)
            await until(partial(_has_chunks, worker, size), "the worker knows")
            assert not worker.is_draining
        done = [*await answers, *await _ask(client)]
        shown = (await client.status()).workers[0]
        view = cluster.server.router.policy.workers.prefill.accounts["mixed-0"].view
        with pytest.raises(KvrelayError, match="chunk_tokens is 8; only a mixed worker has chunks"):
            await client.set_role("mixed-0", "decode", 8, force=True)
        where = ("mixed-0", "mixed", "--chunk-tokens", "24", "--endpoint", cluster.endpoint, "--json")
        asked = await asyncio.to_thread(kvrelay, tmp_path, "role", *where, timeout_s=60)
        await client.set_role("mixed-0", "prefill", force=True)
        await until(lambda: state_of(cluster, "mixed-0") == ("prefill", "ready"), "it has another role")
        await client.set_role("mixed-0", "mixed", force=True)
        await until(lambda: state_of(cluster, "mixed-0") == ("mixed", "ready"), "and back")
        assert worker.role.policy.options.chunk_tokens == 24, "what it was given last as a mixed worker"
        await cluster.settled()
        cluster.check_invariants()
    assert [list(answer.token_ids) for answer in done] == expected * 2
    assert [answer.timeline.attempts for answer in done if answer.timeline] == [1] * len(done)
    assert (view.chunk_tokens, shown.limits["chunk_tokens"]) == (32, "32")
    assert (asked.returncode, json.loads(asked.stdout)["requests_left"]) == (0, 0)
    replays(tmp_path / "router-0.jsonl", tmp_path / "mixed-0.jsonl")


async def test_what_waits_to_be_read_for_a_worker_that_drains_is_anothers(
    model_dir: ModelDir, expected: list[list[int]]
) -> None:
    async with _cluster(model_dir("llama"), prefill=1, decode=2) as cluster, AsyncClient(cluster.endpoint) as client:
        assert cluster.server is not None
        gate = Gate(cluster.prefill[0].engine)
        first = asyncio.create_task(client.generate(random_prompt(60, seed=1), max_tokens=4, timeout_s=60))
        await gate.reached()  # nothing else is begun
        [begun] = [live.decode for live in cluster.server.router._dispatcher._live.values()]
        answers = asyncio.create_task(_ask(client))
        live = cluster.server.router._dispatcher._live
        await until(lambda: len(live) == 1 + len(PROMPTS), "all are sent")
        [other] = {"decode-0", "decode-1"} - {begun}
        assert sum(each.decode == other for each in live.values()) > 1
        await client.drain(other)
        await until(lambda: state_of(cluster, other) == ("decode", "drained"), "it waits for no prompt to be read")
        gate.open()
        await first
        done = await answers
        await cluster.settled()
        cluster.check_invariants()
    assert [list(answer.token_ids) for answer in done] == expected
    assert {answer.timeline.decode_worker for answer in done if answer.timeline} == {begun}
    assert [answer.timeline.attempts for answer in done if answer.timeline] == [1] * len(done)


async def test_what_another_router_has_on_its_way_is_waited_for(model_dir: ModelDir, expected: list[list[int]]) -> None:
    async with _cluster(model_dir("llama"), prefill=1, decode=2) as cluster, AsyncClient(cluster.endpoint) as client:
        second = await cluster.add_router()
        async with AsyncClient(f"127.0.0.1:{second.port}") as other:
            gate = Gate(cluster.prefill[0].engine)
            answers = asyncio.create_task(_ask(other))
            await gate.reached()
            begun = second.router._dispatcher._live[gate.seen[0]].decode
            await client.set_role(begun, "prefill")
            await until(lambda: state_of(cluster, begun) == ("decode", "draining"), "it drains")
            await asyncio.sleep(0.5)
            assert state_of(cluster, begun) == ("decode", "draining"), "nothing runs there, but is on its way"
            gate.open()
            await until(lambda: state_of(cluster, begun) == ("prefill", "ready"), "all have left")
            done = await answers
    assert [list(answer.token_ids) for answer in done] == expected
    assert [answer.timeline.attempts for answer in done if answer.timeline] == [1] * len(done)


async def test_what_is_asked_for_last_holds(
    model_dir: ModelDir, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a worker was about to become."""
    async with _cluster(model_dir("llama"), prefill=2, decode=2) as cluster, AsyncClient(cluster.endpoint) as client:
        gate = Gate(cluster.prefill[0].engine)
        answers = asyncio.create_task(_ask(client))
        await gate.reached()
        await client.set_role("prefill-0", "mixed")
        await until(lambda: state_of(cluster, "prefill-0") == ("prefill", "draining"), "it drains")
        await client.drain("prefill-0")
        gate.open()
        await until(lambda: state_of(cluster, "prefill-0") == ("prefill", "drained"), "it stays, and is left")
        assert [list(answer.token_ids) for answer in await answers] == expected
        worker = cluster.prefill[0]
        settled, go_on = asyncio.Event(), asyncio.Event()
        close = worker.role.close

        async def slowly() -> None:
            settled.set()
            await go_on.wait()
            await close()

        monkeypatch.setattr(worker.role, "close", slowly)
        await client.set_role("prefill-0", "mixed")
        await settled.wait()
        await client.set_role("prefill-0", "decode")
        await client.set_role("prefill-0", "mixed", 16)
        await until(lambda: worker._change._then is not None, "the worker was asked")
        go_on.set()
        await until(lambda: state_of(cluster, "prefill-0") == ("mixed", "ready"), "it is mixed")
        await until(partial(_has_chunks, worker, 16), "with the chunks that were asked for last")
        worker.take_knobs({"chunk_tokens": 48})
        await client.set_role("prefill-0", "decode")
        await until(lambda: state_of(cluster, "prefill-0") == ("decode", "ready"), "it decodes")
        worker.take_knobs({"chunk_tokens": 24})
        await client.set_role("prefill-0", "mixed")
        await until(lambda: state_of(cluster, "prefill-0") == ("mixed", "ready"), "and both")
        assert _has_chunks(worker, 24), "what it was told while it had none"
        settled, go_on, close = asyncio.Event(), asyncio.Event(), worker.role.close
        monkeypatch.setattr(worker.role, "close", slowly)
        await client.set_role("prefill-0", "decode")
        await settled.wait()
        await client.set_role("prefill-0", "mixed")
        await until(lambda: worker._change._then is not None, "the worker was asked")
        go_on.set()
        await until(lambda: state_of(cluster, "prefill-0") == ("mixed", "ready"), "it keeps the role that it had")
        assert [list(answer.token_ids) for answer in await _ask(client)] == expected
        await cluster.settled()
        cluster.check_invariants()


async def test_a_change_is_called_off_and_who_may_not_ask(model_dir: ModelDir, tmp_path: Path) -> None:
    async with _cluster(model_dir("llama"), prefill=2, decode=1) as cluster, AsyncClient(cluster.endpoint) as client:
        for role, worker, why in (
            ("clerk", "prefill-0", "role is 'clerk'; give one of prefill, decode, mixed"),
            ("mixed", "decode-0", "decode-0 is the only worker for decode that takes requests; start another one"),
            ("mixed", "decode-9", "there is no worker 'decode-9'; there are prefill-0, prefill-1, decode-0"),
        ):
            with pytest.raises(KvrelayError, match=why):
                await client.set_role(worker, role)
        gate = Gate(cluster.prefill[0].engine)
        answer = asyncio.create_task(client.generate(PROMPTS[3], max_tokens=4, temperature=0.0))
        await gate.reached()
        await client.set_role("prefill-0", "decode")
        await until(lambda: state_of(cluster, "prefill-0") == ("prefill", "draining"), "it drains")
        await client.drain("prefill-0", undo=True)
        await until(lambda: state_of(cluster, "prefill-0") == ("prefill", "ready"), "it stays what it is")
        gate.open()
        await answer
        await asyncio.sleep(0.1)
        assert cluster.prefill[0].options.role == "prefill"
        where = ("decode-0", "mixed", "--force", "--endpoint", cluster.endpoint, "--json")
        asked = await asyncio.to_thread(kvrelay, tmp_path, "role", *where, timeout_s=60)
        assert (asked.returncode, json.loads(asked.stdout)["role"]) == (0, "mixed")
        assert state_of(cluster, "decode-0")[0] == "mixed"
        assert len(await _ask(client)) == len(PROMPTS)


async def test_what_comes_while_a_role_ends_goes_elsewhere(model_dir: ModelDir, expected: list[list[int]]) -> None:
    """To a router that has come anew, a worker is as good as any until it has reported."""
    cluster = _cluster(model_dir("llama"), max_backlog_tokens=50, prefill=1, decode=1, mixed=1)
    async with cluster, AsyncClient(cluster.endpoint) as client:
        mixed, settled, go_on = cluster.mixed[0], asyncio.Event(), asyncio.Event()
        close = mixed.role.close

        async def slowly() -> None:  # a pair that takes its time
            settled.set()
            await go_on.wait()
            await close()

        mixed.role.close = slowly  # type: ignore[method-assign]
        gate = Gate(cluster.prefill[0].engine)
        await client.set_role("mixed-0", "prefill")
        await settled.wait()
        asking = asyncio.create_task(_ask(client))
        assert cluster.server is not None
        router = cluster.server.router
        await until(lambda: router.num_live == len(PROMPTS), "all are there")
        [link] = mixed.streams._links.values()
        mixed.streams._drop(link, "the connection breaks")
        await until(lambda: mixed.streams._links and link not in mixed.streams._links.values(), "it is there again")
        await asyncio.sleep(0.2)
        assert not mixed.role.requests
        go_on.set()
        gate.open()
        assert [list(each.token_ids) for each in await asking] == expected
        await until(lambda: state_of(cluster, "mixed-0") == ("prefill", "ready"), "it has its new role")
        await cluster.settled()
