"""LoRA adapters through the whole cluster: the tokens are those of PEFT's merged model, whoever else runs beside them
and whatever becomes of the workers; prefixes are not shared between them; one that cannot be served harms no other
request.
"""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from cluster.deploy.local import LocalCluster
from engine.adapters.weights import AdapterWeights, load_weights
from kvrelay.client.client import AsyncClient
from kvrelay.client.types import Completion, KvrelayError
from tests.adapters import KINDS, make_adapter, merged
from tests.greedy import greedy_tokens
from tests.serving.conftest import ModelDir
from tests.serving.harness import (
    Gate,
    counters,
    engine_with,
    leave,
    random_prompt,
    replays,
    router_with,
    tokens_of,
    until,
    worker_with,
)

NEW_TOKENS = 48
LENGTHS = (70, 33, 16, 5, 47, 64, 21, 40)
ASKED = ("", *KINDS) * 2  # of each request
SHARED = random_prompt(48, seed=99)  # three pages


@pytest.fixture(scope="module")
def adapters(model_dir: ModelDir, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("adapters")
    return {kind: str(make_adapter(model_dir("llama"), kind, folder / kind, i)) for i, kind in enumerate(KINDS)}


@pytest.fixture(scope="module")
def wanted(model_dir: ModelDir, adapters: dict[str, str]) -> list[list[int]]:
    """By PEFT and transformers."""
    path = model_dir("llama")
    models = {kind: merged(path, Path(adapters[kind]) if kind else None) for kind in ("", *KINDS)}
    prompts = [random_prompt(length, seed=i) for i, length in enumerate(LENGTHS)]
    return [greedy_tokens(models[kind], p, NEW_TOKENS) for kind, p in zip(ASKED, prompts, strict=True)]


def cluster_of(model: Path, adapters: dict[str, str], **more: Any) -> LocalCluster:
    changes = {"max_batch_tokens": 40, **more.pop("worker_changes", {})}
    return LocalCluster(
        str(model),
        engine=engine_with(max_adapters=2),
        decode_engine=engine_with(max_adapters=2, num_pages=more.pop("decode_pages", 96)),
        worker=worker_with(**changes),
        router=router_with(adapters=adapters),
        **more,
    )


async def ask(client: AsyncClient, index: int, **more: Any) -> Completion:
    by = {"adapter": ASKED[index]} if index % 2 else {"model": ASKED[index]}
    how = {"temperature": 0.0, "max_tokens": NEW_TOKENS, "ignore_eos": True, "timeout_s": 60.0, **by, **more}
    return await client.generate(random_prompt(LENGTHS[index], seed=index), **how)


async def ask_all(client: AsyncClient) -> list[Completion]:
    return await asyncio.gather(*(ask(client, index) for index in range(len(LENGTHS))))


@pytest.mark.parametrize(
    "roles",
    [
        {"prefill": 2, "decode": 2},
        {"prefill": 1, "decode": 1, "decode_pages": 14},
        {"prefill": 0, "decode": 0, "mixed": 2},
        {"worker_changes": {"num_speculative_tokens": 3, "prompt_lookup_min": 1}},
    ],
    ids=["two and two", "crowded", "mixed", "guessing"],
)
async def test_the_tokens_are_those_of_pefts_merged_model(
    roles: dict[str, Any], model_dir: ModelDir, adapters: dict[str, str], wanted: list[list[int]], tmp_path: Path
) -> None:
    roles = {**roles, "worker_changes": {"record": str(tmp_path), **roles.get("worker_changes", {})}}
    cluster = cluster_of(model_dir("llama"), adapters, **roles)
    async with cluster, AsyncClient(cluster.endpoint) as client:
        answers = await ask_all(client)
        await cluster.settled()
        cluster.check_invariants()
        assert "decode_pages" in roles or counters(cluster)["preemptions"] == 0  # a crowd may come one by one
    assert tokens_of(answers) == wanted
    replays(*(tmp_path / f"{worker.options.name}.jsonl" for worker in cluster.workers))


@pytest.mark.parametrize("way", ["decode is lost", "prefill is lost", "decode drains"])
async def test_they_are_so_whatever_becomes_of_a_worker(
    way: str, model_dir: ModelDir, adapters: dict[str, str], wanted: list[list[int]]
) -> None:
    cluster = cluster_of(model_dir("llama"), adapters, prefill=2, decode=2)
    async with cluster, AsyncClient(cluster.endpoint) as client:
        first = cluster.prefill[0] if way == "prefill is lost" else cluster.decode[0]
        gate = Gate(first.engine, at=2 if way == "prefill is lost" else 6)
        running = asyncio.create_task(ask_all(client))
        await gate.reached()
        assert first.role.requests
        await leave(first, gate, drains=way == "decode drains")
        answers = await running
        await cluster.settled()
        cluster.check_invariants()
    assert tokens_of(answers) == wanted
    timelines = [each.timeline for each in answers if each.timeline is not None]
    assert any(each.moves if way == "decode drains" else each.attempts > 1 for each in timelines)


async def test_prefixes_are_found_by_the_same_adapter_only(model_dir: ModelDir, adapters: dict[str, str]) -> None:
    cluster = cluster_of(model_dir("llama"), adapters)
    async with cluster, AsyncClient(cluster.endpoint) as client:

        async def cached(adapter: str) -> int:
            answer = await client.generate(SHARED, adapter=adapter, max_tokens=2, timeout_s=60)
            assert answer.usage is not None
            return answer.usage.cached_tokens

        assert [await cached(name) for name in ("", "usual", "odd")] == [0, 0, 0]
        assert [await cached(name) for name in ("odd", "", "usual")] == [32, 32, 32]


async def test_one_that_cannot_be_served_is_told_and_harms_nobody(
    model_dir: ModelDir, adapters: dict[str, str], wanted: list[list[int]], tmp_path: Path
) -> None:
    changed = str(make_adapter(model_dir("llama"), "usual", tmp_path / "changed", seed=1))
    other = str(make_adapter(model_dir("gpt2"), {"r": 4, "target_modules": ["c_attn"]}, tmp_path / "other"))
    more = {"changed": changed, "other": other, "gone": str(tmp_path / "gone")}
    cluster = cluster_of(model_dir("llama"), adapters | more)
    async with cluster, AsyncClient(cluster.endpoint) as client:
        make_adapter(model_dir("llama"), "usual", tmp_path / "changed", seed=2)

        async def refused(**asked: str) -> str:
            with pytest.raises(KvrelayError) as failed:
                await client.generate(SHARED, max_tokens=4, timeout_s=60, **asked)  # type: ignore[arg-type]
            return str(failed.value)

        told = await asyncio.gather(
            refused(adapter="changed"),
            refused(adapter="other"),
            refused(adapter="gone"),
            refused(adapter="nobody"),
            refused(model="nobody"),
            refused(model="odd", adapter="usual"),
        )
        assert tokens_of([await ask(client, 1)]) == wanted[1:2]
        await cluster.settled()
        cluster.check_invariants()
        assert not any(cluster.held_pages().values())
    assert told[0].startswith("INVALID_ARGUMENT: prefill-0: adapter 'changed' cannot be served: ")
    assert told[0].endswith("its directory holds another one than when it was added; remove it, and add it again")
    assert told[1].startswith("INVALID_ARGUMENT: prefill-0: adapter 'other' cannot be served: ")
    assert told[2].startswith("FAILED_PRECONDITION: adapter 'gone' is not served: ")
    assert told[3] == "NOT_FOUND: adapter is 'nobody'; there are changed, everywhere, gone, odd, other, usual"
    assert told[4].startswith("NOT_FOUND: model is 'nobody'; this router serves 'llama', and its adapters changed, ")
    assert told[5] == "INVALID_ARGUMENT: model is 'odd' and adapter is 'usual'; give one of the two"


async def test_one_that_only_the_decode_worker_lacks_is_told_before_a_token(
    model_dir: ModelDir, adapters: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = cluster_of(model_dir("llama"), adapters)
    async with cluster, AsyncClient(cluster.endpoint) as client:
        monkeypatch.setattr(cluster.decode[0].engine.adapters, "_why_none", "it has no such directory")
        with pytest.raises(KvrelayError) as failed:
            await client.generate(SHARED, adapter="odd", max_tokens=4, timeout_s=60)
        assert (await client.generate(SHARED, max_tokens=4, timeout_s=60)).choices[0].token_ids
        await cluster.settled()
        cluster.check_invariants()
    assert str(failed.value).startswith("INVALID_ARGUMENT: ")
    assert str(failed.value).endswith("decode-0: adapter 'odd' cannot be served: it has no such directory")


async def test_workers_that_can_serve_none_leave_them_to_others(
    model_dir: ModelDir, adapters: dict[str, str], wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = cluster_of(model_dir("llama"), adapters, prefill=2, decode=2)
    async with cluster, AsyncClient(cluster.endpoint) as client:
        for worker in (cluster.prefill[0], cluster.decode[0]):
            monkeypatch.setattr(worker.engine.adapters, "_why_none", "its workers have tensor_parallel 2; give 1")
        assert tokens_of(await ask_all(client)) == wanted
        await cluster.settled()
        cluster.check_invariants()


async def test_answers_go_on_where_another_ones_adapter_is_loaded(
    model_dir: ModelDir, adapters: dict[str, str], wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the decode worker: prefill's step has no answer in it."""
    async with cluster_of(model_dir("llama"), adapters) as cluster, AsyncClient(cluster.endpoint) as client:
        go_on, load, lacking = threading.Event(), load_weights, cluster.decode[0].engine.adapters

        def slowly(*args: Any, **more: Any) -> AdapterWeights:
            if args[1] is lacking._adaptable:
                go_on.wait(60)
            return load(*args, **more)

        monkeypatch.setattr("engine.adapters.store.load_weights", slowly)
        waits = asyncio.create_task(ask(client, 1))
        await until(lambda: bool(lacking._loading), "the decode worker loads it")
        assert list((await ask(client, 0)).token_ids) == wanted[0]
        assert not waits.done()
        go_on.set()
        assert list((await waits).token_ids) == wanted[1]
        await cluster.settled()
        cluster.check_invariants()


async def test_they_come_and_go_while_requests_run(
    model_dir: ModelDir, adapters: dict[str, str], wanted: list[list[int]]
) -> None:
    cluster = cluster_of(model_dir("llama"), {"usual": adapters["usual"]})
    async with cluster, AsyncClient(cluster.endpoint) as client:
        assert cluster.server is not None
        gate = Gate(cluster.decode[0].engine, at=3)
        running = asyncio.create_task(ask(client, ASKED.index("usual")))
        await gate.reached()
        await cluster.server.take_adapters({"odd": adapters["odd"]})
        gate.open()
        with pytest.raises(KvrelayError, match="NOT_FOUND"):
            await ask(client, ASKED.index("usual"))
        index = ASKED.index("odd")
        assert tokens_of([await running, await ask(client, index)]) == [wanted[ASKED.index("usual")], wanted[index]]
        assert [each.name for each in await client.adapters()] == ["odd"]
