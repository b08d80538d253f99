"""Guesses change when tokens come and never which: with and without speculation the same, to the last one, at any
temperature, through the handoff, crowded pages, moves, mixed workers, a lost worker, penalties, forms and logprobs;
guessed by prompt lookup, by a model that thinks nearly alike, and by one that has never heard of it.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from cluster.deploy.local import LocalCluster
from decode_worker.drafts import Drafts
from kvrelay.client.client import AsyncClient
from kvrelay.client.types import Completion, GenerateOptions
from tests.serving.conftest import ModelDir
from tests.serving.harness import ROUTER, Gate, counters, engine_with, leave, random_prompt, replays, worker_with

NEW_TOKENS = 48
PLAIN: dict[tuple[str, str], list[Any]] = {}  # said without speculation, by the model's directory and dtype
PROMPT_LENS = (3, 16, 21, 35, 40, 47, 64, 70)
GUESSES = 4
FEW = [*range(5, 9)]  # so that guesses come true by chance, too
OPTIONS: tuple[Any, ...] = (
    GenerateOptions(temperature=0.0),
    GenerateOptions(temperature=1.0, allowed_token_ids=FEW),
    GenerateOptions(temperature=1.0, allowed_token_ids=FEW, frequency_penalty=0.4, repetition_penalty=1.1),
    GenerateOptions(temperature=1.2, regex="(a[bc]a, ){60}"),
    GenerateOptions(temperature=0.7, top_k=3, logprobs=2),
    GenerateOptions(temperature=1.0, allowed_token_ids=FEW, bad_words=["w5 w6"]),
    GenerateOptions(temperature=0.0, min_tokens=NEW_TOKENS),
    GenerateOptions(temperature=1.0),
)


async def _run(client: AsyncClient, index: int) -> Completion:
    return await client.generate(
        random_prompt(PROMPT_LENS[index], seed=index),
        seed=1000 + index,
        max_tokens=NEW_TOKENS,
        timeout_s=60,
        **OPTIONS[index],
    )


async def _all(client: AsyncClient) -> list[Completion]:
    return await asyncio.gather(*(_run(client, index) for index in range(len(OPTIONS))))


def _near(model: Path, directory: Path) -> str:
    """A model whose weights are a little beside those of another."""
    made = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(7)
    with torch.no_grad():
        for weight in made.parameters():
            weight += 0.05 * weight.std(correction=0) * torch.randn_like(weight)
    made.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, directory)
    return str(directory)


def _heads(model: Path, directory: Path) -> str:
    """Medusa's, which know as much of the tokens to come as the model itself of the next one, and some noise."""
    vocab = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).lm_head.weight.detach()
    torch.manual_seed(7)
    tensors = {}
    for head in range(GUESSES - 1):
        tensors[f"{head}.0.linear.weight"] = 0.02 * torch.randn(vocab.shape[1], vocab.shape[1])
        tensors[f"{head}.0.linear.bias"] = torch.zeros(vocab.shape[1])
        tensors[f"{head}.1.weight"] = vocab + 0.1 * vocab.std() * torch.randn_like(vocab)
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "medusa_lm_head.safetensors")
    (directory / "config.json").write_text(json.dumps({"medusa_num_heads": GUESSES - 1, "medusa_num_layers": 1}))
    return str(directory)


@pytest.fixture(autouse=True)
def _all_are_worthwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever steps of these tiny models take on this machine."""

    def worthwhile(self: Drafts, chances: Sequence[tuple[str, float, int]], *_: int) -> dict[str, int]:
        return {name: most for name, _, most in chances}

    monkeypatch.setattr(Drafts, "_worthwhile", worthwhile)


@pytest.fixture(scope="module")
def drafts(model_dir: ModelDir, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of the llama: who guesses, by what is said of it."""
    near = _near(model_dir("llama"), tmp_path_factory.mktemp("near"))
    heads = _heads(model_dir("llama"), tmp_path_factory.mktemp("heads"))
    return {"lookup": "", "near": near, "stranger": str(model_dir("qwen3")), "heads": heads}


def _cluster(directory: str, dtype: str, num_guesses: int, draft: str = "", **more: Any) -> LocalCluster:
    changes = more.pop("worker_changes", {})
    pages = {"num_pages": more.pop("decode_pages", 96)}
    return LocalCluster(
        directory,
        engine=engine_with(dtype=dtype, speculative_model=draft if "mixed" in more else ""),
        decode_engine=engine_with(dtype=dtype, speculative_model=draft, **pages),
        worker=worker_with(num_speculative_tokens=num_guesses, prompt_lookup_min=1, **changes),
        router=ROUTER,
        **more,
    )


