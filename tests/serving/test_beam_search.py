"""Beam searches through a whole cluster find what transformers finds, beside others that draw: handed over, on mixed
workers, preempted, on a worker that is lost or drains, with several processes, with guesses; and leave no page behind.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch

from cluster.deploy import local
from cluster.deploy.local import LocalCluster
from engine.engine import Engine
from engine.options import EngineOptions
from engine.types import FinishReason, SampledToken, Step
from kvrelay.client.client import AsyncClient
from kvrelay.client.types import Completion, KvrelayError
from tests.engine.rehearsal import rehearse
from tests.greedy import eager_model
from tests.serving.conftest import ModelDir
from tests.serving.harness import (
    ROUTER,
    WAIT_S,
    Gate,
    counters,
    engine_with,
    leave,
    random_prompt,
    replays,
    router_with,
    tokens_of,
    transformers_tokens,
    until,
    worker_with,
)
from tests.zoo import VOCAB

NEW_TOKENS = 26
PAD = VOCAB  # is no token of the model
LENGTHS = (1, 2, 17, 33, 50)
SEARCHES: Sequence[dict[str, Any]] = (
    {"num_beams": 4, "n": 2},
    {"num_beams": 3, "n": 3, "length_penalty": 2.0, "early_stopping": True, "stop_token_ids": [20, 30, 40, 50, 60, 70]},
    {"num_beams": 4, "n": 4, "early_stopping": "never", "repetition_penalty": 1.3, "logit_bias": {9: 2.5}},
    {"num_beams": 5, "n": 1, "length_penalty": -0.5, "min_tokens": 6, "stop_token_ids": list(range(100, 140))},
    {"num_beams": 2, "n": 2, "ignore_eos": True, "temperature": 0.3, "top_k": 1},  # which say nothing
)
OTHERS = [random_prompt(length, seed=length) for length in (5, 30, 64)]


@cache
def _wanted(directory: Path, number: int) -> list[tuple[list[int], float]]:
    return _found_by_transformers(directory, LENGTHS[number], SEARCHES[number])


def _found_by_transformers(directory: Path, length: int, search: dict[str, Any]) -> list[tuple[list[int], float]]:
    model, prompt = eager_model(directory), torch.tensor([random_prompt(length, seed=length)])
    eos = [model.config.eos_token_id, *search.get("stop_token_ids", ())]
    found = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        num_beams=search["num_beams"],
        num_return_sequences=search["n"],
        length_penalty=search.get("length_penalty", 1.0),
        early_stopping=search.get("early_stopping", False),
        repetition_penalty=search.get("repetition_penalty", 1.0),
        sequence_bias=[[[token], bias] for token, bias in search.get("logit_bias", {}).items()] or None,
        min_new_tokens=search.get("min_tokens"),
        max_new_tokens=NEW_TOKENS,
        eos_token_id=None if search.get("ignore_eos") else eos,
        pad_token_id=PAD,
        return_dict_in_generate=True,
        output_scores=True,
    )
    told = [[token for token in ids if token != PAD] for ids in found.sequences[:, length:].tolist()]
    return list(zip(told, found.sequences_scores.tolist(), strict=True))


def _cluster(directory: Path, pages: int = 160, **more: Any) -> LocalCluster:
    worker = worker_with(**{"report_interval_s": 0.05, **more.pop("worker", {})})
    router = more.pop("router", ROUTER)
    engine = more.pop("engine", engine_with(num_pages=pages))
    return LocalCluster(str(directory), engine=engine, worker=worker, router=router, **more)


async def _search_all(client: AsyncClient) -> list[Completion]:
    asked = zip(LENGTHS, SEARCHES, strict=True)
    return await asyncio.gather(
        *(client.generate(random_prompt(n, seed=n), max_tokens=NEW_TOKENS, timeout_s=60, **how) for n, how in asked)
    )


async def _draw_others(client: AsyncClient) -> list[Completion]:
    how: dict[str, Any] = {"temperature": 0.0, "max_tokens": NEW_TOKENS, "min_tokens": NEW_TOKENS, "timeout_s": 60}
    return await asyncio.gather(*(client.generate(prompt, **how) for prompt in OTHERS))


def _check(answers: Sequence[Completion], directory: Path) -> None:
    for number, answer in enumerate(answers):
        wanted = _wanted(directory, number)
        assert [list(choice.token_ids) for choice in answer.choices] == [tokens for tokens, _ in wanted]
        scores = [choice.score for choice in answer.choices]
        assert scores == pytest.approx([score for _, score in wanted], abs=1e-4)
        lengths = [FinishReason.LENGTH if len(tokens) == NEW_TOKENS else FinishReason.STOP for tokens, _ in wanted]
        assert [choice.finish_reason for choice in answer.choices] == lengths
        assert answer.usage is not None
        assert answer.usage.completion_tokens == sum(len(tokens) for tokens, _ in wanted)


async def _settled(cluster: LocalCluster) -> None:
    await cluster.settled()
    cluster.check_invariants()
    assert [worker.pool.usage.held for worker in cluster.workers] == [0] * len(cluster.workers)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        ("llama", {"prefill": 1, "decode": 1}),
        ("llama", {"prefill": 0, "decode": 0, "mixed": 1}),
        ("llama", {"prefill": 0, "decode": 1, "mixed": 1}),
        ("llama", {"prefill": 1, "decode": 1, "worker": {"num_speculative_tokens": 4, "prompt_lookup_min": 1}}),
        ("llama", {"prefill": 1, "decode": 1, "decode_engine": engine_with(num_pages=160, tensor_parallel=2)}),
        ("llama", {"prefill": 1, "decode": 1, "worker": {"admission": "worst_case", "max_batch_size": 7}}),
        ("mistral_window", {"prefill": 1, "decode": 1}),
        ("deepseek_v3", {"prefill": 1, "decode": 1}),
        ("jamba", {"prefill": 1, "decode": 1, "engine": engine_with(num_pages=160, max_model_len=256)}),
    ],
    ids=["apart", "mixed", "both", "guesses", "processes", "worst_case", "window", "latent", "states"],
)
async def test_it_finds_what_transformers_finds_and_others_draw_what_they_drew(
    model: str, shape: dict[str, Any], model_dir: ModelDir
) -> None:
    directory = model_dir(model)
    async with _cluster(directory, **dict(shape)) as cluster, AsyncClient(cluster.endpoint) as client:
        answers, others = await asyncio.gather(_search_all(client), _draw_others(client))
        await _settled(cluster)
        total = counters(cluster)
    _check(answers, directory)
    assert tokens_of(others) == transformers_tokens(directory, OTHERS, NEW_TOKENS)
    assert (total["router_retries"], total["router_failed"]) == (0, 0)
    assert total["router_generation_tokens"] == sum(a.usage.completion_tokens for a in (*answers, *others) if a.usage)


@pytest.mark.parametrize("drains", [True, False])
async def test_who_loses_its_worker_finds_the_same_elsewhere(drains: bool, model_dir: ModelDir) -> None:
    directory = model_dir("llama")
    cluster = _cluster(directory, prefill=1, decode=2)
    async with cluster, AsyncClient(cluster.endpoint) as client:
        gates = [Gate(worker.engine, at=12) for worker in cluster.decode]
        answers = asyncio.create_task(_search_all(client))
        for gate in gates:
            await gate.reached()
        if drains:  # it stops before they have ended
            gates[1].open()
            stops = asyncio.create_task(cluster.decode[0].stop())
            await asyncio.sleep(0)
            gates[0].open()
            await stops
        else:
            await leave(cluster.decode[0], gates[0], drains=False)
            gates[1].open()
        done = await answers
        await until(lambda: not cluster.decode[1].role.requests, "all have ended")
        cluster.decode[1].check_invariants()
        assert cluster.decode[1].pool.usage.held == 0
    _check(done, directory)
    attempts = [answer.timeline.attempts for answer in done if answer.timeline is not None]
    assert 1 < max(attempts) <= 3


async def test_it_is_not_moved_from_a_worker_that_drains_and_ends_there(model_dir: ModelDir) -> None:
    directory = model_dir("llama")
    async with _cluster(directory, prefill=1, decode=2) as cluster, AsyncClient(cluster.endpoint) as client:
        gate = Gate(cluster.decode[0].engine, at=12)
        answers = asyncio.create_task(_search_all(client))
        await gate.reached()
        await client.drain("decode-0")
        gate.open()
        done = await answers
        await _settled(cluster)
        total = counters(cluster)
    _check(done, directory)
    assert (total["router_moved"], total["moves_failed"], total["router_retries"]) == (0, 0, 0)


@pytest.mark.parametrize("shape", [{"prefill": 1, "decode": 1}, {"prefill": 0, "decode": 0, "mixed": 1}], ids=str)
async def test_who_is_preempted_finds_the_same(shape: dict[str, int], model_dir: ModelDir) -> None:
    directory = model_dir("llama")
    cluster = _cluster(directory, engine=engine_with(num_pages=26), worker={"watermark": 0.0}, **shape)
    async with cluster, AsyncClient(cluster.endpoint) as client:
        answers, others = await asyncio.gather(_search_all(client), _draw_others(client))
        await _settled(cluster)
        total = counters(cluster)
    assert total["preemptions"] > 0
    _check(answers, directory)
    assert tokens_of(others) == transformers_tokens(directory, OTHERS, NEW_TOKENS)


async def test_steps_that_fail_are_run_again_beam_by_beam(model_dir: ModelDir) -> None:
    directory = model_dir("llama")
    async with _cluster(directory, prefill=1, decode=1) as cluster, AsyncClient(cluster.endpoint) as client:
        engine, count = cluster.decode[0].engine, itertools.count()
        original = engine.step

        def failing(step: Step) -> list[SampledToken]:
            if len(step.chunks) > 1 and next(count) % 3 == 0:
                raise RuntimeError("as a kernel does")
            return original(step)

        engine.step = failing  # type: ignore[method-assign]
        answers = await _search_all(client)
        await _settled(cluster)
        assert counters(cluster)["router_retries"] == 0
    _check(answers, directory)


async def test_on_a_gpu_others_run_ahead_where_no_search_runs(
    model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU would run runs on the CPU."""

    def load(asked: EngineOptions) -> Engine:
        return rehearse(asked.model, num_pages=asked.num_pages, max_model_len=512, parity_check=False)

    monkeypatch.setattr(local, "Engine", type("Loader", (), {"load": staticmethod(load)}))
    directory = model_dir("llama")
    async with _cluster(directory, prefill=1, decode=1) as cluster, AsyncClient(cluster.endpoint) as client:
        answers, others = await asyncio.gather(_search_all(client), _draw_others(client))
        await _settled(cluster)
    _check(answers, directory)
    assert tokens_of(others) == transformers_tokens(directory, OTHERS, NEW_TOKENS)


