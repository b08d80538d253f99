"""The engine keeps the promise: the same tokens, to the last bit of the logits, however a request is run."""

from __future__ import annotations

import json
import logging
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.engine import Engine
from engine.options import EngineOptions
from engine.types import Chunk, SampledToken, SampleSpec, SamplingParams, Step

VOCAB = 160
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODELS = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "mistral": ("MistralConfig", {"sliding_window": 20}),
    "gpt2": ("GPT2Config", {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 256}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "deepseek": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
    ),
}
LENGTHS = (70, 5, 1, 33, 16, 17, 40, 2)


def save(directory: Path, config_class: str, **changes: object) -> str:
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**{**SHAPE, **changes})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {
        name: save(tmp_path_factory.mktemp(name), config_class, **changes)
        for name, (config_class, changes) in MODELS.items()
    }


def load(directory: str, dtype: str = "float32", **options: object) -> Engine:
    return Engine.load(EngineOptions(model=directory, dtype=dtype, num_pages=64, **options))  # type: ignore[arg-type]


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def page_tables(engine: Engine, lengths: list[int]) -> list[list[int]]:
    free = list(range(engine.layout.num_pages))
    return [[free.pop() for _ in range(-(-n // engine.layout.page_size))] for n in lengths]


def all_logits(engine: Engine, sequences: list[list[int]], chunk: int, together: bool) -> list[torch.Tensor]:
    """Of every position of every sequence, run in chunks of so many tokens, in one batch or one after another."""
    tables = page_tables(engine, [len(s) for s in sequences])
    parts: list[list[torch.Tensor]] = [[] for _ in sequences]
    batches = [list(range(len(sequences)))] if together else [[i] for i in range(len(sequences))]
    for batch in batches:
        for start in range(0, max(len(sequences[i]) for i in batch), chunk):
            chunks = [
                Chunk(request_id=str(i), token_ids=ids, start=start, block_table=tables[i])
                for i in batch
                if (ids := sequences[i][start : start + chunk])
            ]
            with torch.inference_mode():
                logits = engine.model.forward(engine.pages, chunks)
            row = 0
            for c in chunks:
                parts[int(c.request_id)].append(logits[row : row + len(c.token_ids)])
                row += len(c.token_ids)
    return [torch.cat(p) for p in parts]


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_the_same_bits_in_any_batch_and_chunking(directories: dict[str, str], name: str, kind: str) -> None:
    weights = {"dtype": "bfloat16", "quantization": "int8"} if kind == "int8" else {"dtype": kind}
    engine = load(directories[name], **weights)
    wanted = all_logits(engine, prompts(), chunk=512, together=False)
    for chunk, together in ((512, True), (1, False), (1, True), (7, True)):
        got = all_logits(engine, prompts(), chunk, together)
        for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
            assert torch.equal(a, b), f"prompt {i} in chunks of {chunk}, together={together}"


def test_int8_is_held_against_the_rounded_weights_and_says_what_they_cost(
    directories: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "engine.loading.load")
    plain, rounded = load(directories["llama"], "bfloat16"), load(directories["llama"], "bfloat16", quantization="int8")
    assert re.search(r"15 linear layers are in int8: logits differ from those in bfloat16 by \d", caplog.text)
    assert rounded.info.fingerprint != plain.info.fingerprint
    linear_bytes = plain.info.weight_bytes - 2 * 2 * VOCAB * 64  # all but embedding and norms, about
    assert plain.info.weight_bytes - rounded.info.weight_bytes > 0.4 * linear_bytes
    errors = [
        float((a.double() - b.double()).norm() / b.double().norm())
        for a, b in zip(*(all_logits(e, prompts(), 512, True) for e in (rounded, plain)), strict=True)
    ]
    assert 0 < max(errors) < 0.3


def test_an_embedding_that_is_the_head_too_keeps_its_width(tmp_path: Path) -> None:
    directory = save(tmp_path, "LlamaConfig", tie_word_embeddings=True)
    plain, rounded = load(directory, "bfloat16"), load(directory, "bfloat16", quantization="int8")
    ids = torch.arange(VOCAB)
    mine, theirs = (engine.model.module.get_input_embeddings()(ids) for engine in (rounded, plain))
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"dtype": "float32"},
            "quantization is 'int8', which is for bfloat16 on CPUs with a C.. compiler, not torch.f",
        ),
        ({"dtype": "bfloat16", "tensor_parallel": 2}, "quantization is 'int8' with tensor_parallel 2; give one of the"),
    ],
)
def test_int8_is_refused_where_it_cannot_be(directories: dict[str, str], options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load(directories["llama"], quantization="int8", **options)


def test_logits_are_the_same_bits_on_one_thread_and_two(directories: dict[str, str]) -> None:
    engine = load(directories["llama"], "bfloat16")
    before = torch.get_num_threads()
    try:
        by_threads = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            by_threads.append(all_logits(engine, prompts(), chunk=16, together=True))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*by_threads, strict=True))