def _said(completions: Sequence[Completion]) -> list[Any]:
    return [each.choices for each in completions]


async def _plain(directory: str, dtype: str) -> list[Any]:
    """Without speculation."""
    if (directory, dtype) not in PLAIN:
        async with _cluster(directory, dtype, 0) as cluster, AsyncClient(cluster.endpoint) as client:
            answers = await _all(client)
            assert _accepted(answers) == counters(cluster)["drafted_tokens"] == 0
        PLAIN[directory, dtype] = _said(answers)
    return PLAIN[directory, dtype]


def _accepted(completions: Sequence[Completion]) -> int:
    timelines = [each.timeline for each in completions if each.timeline is not None]
    assert len(timelines) == len(completions)
    assert all(0 <= each.accepted_tokens <= each.drafted_tokens for each in timelines)
    return sum(each.accepted_tokens for each in timelines)


@pytest.mark.parametrize(
    ("name", "dtype", "by"),
    [
        *(("llama", dtype, by) for dtype in ("float32", "bfloat16") for by in ("lookup", "near", "stranger", "heads")),
        ("mixtral", "float32", "lookup"),
    ],
)
async def test_the_tokens_are_those_without_speculation(
    name: str, dtype: str, by: str, model_dir: ModelDir, drafts: dict[str, str]
) -> None:
    directory = str(model_dir(name))
    plain = await _plain(directory, dtype)
    cluster = _cluster(directory, dtype, GUESSES, drafts[by])
    async with cluster, AsyncClient(cluster.endpoint) as client:
        guessed = await _all(client)
        totals = counters(cluster) | {"decode_steps": cluster.decode[0].counters["steps"]}
        assert _accepted(guessed) == totals["accepted_tokens"] > 0
        assert totals["drafted_tokens"] > totals["accepted_tokens"]
        alone = await _run(client, 1)
        steps, accepted = cluster.decode[0].counters["steps"] - totals["decode_steps"], _accepted([alone])
        assert steps == NEW_TOKENS - 1 - accepted
        assert by != "near" or totals["accepted_tokens"] > 0.25 * totals["drafted_tokens"]
    assert _said([alone]) == plain[1:2]
    assert _said(guessed) == plain


@pytest.mark.parametrize("by", ["lookup", "near", "heads"])
@pytest.mark.parametrize(
    "roles",
    [{"prefill": 2, "decode": 2, "decode_pages": 9}, {"prefill": 0, "decode": 0, "mixed": 1}],
    ids=["crowded", "mixed"],
)
async def test_wherever_it_runs_it_is_the_same_and_replays(
    roles: dict[str, Any], by: str, model_dir: ModelDir, drafts: dict[str, str], tmp_path: Path
) -> None:
    changes = {"max_batch_tokens": 20, "record": str(tmp_path)}
    cluster = _cluster(str(model_dir("llama")), "float32", GUESSES, drafts[by], worker_changes=changes, **roles)
    async with cluster, AsyncClient(cluster.endpoint) as client:
        answers = await _all(client)
        await cluster.settled()
        cluster.check_invariants()
        assert roles["decode"] or counters(cluster)["preemptions"] == 0  # a crowd may come one by one
    assert _said(answers) == await _plain(str(model_dir("llama")), "float32")
    assert _accepted(answers) > 0
    replays(*(tmp_path / f"{worker.options.name}.jsonl" for worker in cluster.workers))


@pytest.mark.parametrize("by", ["lookup", "near", "heads"])
@pytest.mark.parametrize("way", ["it drains", "it is lost"])
async def test_who_leaves_a_worker_has_the_same_tokens_elsewhere(
    way: str, by: str, model_dir: ModelDir, drafts: dict[str, str]
) -> None:
    two = _cluster(str(model_dir("llama")), "float32", GUESSES, drafts[by], decode=2)
    async with two as cluster, AsyncClient(cluster.endpoint) as client:
        first = cluster.decode[0]
        gate = Gate(first.engine, at=8)
        running = asyncio.create_task(_all(client))
        await gate.reached()
        held = len(first.role.requests)
        assert held > 0
        await leave(first, gate, drains=way == "it drains")
        answers = await running
        await cluster.settled()
        cluster.check_invariants()
    assert _said(answers) == await _plain(str(model_dir("llama")), "float32")
    assert _accepted(answers) > 0
    timelines = [each.timeline for each in answers if each.timeline is not None]
    if way == "it drains":
        assert sum(each.moves for each in timelines) > 0
        assert {each.attempts for each in timelines} == {1}
    else:
        assert sum(each.attempts for each in timelines) >= len(answers) + held
