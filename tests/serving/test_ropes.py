"""Models whose rotary frequencies go by a request's length: what transformers generates of each request alone, whatever
it shares pages and steps with, and wherever it goes on.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cluster.deploy.local import LocalCluster
from decode_worker.drafts import Drafts
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
    tokens_of,
    transformers_tokens,
    worker_with,
)
from tests.zoo import LENGTH_ROPES, ROPE_LIMIT

NEW_TOKENS = 30
LONG = random_prompt(100, seed=1)
PROMPTS = [LONG[:n] for n in (3, 10, 11, 12, 33, ROPE_LIMIT - 1, ROPE_LIMIT, ROPE_LIMIT + 1, 64, 100)]  # share pages
ROLES: dict[str, dict[str, Any]] = {
    "apart": {"prefill": 1, "decode": 1},
    "mixed": {"prefill": 0, "decode": 0, "mixed": 1},
}


def _cluster(directory: object, engine: dict[str, Any] | None = None, **changes: Any) -> LocalCluster:
    worker = worker_with(max_batch_tokens=40, chunk_tokens=9, report_interval_s=0.05, **changes.pop("worker", {}))
    return LocalCluster(
        str(directory),
        engine=engine_with(**{"num_pages": 128, **(engine or {})}),
        worker=worker,
        router=ROUTER,
        **changes,
    )


def _crossings(prompts: list[list[int]]) -> int:
    """Of answers, from within the limit to beyond."""
    return sum(len(prompt) <= ROPE_LIMIT < len(prompt) + NEW_TOKENS - 1 for prompt in prompts)


@pytest.mark.parametrize("roles", ROLES)
@pytest.mark.parametrize("name", LENGTH_ROPES)
async def test_tokens_are_transformers_of_each_request_alone(name: str, roles: str, model_dir: ModelDir) -> None:
    wanted = transformers_tokens(model_dir(name), PROMPTS, NEW_TOKENS)
    async with _cluster(model_dir(name), **ROLES[roles]) as cluster, AsyncClient(cluster.endpoint) as client:
        for _ in range(2):  # the second finds what the first left
            assert tokens_of(await generate_all(client, PROMPTS, NEW_TOKENS)) == wanted
        begun_anew, found = counters(cluster)["begun_anew"], counters(cluster)["prefix_hit_tokens"]
        await cluster.settled()
        cluster.check_invariants()
    assert begun_anew == (2 * _crossings(PROMPTS) if name == "phi3_longrope" else 0)
    assert found > 0


@pytest.mark.parametrize("name", LENGTH_ROPES)
async def test_what_was_turned_otherwise_is_found_by_nobody(name: str, model_dir: ModelDir) -> None:
    short, long, longer = PROMPTS[4], LONG[:90], LONG
    wanted = transformers_tokens(model_dir(name), [long, short, longer], 4)
    async with _cluster(model_dir(name)) as cluster, AsyncClient(cluster.endpoint) as client:
        cached = []
        for prompt, tokens in zip([long, short, longer], wanted, strict=True):
            [answer] = await generate_all(client, [prompt], 4)
            assert list(answer.token_ids) == tokens
            assert answer.usage is not None
            cached.append(answer.usage.cached_tokens)
    assert cached == [0, 0, 0 if name == "llama_dynamic_rope" else 80]


@pytest.mark.parametrize("drains", [True, False], ids=["moved", "lost"])
@pytest.mark.parametrize("name", LENGTH_ROPES)
async def test_they_go_on_elsewhere_as_they_began(name: str, drains: bool, model_dir: ModelDir) -> None:
    wanted = transformers_tokens(model_dir(name), PROMPTS, NEW_TOKENS)
    async with _cluster(model_dir(name), prefill=1, decode=2) as cluster, AsyncClient(cluster.endpoint) as client:
        worker = cluster.decode[0]
        gate = Gate(worker.engine, at=12)
        answers = asyncio.create_task(generate_all(client, PROMPTS, NEW_TOKENS))
        await gate.reached()
        await leave(worker, gate, drains=drains)
        assert tokens_of(await answers) == wanted
        total = counters(cluster)
    assert total["router_moved" if drains else "router_retries"] > 0


@pytest.mark.parametrize("name", LENGTH_ROPES)
async def test_pages_run_out_and_guesses_are_made(
    name: str, model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Drafts, "_worthwhile", lambda self, chances, *_: {name: most for name, _, most in chances})
    wanted = transformers_tokens(model_dir(name), PROMPTS, NEW_TOKENS)
    crowded = _cluster(
        model_dir(name),
        engine={"speculative_model": str(model_dir("phi3_longrope"))},
        decode_engine=engine_with(num_pages=14, speculative_model=str(model_dir(name))),
        worker={"num_speculative_tokens": 4},
    )
    async with crowded as cluster, AsyncClient(cluster.endpoint) as client:
        assert tokens_of(await generate_all(client, PROMPTS, NEW_TOKENS)) == wanted
        total = counters(cluster)
    assert total["preemptions"] > 0
    assert total["accepted_tokens"] > 0