def greedy(engine: Engine, sequences: list[list[int]], new_tokens: int, chunk: int) -> list[list[int]]:
    """Continuous batching in its simplest form: every unfinished request takes part in every step."""
    tables = page_tables(engine, [len(s) + new_tokens for s in sequences])
    done = [0] * len(sequences)
    out: list[list[int]] = [[] for _ in sequences]
    while any(len(o) < new_tokens for o in out):
        chunks = []
        for i, prompt in enumerate(sequences):
            if len(out[i]) == new_tokens:
                continue
            ids = (prompt + out[i])[done[i] : done[i] + chunk]
            done[i] += len(ids)
            is_last = done[i] == len(prompt) + len(out[i])
            spec = SampleSpec(params=SamplingParams(temperature=0.0), position=done[i]) if is_last else None
            start = done[i] - len(ids)
            chunks.append(Chunk(request_id=str(i), token_ids=ids, start=start, block_table=tables[i], sample=spec))
        for token in engine.step(Step(chunks=chunks)):
            out[int(token.request_id)].append(token.token_id)
    return out


@pytest.mark.parametrize("attention", ["torch", "native"])
@pytest.mark.parametrize("name", ["llama", "mistral", "deepseek"])
def test_greedy_tokens_are_those_of_generate(directories: dict[str, str], name: str, attention: str) -> None:
    engine = load(directories[name], attention=attention)
    model = transformers.AutoModelForCausalLM.from_pretrained(directories[name])
    wanted = [
        model.generate(torch.tensor([p]), max_new_tokens=12, min_new_tokens=12, do_sample=False)[0, len(p) :].tolist()
        for p in prompts()
    ]
    assert greedy(engine, prompts(), new_tokens=12, chunk=16) == wanted


def test_a_step_samples_where_it_is_asked_to_and_reports_layers_in_order(directories: dict[str, str]) -> None:
    engine = load(directories["llama"])
    layers: list[tuple[int, int]] = []
    spec = SampleSpec(params=SamplingParams(temperature=0.0, logprobs=2), position=3)
    chunks = [
        Chunk(request_id="quiet", token_ids=[5, 6], start=0, block_table=[3]),
        Chunk(request_id="asks", token_ids=[7, 8, 9], start=0, block_table=[1], sample=spec),
    ]

    tokens = engine.step(Step(chunks=chunks, on_layer=lambda layer: layers.append((layer, threading.get_ident()))))

    assert [t.request_id for t in tokens] == ["asks"]
    assert len(tokens[0].top_logprobs) == 2
    assert layers == [(i, threading.get_ident()) for i in range(engine.info.num_layers)]
    assert engine.step(Step(chunks=chunks[:1])) == []
    assert engine.step(Step(chunks=())) == []


def test_kv_stands_in_its_pages_when_a_layer_is_reported(directories: dict[str, str]) -> None:
    engine = load(directories["llama"], "bfloat16")
    seen: list[torch.Tensor] = []

    def copy_pages(layer: int) -> None:
        seen.append(torch.stack([engine.memory.k(layer)[[4, 2]], engine.memory.v(layer)[[4, 2]]]))

    ids = prompts((20,))[0]
    engine.step(Step(chunks=[Chunk(request_id="a", token_ids=ids, start=0, block_table=[4, 2])], on_layer=copy_pages))
    for layer, pages in enumerate(seen):
        assert pages[:, 0].abs().sum(-1).gt(0).all(), f"layer {layer}: a token of the first page is missing"
        assert pages[:, 1, :4].abs().sum(-1).gt(0).all(), f"layer {layer}: a token of the second page is missing"
        assert not pages[:, 1, 4:].any(), f"layer {layer}: something was written past the end"