@pytest.mark.parametrize("shape", [{"prefill": 1, "decode": 1}, {"prefill": 0, "decode": 0, "mixed": 1}], ids=str)
async def test_one_that_is_left_by_its_client_leaves_no_page(shape: dict[str, int], model_dir: ModelDir) -> None:
    async with _cluster(model_dir("llama"), **shape) as cluster, AsyncClient(cluster.endpoint) as client:
        writer = cluster.workers[-1]
        gate = Gate(writer.engine, at=12)
        answers = asyncio.create_task(_search_all(client))
        await gate.reached()
        assert writer.pool.usage.held > 0
        answers.cancel()
        await until(lambda: counters(cluster)["router_cancelled"] == len(SEARCHES), "the router hears of it")
        gate.open()
        await _settled(cluster)
        _check(await _search_all(client), model_dir("llama"))


async def test_a_stream_brings_it_whole_and_policies_decide_the_same_again(model_dir: ModelDir, tmp_path: Path) -> None:
    directory, record = model_dir("llama"), str(tmp_path)
    worker, router = {"record": record}, router_with(record=record)
    async with _cluster(directory, prefill=1, decode=1, worker=worker, router=router) as cluster:
        async with AsyncClient(cluster.endpoint) as client:
            how: dict[str, Any] = {**SEARCHES[1], "max_tokens": NEW_TOKENS}
            deltas = [delta async for delta in client.stream(random_prompt(LENGTHS[1], seed=LENGTHS[1]), **how)]
        await _settled(cluster)
    assert [(delta.index, list(delta.token_ids)) for delta in deltas] == [
        (index, tokens) for index, (tokens, _) in enumerate(_wanted(directory, 1))
    ]
    replays(*(tmp_path / f"{name}.jsonl" for name in ("router-0", "prefill-0", "decode-0")))


