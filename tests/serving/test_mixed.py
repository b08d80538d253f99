"""Workers that read prompts and write answers in the same steps: alone, and beside workers of one phase."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cluster.deploy.local import LocalCluster
from cluster.router.accounts import RoutedRequest
from cluster.router.placing.placing import Placed, Placing
from kvrelay.client.client import AsyncClient
from kvrelay.client.types import Completion
from tests.serving.conftest import ModelDir
from tests.serving.harness import (
    ROUTER,
    counters,
    engine_with,
    generate_all,
    random_prompt,
    replays,
    router_with,
    tokens_of,
    transformers_tokens,
    worker_with,
)

NEW_TOKENS = 24
LENGTHS = (3, 16, 21, 35, 40, 47, 64, 70, 75)
PROMPTS = [random_prompt(length, seed=length) for length in LENGTHS]
CHUNKS = worker_with(max_batch_tokens=40, chunk_tokens=9)


@pytest.fixture(scope="module")
def expected(model_dir: ModelDir) -> list[list[int]]:
    return transformers_tokens(model_dir("llama"), PROMPTS, NEW_TOKENS)


async def _answers(cluster: LocalCluster) -> list[Completion]:
    async with AsyncClient(cluster.endpoint) as client:
        wanted: dict[str, Any] = {"max_tokens": NEW_TOKENS, "ignore_eos": True, "temperature": 0.0, "timeout_s": 60}
        answers = await asyncio.gather(*(client.generate(prompt, **wanted) for prompt in PROMPTS))
        await cluster.settled()
        cluster.check_invariants()
        return answers


def _transports(answers: list[Completion]) -> set[str]:
    """Of what was handed over. One preempted before its last token ends where it is read again: nothing is."""
    receipts = [answer.receipt for answer in answers if answer.receipt]
    assert all(receipt.transport or receipt.recomputed_tokens for receipt in receipts)
    return {receipt.transport for receipt in receipts if receipt.transport}


@pytest.mark.parametrize("admission", ["watermark", "worst_case"])
@pytest.mark.parametrize("num_pages", [96, 20])
async def test_one_worker_of_both_phases_serves_alone(
    num_pages: int, admission: str, model_dir: ModelDir, expected: list[list[int]]
) -> None:
    cluster = LocalCluster(
        str(model_dir("llama")),
        prefill=0,
        decode=0,
        mixed=1,
        engine=engine_with(num_pages=num_pages),
        worker=CHUNKS | {"admission": admission},
        router=ROUTER,
    )
    async with cluster:
        answers = await _answers(cluster)
        preemptions = counters(cluster)["preemptions"]
    assert [list(answer.token_ids) for answer in answers] == expected
    assert _transports(answers) == {"local"}
    assert not preemptions or (num_pages == 20 and admission == "watermark")


@pytest.mark.parametrize("pools", [{"prefill": 1, "decode": 0, "mixed": 1}, {"prefill": 0, "decode": 1, "mixed": 2}])
async def test_what_is_read_in_one_place_may_be_written_in_another(
    pools: dict[str, Any], model_dir: ModelDir, expected: list[list[int]]
) -> None:
    cluster = LocalCluster(
        str(model_dir("llama")),
        **pools,
        engine=engine_with(num_pages=10),
        decode_engine=engine_with(),
        worker=CHUNKS,
        router=ROUTER,
    )
    async with cluster:
        answers = await _answers(cluster)
    assert [list(answer.token_ids) for answer in answers] == expected
    assert len(_transports(answers)) == 2, "some stayed, and some moved"


async def test_what_it_decided_it_decides_again(model_dir: ModelDir, expected: list[list[int]], tmp_path: Path) -> None:
    """With targets; the second wave is placed by what the first one's steps took."""
    cluster = LocalCluster(
        str(model_dir("llama")),
        prefill=0,
        decode=1,
        mixed=1,
        engine=engine_with(num_pages=16),
        worker=CHUNKS | {"record": str(tmp_path)},
        router=router_with(record=str(tmp_path), slo_ttft_ms=2000.0, slo_tpot_ms=200.0),
    )
    async with cluster:
        for _ in range(2):
            assert [list(answer.token_ids) for answer in await _answers(cluster)] == expected
    for replayed in replays(tmp_path / "mixed-0.jsonl", tmp_path / "router-0.jsonl"):
        assert replayed.decisions > len(PROMPTS)
    assert "Foretold" in (tmp_path / "router-0.jsonl").read_text(), "nothing was predicted"


@pytest.mark.parametrize("admission", ["watermark", "worst_case"])
async def test_what_finds_no_pages_elsewhere_is_decoded_where_it_was_read(
    admission: str, model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def across(placing: Placing, request: RoutedRequest, now: float) -> Placed:
        """Read at one worker, for the other."""
        return Placed(prefill=placing._prefill.accounts["mixed-0"], decode=placing._decode.accounts["mixed-1"])

    monkeypatch.setattr(Placing, "choose", across)
    cluster = LocalCluster(
        str(model_dir("llama")),
        prefill=0,
        decode=0,
        mixed=2,
        engine=engine_with(num_pages=20),
        worker=CHUNKS | {"admission": admission},
        router=ROUTER,
    )
    prompts = [random_prompt(length, seed=length) for length in (100, 120)]
    async with cluster, AsyncClient(cluster.endpoint) as client:
        pool = cluster.mixed[1].pool
        taken = pool.allocate(pool.available)
        answers = await generate_all(client, prompts, NEW_TOKENS)
        assert counters(cluster)["reassigned"] == len(prompts)
        pool.release(taken)
        await cluster.settled()
        cluster.check_invariants()
    assert tokens_of(answers) == transformers_tokens(model_dir("llama"), prompts, NEW_TOKENS)
    assert _transports(answers) == {"local"}
    assert all(answer.timeline is not None and answer.timeline.attempts == 1 for answer in answers)


async def test_a_client_that_leaves_takes_nothing_with_it(model_dir: ModelDir) -> None:
    cluster = LocalCluster(
        str(model_dir("llama")), prefill=0, decode=0, mixed=1, engine=engine_with(), worker=CHUNKS, router=ROUTER
    )
    async with cluster, AsyncClient(cluster.endpoint) as client:
        for wait_s in (0.0, 0.01, 0.03, 0.1):
            calls = [asyncio.ensure_future(client.generate(p, max_tokens=200, ignore_eos=True)) for p in PROMPTS]
            await asyncio.sleep(wait_s)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            await cluster.settled()
            cluster.check_invariants()
