"""Running requests move from one decode worker to another, and their streams show nothing of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cluster.deploy.local import LocalCluster
from kvrelay.client.client import AsyncClient
from kvrelay.client.types import Completion
from tests.serving.conftest import ModelDir
from tests.serving.harness import ROUTER, counters, engine_with, random_prompt, until, worker_with

LENGTHS = (3, 16, 21, 40, 64, 75)
NEW_TOKENS = 120
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 7, "logprobs": 2},
    {"temperature": 0.8, "seed": 3, "presence_penalty": 0.7, "repetition_penalty": 1.2},
]


def _cluster(directory: object, transport: str = "loopback", num_pages: int = 192, **roles: Any) -> LocalCluster:
    worker = worker_with(transports=(transport,), report_interval_s=0.05)
    return LocalCluster(str(directory), **roles, engine=engine_with(num_pages=num_pages), worker=worker, router=ROUTER)


async def _ask(client: AsyncClient) -> list[Completion]:
    common: dict[str, Any] = {"max_tokens": NEW_TOKENS, "ignore_eos": True, "timeout_s": 60}
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
    roles: dict[str, int], transport: str, model_dir: ModelDir, undisturbed: list[Completion]
) -> None:
    async with _cluster(model_dir("llama"), transport, **roles) as cluster, AsyncClient(cluster.endpoint) as client:
        answers = asyncio.create_task(_ask(client))
        await until(lambda: max(map(_num_decoding, _writers(cluster))) > 1, "one decodes some")
        first = max(_writers(cluster), key=_num_decoding)
        first.is_draining = True
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
    assert num_moves == total["router_moved"] == total["moves_done"] > 0
    assert (total["router_retries"], total["moves_failed"], total["router_stale_tokens"]) == (0, 0, 0)


def _num_decoding(worker: Any) -> int:
    return sum(request.num_outputs > 1 for request in worker.role.requests.values())


def _writers(cluster: LocalCluster) -> list[Any]:
    return [worker for worker in cluster.workers if worker.options.role != "prefill"]
