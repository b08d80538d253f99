"""Running requests move from one decode worker to another, and their streams show nothing of it."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from cluster.deploy.local import LocalCluster
from kv_transfer.prefill_side.errors import HandoffLost
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
    until,
    worker_with,
)

LENGTHS = (3, 16, 21, 40, 64, 75)
NEW_TOKENS = 120
EXCUSED = re.compile(r"has nothing of it (left to read|to move now)|it stood still for")  # late orders, or machines
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 7, "logprobs": 2, "regex": "([a-f]{3}, ){100}"},
    {"temperature": 0.8, "seed": 3, "presence_penalty": 0.7, "repetition_penalty": 1.2},
]


def _cluster(
    directory: object, transport: str = "loopback", num_pages: int = 192, record: str = "", **roles: Any
) -> LocalCluster:
    worker = worker_with(transports=(transport,), report_interval_s=0.05, record=record)
    engine, router = engine_with(num_pages=num_pages), router_with(record=record)
    return LocalCluster(str(directory), **roles, engine=engine, worker=worker, router=router)


async def _ask(client: AsyncClient) -> list[Completion]:
    common: dict[str, Any] = {"max_tokens": NEW_TOKENS, "min_tokens": NEW_TOKENS, "timeout_s": 60}
    prompts = [random_prompt(length, seed=length) for length in LENGTHS]
    return await asyncio.gather(
        *(client.generate(prompt, **common, **KINDS[i % len(KINDS)]) for i, prompt in enumerate(prompts))
    )


@pytest.fixture(scope="module")
def undisturbed(model_dir: ModelDir) -> list[Completion]:
    async def run() -> list[Completion]:
        async with (
            _cluster(model_dir("llama"), prefill=1, decode=1) as cluster,
            AsyncClient(cluster.endpoint) as client,
        ):
            return await _ask(client)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("roles", "transport"),
    [
        ({"prefill": 1, "decode": 2}, "loopback"),
        ({"prefill": 1, "decode": 2}, "shared_memory"),
        ({"prefill": 1, "decode": 2}, "tcp"),
        ({"prefill": 1, "decode": 2}, "process_group"),
        ({"prefill": 0, "decode": 0, "mixed": 2}, "shared_memory"),
        ({"prefill": 0, "decode": 1, "mixed": 1}, "shared_memory"),
    ],
)
async def test_a_worker_that_drains_is_left_by_all(
    roles: dict[str, int],
    transport: str,
    model_dir: ModelDir,
    undisturbed: list[Completion],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "cluster.router.live.moves")
    cluster = _cluster(model_dir("llama"), transport, record=str(tmp_path), **roles)
    async with cluster, AsyncClient(cluster.endpoint) as client:
        gates = [Gate(writer.engine, at=30) for writer in _writers(cluster)]  # so that it is not done before it drains
        answers = asyncio.create_task(_ask(client))
        await until(lambda: max(map(_num_decoding, _writers(cluster))) > 1, "one decodes some")
        first = max(_writers(cluster), key=_num_decoding)
        first.is_draining = True
        for gate in gates:
            gate.open()
        await until(lambda: not first.role.requests, "it is left by all")
        done = await answers
        await cluster.settled()
        cluster.check_invariants()
        total = counters(cluster)
    num_moves = 0
    for answer, wanted in zip(done, undisturbed, strict=True):
        assert answer.choices == wanted.choices
        assert answer.timeline is not None
        assert answer.timeline.attempts == 1
        num_moves += answer.timeline.moves
        told = [(each.transport, each.checksums_ok, each.bytes > 0) for each in answer.moved]
        assert told == [(transport, True, True)] * answer.timeline.moves
    assert num_moves == total["router_moved"]
    assert 0 < total["moves_done"] <= num_moves  # one that ends where it went, before the receipt is back, is not told
    assert (total["router_retries"], total["router_stale_tokens"]) == (0, 0)
    assert any(" moves from " in told for told in caplog.messages)
    stayed = [told for told in caplog.messages if " stays at " in told]
    assert stayed == [told for told in stayed if EXCUSED.search(told)]
    names = ["router-0", *(worker.options.name for worker in cluster.workers)]
    replays(*(tmp_path / f"{name}.jsonl" for name in names))


async def test_who_could_not_be_reached_once_is_moved_to_later(
    model_dir: ModelDir, undisturbed: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("moving.moving", "workers", "policy"):
        monkeypatch.setattr(f"cluster.router.{module}.REST_S", 0.05)
    async with _cluster(model_dir("llama"), prefill=1, decode=2) as cluster, AsyncClient(cluster.endpoint) as client:
        first, gate = cluster.decode[0], Gate(cluster.decode[0].engine, at=10)
        peers: Any = first.role.moves._peers
        tries: list[str] = []

        async def pair(target: Any) -> Any:
            tries.append(target.name)
            raise HandoffLost(f"{target.name} cannot be reached")

        with_pair = peers.pair
        peers.pair = pair
        answers = asyncio.create_task(_ask(client))
        await until(lambda: _num_decoding(first) > 1, "it decodes some")
        await client.drain("decode-0")
        await until(lambda: tries, "a move has failed")
        await asyncio.sleep(0.1)  # the router tells the other worker
        peers.pair = with_pair
        gate.open()
        await until(lambda: not first.role.requests, "it is left by all")
        done = await answers
        total = counters(cluster)
    assert [answer.choices for answer in done] == [wanted.choices for wanted in undisturbed]
    assert total["moves_failed"] >= 1
    assert 1 <= total["moves_done"] <= total["router_moved"]
    assert total["router_retries"] == 0


async def test_what_one_worker_has_too_much_of_goes_to_another_that_comes(
    model_dir: ModelDir, undisturbed: list[Completion]
) -> None:
    """Eleven pages for six requests that grow to twelve and more each, until the other worker may be used."""
    cluster = _cluster(model_dir("llama"), prefill=1, decode=2, num_pages=40)
    async with cluster, AsyncClient(cluster.endpoint) as client:
        await client.drain("decode-1")
        await until(lambda: state_of(cluster, "decode-1")[1].startswith("drain"), "routers have heard of it")
        answers = asyncio.create_task(_ask(client))
        await until(lambda: _num_decoding(cluster.decode[0]) > 1, "one decodes")
        await client.drain("decode-1", undo=True)
        done = await answers
        total = counters(cluster)
    assert [answer.choices for answer in done] == [wanted.choices for wanted in undisturbed]
    assert 0 < total["moves_done"] <= total["router_moved"]


async def test_an_operator_drains_a_worker_and_takes_it_back(
    model_dir: ModelDir, undisturbed: list[Completion]
) -> None:
    directory = model_dir("llama")
    async with _cluster(directory, prefill=1, decode=2) as cluster, AsyncClient(cluster.endpoint) as client:
        answers = asyncio.create_task(_ask(client))
        await until(lambda: max(map(_num_decoding, cluster.decode)) > 1, "one decodes some")
        await client.drain("decode-0")
        await until(lambda: state_of(cluster, "decode-0")[1].startswith("drain"), "routers have heard of it")
        await until(lambda: not cluster.decode[0].role.requests, "it is left by all")
        assert [answer.choices for answer in await answers] == [wanted.choices for wanted in undisturbed]
        with pytest.raises(KvrelayError, match="decode-1 is the only worker for decode that takes requests; start"):
            await client.drain("decode-1")
        with pytest.raises(
            KvrelayError, match="there is no worker 'decode-7'; there are prefill-0, decode-0, decode-1"
        ):
            await client.drain("decode-7")
        await client.drain("decode-1", force=True)
        await until(lambda: state_of(cluster, "decode-1")[1].startswith("drain"), "routers have heard of it")
        waits = asyncio.create_task(_ask(client))
        await client.drain("decode-0", undo=True)
        assert [answer.choices for answer in await waits] == [wanted.choices for wanted in undisturbed]
        await cluster.settled()
        cluster.check_invariants()


async def test_the_command_waits_until_the_worker_is_left(model_dir: ModelDir, tmp_path: Path) -> None:
    async with _cluster(model_dir("llama"), prefill=1, decode=2) as cluster, AsyncClient(cluster.endpoint) as client:
        answers = asyncio.create_task(_ask(client))
        await until(lambda: max(map(_num_decoding, cluster.decode)) > 1, "one decodes some")
        left = await _command(cluster, tmp_path, "decode-0", "--json")
        assert (left[0], sorted(json.loads(left[1]))) == (0, ["draining", "requests_left", "seconds", "worker"])
        assert not cluster.decode[0].role.requests
        only = await _command(cluster, tmp_path, "decode-1")
        assert (only[0], "decode-1 is the only worker for decode" in only[2]) == (1, True)
        back = await _command(cluster, tmp_path, "decode-0", "--undo")
        assert back == (0, "", "decode-0 takes requests again\n")
        await answers
        gate = Gate(cluster.prefill[0].engine)
        waits = asyncio.create_task(client.generate([7] * 20, max_tokens=2))
        await gate.reached()
        late = await _command(cluster, tmp_path, "prefill-0", "--force", "--timeout", "0.5")
        assert late[0] == 1
        assert late[2].startswith("error: prefill-0 still has 1 requests after 0.5 s; prefill-0 goes on draining")
        gate.open()
        await waits


async def _command(cluster: LocalCluster, state_dir: Path, *arguments: str) -> tuple[int, str, str]:
    where = ("--endpoint", cluster.endpoint)
    run = await asyncio.to_thread(kvrelay, state_dir, "drain", *arguments, *where, timeout_s=60)
    return run.returncode, run.stdout, run.stderr


async def test_who_may_not_drain(model_dir: ModelDir) -> None:
    operator, chat = "o" * 32, "c" * 32
    router = router_with(auth=True, tokens=f"operator:{operator}\nchat:{chat}")
    async with LocalCluster(str(model_dir("llama")), decode=2, engine=engine_with(), router=router) as cluster:
        async with AsyncClient(cluster.endpoint, token=chat) as client:
            with pytest.raises(KvrelayError, match="the token of 'chat' may not change workers") as refused:
                await client.drain("decode-0")
            assert refused.value.code == "PERMISSION_DENIED"
            with pytest.raises(KvrelayError, match="the token of 'chat' may not change workers"):
                await client.scale("decode", 2)
        async with AsyncClient(cluster.endpoint, token=operator) as client:
            await client.drain("decode-0")
            await until(lambda: cluster.decode[0].is_draining, "it was told")
            for changing in (client.scale("decode", 3), client.drain("decode-0", remove=True)):
                with pytest.raises(KvrelayError, match="nobody keeps this router's workers") as refused:
                    await changing
                assert refused.value.code == "UNIMPLEMENTED"


def _num_decoding(worker: Any) -> int:
    return sum(request.num_outputs > 1 for request in worker.role.requests.values())


def _writers(cluster: LocalCluster) -> list[Any]:
    return [worker for worker in cluster.workers if worker.options.role != "prefill"]