async def test_http_has_vllm_s_words_for_it(model_dir: ModelDir) -> None:
    directory = model_dir("llama")
    cluster = _cluster(directory, prefill=1, decode=1, router=router_with(http_ports=(0,)))
    async with cluster:
        assert cluster.server is not None
        base = f"http://127.0.0.1:{cluster.server.http_port}"
        wanted = _found_by_transformers(directory, 33, {"num_beams": 4, "n": 4, "length_penalty": 0.6})
        asked = {"prompt": random_prompt(33, seed=33), "max_tokens": NEW_TOKENS, "n": 4, "return_token_ids": True}
        search = {"use_beam_search": True, "length_penalty": 0.6, "temperature": 0.0}
        async with httpx2.AsyncClient(base_url=base, timeout=WAIT_S) as http:
            told = (await http.post("/v1/completions", json=asked | search)).json()
            assert [choice["token_ids"] for choice in told["choices"]] == [tokens for tokens, _ in wanted]
            assert [choice["score"] for choice in told["choices"]] == pytest.approx([s for _, s in wanted], abs=1e-4)
            refused = await http.post("/v1/completions", json=asked | search | {"stop": "x"})
            assert refused.status_code == 400
            assert "stop has 1 strings, which a beam search does not know" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_beams": 17}, "num_beams is 17; give a whole number of 1 to 16"),
        ({"length_penalty": 0.5}, "num_beams is 0; give a whole number of 1 to 16"),
        ({"num_beams": 2, "length_penalty": 5.0}, "length_penalty is 5; give a number from -4 to 4"),
        ({"num_beams": 2, "n": 3}, "n is 3 with num_beams 2; give at most num_beams"),
        ({"num_beams": 2, "logprobs": 1}, "logprobs is 1, which a beam search does not know"),
        ({"num_beams": 2, "prompt_logprobs": 0}, "prompt_logprobs is 0, which a beam search does not know"),
        ({"num_beams": 2, "presence_penalty": 0.5}, "presence_penalty is 0.5, which a beam search does not know"),
        ({"num_beams": 2, "regex": "a+"}, "structured is given, which a beam search does not know"),
        ({"num_beams": 4, "allowed_token_ids": [7, 8, 9]}, "num_beams is 4, with 3 tokens to choose from"),
        ({"num_beams": 16, "max_tokens": 400}, "for 16 beams together are 6405 tokens; the largest decode worker"),
    ],
    ids=str,
)
async def test_what_it_does_not_know_is_refused(options: dict[str, Any], sentence: str, model_dir: ModelDir) -> None:
    async with _cluster(model_dir("llama"), prefill=1, decode=1) as cluster, AsyncClient(cluster.endpoint) as client:
        with pytest.raises(KvrelayError, match="INVALID_ARGUMENT") as error:
            await client.generate(random_prompt(5, seed=1), **options)
        assert sentence in error.value.message


@pytest.mark.parametrize("shape", [{"prefill": 1, "decode": 1}, {"prefill": 0, "decode": 0, "mixed": 1}], ids=str)
async def test_one_whose_beams_a_worker_cannot_hold_together_is_refused_by_it(
    shape: dict[str, int], model_dir: ModelDir
) -> None:
    cluster = _cluster(model_dir("llama"), **shape, worker={"max_batch_size": 3})
    async with cluster, AsyncClient(cluster.endpoint) as client:
        with pytest.raises(KvrelayError, match="num_beams is 4; its batch holds 3") as error:
            await client.generate(random_prompt(5, seed=1), num_beams=4)
        assert error.value.code == "INVALID_ARGUMENT"
        await _settled(cluster)
