"""The engine on a GPU says what transformers' own eager model says, and the same under every way of running it."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import transformers

from engine.engine import Engine
from engine.options import EngineOptions
from engine.types import Chunk, SampleSpec, SamplingParams, Step
from tests.engine.test_engine import greedy, page_tables, prompts
from tests.gpu.conftest import MODELS

LENGTHS, NEW = (70, 5, 1, 33, 16), 12
TIE = 0.15  # of the logits' spread: rounding in bfloat16 may turn two tokens so close


def load(directory: str, **options: object) -> Engine:
    values = {"dtype": "bfloat16", "num_pages": 256, "device": "cuda:0", "max_graph_batch": 8, **options}
    return Engine.load(EngineOptions(model=directory, **values))  # type: ignore[arg-type]


def eager_model(directory: str) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype="bfloat16")
    assert model.config._attn_implementation == "eager", "its fused attention leaves Gemma 2's soft cap out"
    return model


def assert_greedy(directory: str, prompt: list[int], tokens: list[int]) -> None:
    """Every token is the eager model's likeliest after those before it, or within a tie of it."""
    with torch.no_grad():
        logits = eager_model(directory).to("cuda:0")(torch.tensor([prompt + tokens], device="cuda:0")).logits[0].float()
    for i, token in enumerate(tokens):
        row = logits[len(prompt) + i - 1]
        assert float(row.max() - row[token]) <= TIE * float(row.std()), f"token {i} is no tie"


# From the plainest way to that which serves: the first that fails says where to look.
WAYS: dict[str, dict[str, Any]] = {
    "the reference attention": {"attention": "torch", "cuda_graphs": False},
    "without graphs": {"cuda_graphs": False},
    "with graphs": {},
    "larger pages": {"page_size": 32},
}


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS.keys())
def test_every_way_of_running_gives_the_eager_model_s_tokens(
    directories: dict[str, str], options: dict[str, Any]
) -> None:
    engine = load(directories["llama"], **options)
    for prompt, tokens in zip(prompts(LENGTHS), greedy(engine, prompts(LENGTHS), NEW, chunk=16), strict=True):
        assert_greedy(directories["llama"], prompt, tokens)


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"llama"}))
def test_greedy_tokens_are_the_eager_model_s_or_ties(directories: dict[str, str], name: str) -> None:
    engine = load(directories[name])
    for prompt, tokens in zip(prompts(LENGTHS), greedy(engine, prompts(LENGTHS), NEW, chunk=16), strict=True):
        assert_greedy(directories[name], prompt, tokens)


def test_float32_runs_on_the_reference(directories: dict[str, str]) -> None:
    engine = load(directories["llama"], dtype="float32", attention="auto")
    assert engine.backend.name == "torch"
    on_cpu = Engine.load(EngineOptions(model=directories["llama"], dtype="float32", num_pages=64, device="cpu"))
    lengths = (20, 9)
    assert greedy(engine, prompts(lengths), 6, chunk=64) == greedy(on_cpu, prompts(lengths), 6, chunk=64)


def test_kv_of_one_engine_continues_in_another(directories: dict[str, str]) -> None:
    prefill, decode = load(directories["llama"]), load(directories["llama"])
    assert prefill.info == decode.info
    [ids] = prompts((40,))
    spec = SampleSpec(params=SamplingParams(temperature=0.0), position=40)
    chunk = Chunk(request_id="a", token_ids=ids, start=0, block_table=[5, 9, 7], sample=spec)
    [first] = prefill.step(Step(chunks=[chunk]))
    for layer in range(prefill.layout.num_layers):
        decode.memory.k(layer)[[20, 30, 10]] = prefill.memory.k(layer)[[5, 9, 7]]
        decode.memory.v(layer)[[20, 30, 10]] = prefill.memory.v(layer)[[5, 9, 7]]
    tokens = [first.token_id]
    for position in range(40, 47):
        spec = SampleSpec(params=SamplingParams(temperature=0.0), position=position + 1)
        rest = Chunk(request_id="a", token_ids=tokens[-1:], start=position, block_table=[20, 30, 10], sample=spec)
        tokens += [token.token_id for token in decode.step(Step(chunks=[rest]))]
    assert_greedy(directories["llama"], ids, tokens)


def test_pages_fill_this_process_s_share_of_the_memory(directories: dict[str, str]) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    share = torch.cuda.memory_reserved() / total + 0.15
    engine = load(directories["llama"], num_pages=None, gpu_memory_utilization=share)
    assert torch.cuda.memory_reserved() / total <= share
    assert engine.layout.total_bytes > 0.05 * total


def test_an_event_recorded_in_on_layer_marks_the_layer_s_pages(directories: dict[str, str]) -> None:
    engine = load(directories["llama"])
    [ids] = prompts((200,))
    [table] = page_tables(engine, [200])
    side = torch.cuda.Stream()
    copies: list[torch.Tensor] = []

    def copy(layer: int) -> None:
        ready = torch.cuda.current_stream().record_event()
        with torch.cuda.stream(side):
            side.wait_event(ready)
            copies.append(engine.memory.k(layer)[table].clone())

    torch.cuda._sleep(100_000_000)
    engine.begin(
        Step(chunks=[Chunk(request_id="a", token_ids=ids, start=0, block_table=table)], on_layer=copy)
    ).result()
    side.synchronize()
    for layer, copied in enumerate(copies):
        assert torch.equal(copied, engine.memory.k(layer)[table])
