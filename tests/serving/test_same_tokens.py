"""A sampled request with a seed gives the same tokens however it ran: alone, in a batch, in other chunks, on other
workers, after preemption. In float32, bfloat16 and with weights in int8, for a dense model, one with normalised queries
and keys, and a mixture of experts, though not each in all of them.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cluster.deploy.local import LocalCluster
from kvrelay.client.client import AsyncClient
from kvrelay.client.types import Completion, GenerateOptions
from tests.serving.conftest import ModelDir
from tests.serving.harness import ROUTER, counters, engine_with, random_prompt, worker_with

NEW_TOKENS = 40
DECODE_PAGES = 26  # all nine prompts and a spare page; with their output they take 51
PROMPT_LENS = (3, 16, 21, 35, 40, 47, 64, 70, 75)

PLAIN = GenerateOptions(temperature=0.9, top_p=0.95)
PENALISED = GenerateOptions(
    temperature=0.9, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3
)
NARROW = GenerateOptions(temperature=1.3, top_k=40, min_p=0.02, top_n_sigma=2.5, typical_p=0.9)
SHAPED = GenerateOptions(
    temperature=1.1, logit_bias={5: 4.0, 9: -100.0}, allowed_token_ids=[*range(3, 100)], bad_words=["w5 w6"]
)
FORMED = GenerateOptions(temperature=1.2, regex="([a-f]{3}, ){100}")
OPTIONS: tuple[Any, ...] = (PLAIN, PENALISED, NARROW, SHAPED, FORMED)


async def _run(client: AsyncClient, index: int) -> Completion:
    return await client.generate(
        random_prompt(PROMPT_LENS[index], seed=index),
        seed=1000 + index,
        max_tokens=NEW_TOKENS,
        min_tokens=NEW_TOKENS,
        timeout_s=60,
        **OPTIONS[index % len(OPTIONS)],
    )


def _tokens(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("llama", kind) for kind in ("float32", "bfloat16", "int8")),
        ("qwen3", "bfloat16"),
        *(("mixtral", kind) for kind in ("bfloat16", "int8")),
    ],
)
async def test_a_seed_gives_the_same_tokens_however_it_ran(name: str, kind: str, model_dir: ModelDir) -> None:
    directory = str(model_dir(name))
    weights = {"dtype": "bfloat16", "quantization": "int8"} if kind == "int8" else {"dtype": kind}
    everyone = range(len(PROMPT_LENS))

    one_by_one = LocalCluster(
        directory,
        engine=engine_with(**weights),
        worker=worker_with(max_batch_tokens=512, prefix_cache=False),
        router=ROUTER,
    )
    async with one_by_one as cluster, AsyncClient(cluster.endpoint) as client:
        alone = [await _run(client, index) for index in everyone]
        batched = await asyncio.gather(*(_run(client, index) for index in everyone))
        assert counters(cluster)["preemptions"] == 0
    assert _tokens(batched) == _tokens(alone)
    assert len(set(_tokens(alone))) == len(alone)

    crowded = LocalCluster(
        directory,
        prefill=2,
        decode=2,
        engine=engine_with(**weights),
        decode_engine=engine_with(**weights, num_pages=DECODE_PAGES // 2),
        worker=worker_with(max_batch_tokens=20),
        router=ROUTER,
    )
    async with crowded as cluster, AsyncClient(cluster.endpoint) as client:
        moved = await asyncio.gather(*(_run(client, index) for index in everyone))
        assert counters(cluster)["preemptions"] > 0
        assert all(worker.counters["generated_tokens"] for worker in cluster.workers)
    assert _tokens(moved) == _tokens(alone)
