"""Requests that keep less than all of their KV, through the whole cluster: tokens are those of transformers with a mask
that hides what is not kept, wherever a request runs, and only what is kept is relayed and held."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from cluster.deploy.local import LocalCluster
from engine.engine import Engine
from kvrelay.client.client import AsyncClient
from kvrelay.client.types import Completion, KvrelayError
from tests.greedy import eager_model
from tests.serving.conftest import ModelDir
from tests.serving.harness import (
    PAGE_SIZE,
    ROUTER,
    Gate,
    counters,
    engine_with,
    leave,
    random_prompt,
    router_with,
    tokens_of,
    until,
    worker_with,
)

NEW_TOKENS = 60
PROMPTS = [random_prompt(length, seed=length) for length in (150, 33, 16, 5, 90, 64)]
POLICIES: tuple[dict[str, int], ...] = (
    {"kv_window_tokens": 24, "kv_sink_tokens": 4},
    {"kv_window_tokens": 2},
    {"kv_window_tokens": 20, "kv_sink_tokens": 1, "kv_heavy_tokens": 32},
)
SINKS = POLICIES[0]


def cluster_of(model: Any, **more: Any) -> LocalCluster:
    decode_pages = more.pop("decode_pages", 96)
    changes, engine = more.pop("worker_changes", {}), more.pop("engine_changes", {})
    return LocalCluster(
        str(model),
        engine=engine_with(**engine),
        decode_engine=engine_with(num_pages=decode_pages, **engine),
        worker=worker_with(max_batch_tokens=40, **changes),
        router=more.pop("router", ROUTER),
        **more,
    )


async def generated(client: AsyncClient, prompts: Sequence[list[int]], **how: Any) -> list[Completion]:
    how = {"temperature": 0.0, "max_tokens": NEW_TOKENS, "min_tokens": NEW_TOKENS, "timeout_s": 60} | how
    return await asyncio.gather(*(client.generate(prompt, **how) for prompt in prompts))


def dropped_of(answer: Completion) -> int:
    assert answer.receipt is not None
    return answer.receipt.dropped_pages


def masked_tokens(model: Any, prompt: list[int], policy: dict[str, int]) -> list[int]:
    """Greedy, by transformers' eager attention under a mask."""
    window, sinks = policy["kv_window_tokens"], policy.get("kv_sink_tokens", 0)
    kept = set(range(-(-min(sinks, len(prompt)) // PAGE_SIZE)))
    if heavy := policy.get("kv_heavy_tokens", 0):
        attentions = model(torch.tensor([prompt]), output_attentions=True).attentions
        sums = sum(layer.double().sum((0, 1, 2)) for layer in attentions)
        full = max(1, len(prompt) // PAGE_SIZE)
        pages = [float(sums[page * PAGE_SIZE : (page + 1) * PAGE_SIZE].sum()) for page in range(full)]
        kept |= set(sorted(range(full), key=lambda page: -pages[page])[: -(-heavy // PAGE_SIZE)])
    tokens = list(prompt)
    while len(tokens) < len(prompt) + NEW_TOKENS:
        length = len(tokens)
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        for row in range(len(prompt), length):
            begin = max(0, row + 1 - window) // PAGE_SIZE
            for page in set(range(begin)) - kept:
                seen[row, page * PAGE_SIZE : (page + 1) * PAGE_SIZE] = False
        mask = torch.zeros(1, 1, length, length).masked_fill(~seen, torch.finfo(torch.float32).min)
        logits = model(torch.tensor([tokens]), attention_mask=mask).logits[0, -1]
        logits[model.config.eos_token_id] = -torch.inf
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


_wanted: dict[str, list[list[int]]] = {}


NAMES = ("sinks", "window", "heavy")


@pytest.fixture(params=POLICIES, ids=NAMES)
def policy(request: pytest.FixtureRequest) -> dict[str, int]:
    given: dict[str, int] = request.param
    return given


def wanted(model_dir: ModelDir, policy: dict[str, int]) -> list[list[int]]:
    key = str(policy)
    if key not in _wanted:
        with torch.inference_mode():
            model = eager_model(model_dir("llama"))
            _wanted[key] = [masked_tokens(model, prompt, policy) for prompt in PROMPTS]
    return _wanted[key]


@pytest.mark.parametrize(
    ("transport", "policy"),
    [*zip(["shared_memory", "process_group", "tcp"], POLICIES, strict=True)],
    ids=NAMES,
    indirect=["policy"],
)
async def test_tokens_are_those_of_a_mask(transport: str, model_dir: ModelDir, policy: dict[str, int]) -> None:
    changes = {"transports": (transport,)}
    async with (
        cluster_of(model_dir("llama"), worker_changes=changes) as cluster,
        AsyncClient(cluster.endpoint) as client,
    ):
        answers = await generated(client, PROMPTS, **policy)
        again = await generated(client, PROMPTS, **policy)  # from what is cached
        whole = await generated(client, PROMPTS[:1])  # whose cached prefixes are not theirs behind the prompt
        await cluster.settled()
        cluster.check_invariants()
    assert tokens_of(answers) == tokens_of(again) == wanted(model_dir, policy)
    assert dropped_of(whole[0]) == 0
    receipt = answers[0].receipt
    assert receipt is not None
    assert receipt.transport == transport
    assert receipt.pages + receipt.dropped_pages == 10
    assert receipt.pages <= 5


async def test_it_holds_few_pages_however_long_it_grows(model_dir: ModelDir) -> None:
    """A pool of ten pages, which promises each request what it may come to hold, writes 350 tokens."""
    changes = {"admission": "worst_case"}
    async with (
        cluster_of(model_dir("llama"), decode_pages=10, worker_changes=changes) as cluster,
        AsyncClient(cluster.endpoint) as client,
    ):
        [answer] = await generated(client, PROMPTS[:1], max_tokens=350, min_tokens=350, **SINKS)
        await cluster.settled()
        cluster.check_invariants()
        dropped = counters(cluster)["dropped_pages"]
    assert len(answer.token_ids) == 350
    assert list(answer.token_ids[:NEW_TOKENS]) == wanted(model_dir, SINKS)[0]
    assert dropped >= 20


@pytest.mark.parametrize("drains", [True, False], ids=["drained", "lost"])
async def test_it_goes_on_elsewhere(drains: bool, model_dir: ModelDir, policy: dict[str, int]) -> None:
    async with cluster_of(model_dir("llama"), decode=2) as cluster, AsyncClient(cluster.endpoint) as client:
        first = cluster.decode[0]
        gate = Gate(first.engine, at=30)
        running = asyncio.create_task(generated(client, PROMPTS, **policy))
        await gate.reached()
        await until(lambda: not cluster.prefill[0].role.requests, "all are handed over: the unread would not move")
        await leave(first, gate, drains=drains)
        answers = await running
        await cluster.settled()
        if drains:
            cluster.check_invariants()
            assert counters(cluster)["moves_done"] > 0
            assert any(receipt.dropped_pages for answer in answers for receipt in answer.moved)
        else:
            assert any(answer.timeline and answer.timeline.attempts > 1 for answer in answers)
    assert tokens_of(answers) == wanted(model_dir, policy)


async def test_it_is_preempted(model_dir: ModelDir, policy: dict[str, int]) -> None:
    async with cluster_of(model_dir("llama"), decode_pages=14) as cluster, AsyncClient(cluster.endpoint) as client:
        answers = await generated(client, PROMPTS, **policy)
        await generated(client, PROMPTS)
        await cluster.settled()
        cluster.check_invariants()
        assert counters(cluster)["preemptions"] > 0
    assert tokens_of(answers) == wanted(model_dir, policy)


async def test_it_stays_on_a_mixed_worker(model_dir: ModelDir, policy: dict[str, int]) -> None:
    async with (
        cluster_of(model_dir("llama"), prefill=0, decode=0, mixed=1) as cluster,
        AsyncClient(cluster.endpoint) as client,
    ):
        answers = await generated(client, PROMPTS, **policy)
        await cluster.settled()
        cluster.check_invariants()
    assert tokens_of(answers) == wanted(model_dir, policy)
    assert answers[0].receipt is not None
    assert answers[0].receipt.transport == "local"
    assert dropped_of(answers[0]) > 4


@pytest.mark.parametrize(
    ("engine", "worker"),
    [
        ({"dtype": "bfloat16"}, {}),
        ({"kv_dtype": "int8"}, {}),
        ({"tensor_parallel": 2}, {}),
        ({}, {"num_speculative_tokens": 4}),
    ],
    ids=["bfloat16", "int8", "tensor_parallel", "guesses"],
)
async def test_it_is_the_same_beside_other_ways_to_serve(
    engine: dict[str, Any], worker: dict[str, Any], model_dir: ModelDir
) -> None:
    """One mixed worker, of which nothing is lost, against two that lose what they decode."""
    directory, how = model_dir("llama"), {"engine_changes": engine, "worker_changes": worker}
    async with (
        cluster_of(directory, prefill=0, decode=0, mixed=1, **how) as cluster,
        AsyncClient(cluster.endpoint) as client,
    ):
        expected = tokens_of(await generated(client, PROMPTS, **SINKS))
    async with cluster_of(directory, decode=2, **how) as cluster, AsyncClient(cluster.endpoint) as client:
        gate = Gate(cluster.decode[0].engine, at=30)
        running = asyncio.create_task(generated(client, PROMPTS, **SINKS))
        await gate.reached()
        await leave(cluster.decode[0], gate, drains=False)
        assert tokens_of(await running) == expected


async def test_the_routers_own_policy(model_dir: ModelDir) -> None:
    router = router_with(**SINKS)
    async with cluster_of(model_dir("llama"), router=router) as cluster, AsyncClient(cluster.endpoint) as client:
        usual, whole = await generated(client, PROMPTS[:1]), await generated(client, PROMPTS[:1], kv_window_tokens=0)
        with pytest.raises(KvrelayError, match=r"sink_tokens is 4 and kv_policy.window_tokens is 0"):
            await generated(client, PROMPTS[:1], kv_sink_tokens=4)
    assert tokens_of(usual) == wanted(model_dir, SINKS)[:1]
    assert dropped_of(whole[0]) == 0


@pytest.mark.parametrize(
    ("kind", "why"), [("mistral_window", "a window"), ("bloom", "has ALiBi"), ("mamba2", "keeps a state beside KV")]
)
async def test_models_that_keep_all(kind: str, why: str, model_dir: ModelDir) -> None:
    async with cluster_of(model_dir(kind)) as cluster, AsyncClient(cluster.endpoint) as client:
        with pytest.raises(KvrelayError, match=why) as refused:
            await generated(client, PROMPTS[:1], **SINKS)
        assert refused.value.code == "INVALID_ARGUMENT"
        await generated(client, PROMPTS[:1])
        await cluster.settled()
        cluster.check_invariants()


async def test_workers_in_stages_leave_them_to_others(model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        cluster_of(model_dir("llama"), prefill=2) as cluster,
        AsyncClient(cluster.endpoint) as client,
    ):
        cut, whole = (worker.engine for worker in cluster.prefill)
        monkeypatch.setattr(Engine, "num_stages", property(lambda engine: 2 if engine is cut else 1))
        cut.__dict__.pop("why_kept_whole", None)
        assert tokens_of(await generated(client, PROMPTS, **SINKS)) == wanted(model_dir, SINKS)
        whole.__dict__["why_kept_whole"] = cut.why_kept_whole
        monkeypatch.setattr(Engine, "num_stages", 2)
        with pytest.raises(KvrelayError, match="is cut in pipeline stages") as refused:
            await generated(client, PROMPTS[:1], **SINKS)
        assert refused.value.code == "INVALID_ARGUMENT"