def test_kv_of_one_engine_continues_in_another(directories: dict[str, str]) -> None:
    prefill, decode = load(directories["llama"], "bfloat16"), load(directories["llama"], "bfloat16")
    assert prefill.info == decode.info
    ids = prompts((40,))[0]
    spec = SampleSpec(params=SamplingParams(temperature=0.0), position=41)
    whole = Chunk(request_id="a", token_ids=[*ids, 9], start=0, block_table=[0, 1, 2], sample=spec)
    wanted: list[SampledToken] = decode.step(Step(chunks=[whole]))

    prefill.step(Step(chunks=[Chunk(request_id="a", token_ids=ids, start=0, block_table=[5, 9, 7])]))
    for layer in range(prefill.layout.num_layers):
        decode.memory.k(layer)[[20, 30, 10]] = prefill.memory.k(layer)[[5, 9, 7]]
        decode.memory.v(layer)[[20, 30, 10]] = prefill.memory.v(layer)[[5, 9, 7]]
    rest = Chunk(request_id="a", token_ids=[9], start=40, block_table=[20, 30, 10], sample=spec)
    assert decode.step(Step(chunks=[rest])) == wanted


def test_fingerprints_tell_weights_apart(directories: dict[str, str], tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(directories["llama"])
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[7, 7] += 1.0  # neither at its beginning nor at its end
    model.save_pretrained(tmp_path)
    assert load(str(tmp_path)).info.fingerprint != load(directories["llama"]).info.fingerprint


@pytest.mark.parametrize(("given", "kept"), [(-1, ()), ([2, VOCAB, -5], (2,)), ([], ()), (None, (2,))])
def test_ids_that_end_an_answer_are_ids_of_the_model(tmp_path: Path, given: object, kept: tuple[int, ...]) -> None:
    directory = save(tmp_path, "LlamaConfig")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": given}))
    assert load(directory).info.eos_token_ids == kept


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_new_tokens": 7},
            {"temperature": 0.6, "top_p": 0.9},
        ),
        ({"repetition_penalty": 1.2, "top_k": 20}, {"repetition_penalty": 1.2, "top_k": 20}),
        ({"temperature": -1.0, "top_p": 0.9, "top_k": True}, {"top_p": 0.9}),  # nobody can draw so
        ({"top_k": 20.0, "min_p": 0.1}, {"top_k": 20, "min_p": 0.1}),
        ({"top_k": 2**40}, {"top_k": VOCAB}),
        ({"top_k": -1}, {}),
        ({}, {}),
    ],
)
def test_how_a_model_is_usually_drawn_from_is_read_with_it(
    tmp_path: Path, given: dict[str, object], kept: dict[str, float]
) -> None:
    directory = save(tmp_path, "LlamaConfig")
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    assert load(directory).info.usual_sampling == kept
    assert Engine.load(EngineOptions(model=directory, num_pages=8, generation_config="none")).info.usual_sampling == {}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"suppress_tokens": [5], "num_beams": 4, "top_k": 20, "pad_token_id": 0}, "has suppress_tokens, num_beams, "),
        ({"num_beams": 1, "min_length": 0, "typical_p": None, "top_k": 20, "use_cache": True}, ""),
    ],
)
def test_what_is_not_gone_by_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, given: dict[str, object], told: str
) -> None:
    directory = save(tmp_path, "LlamaConfig")
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    assert load(directory).info.usual_sampling == {"top_k": 20}
    warnings = [record.getMessage() for record in caplog.records if record.name == "engine.weights.loader"]
    assert [told in warning for warning in warnings] == ([True] if told else [])


def test_progress_goes_through_the_stages_in_order(directories: dict[str, str]) -> None:
    stages: list[str] = []
    Engine.load(
        EngineOptions(model=directories["llama"], num_pages=8),
        progress=lambda stage, fraction: stages.append(stage) if stage not in stages else None,
    )
    assert stages == ["weights", "kernels", "parity check", "ready"]
