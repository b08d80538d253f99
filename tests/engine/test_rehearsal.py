"""What an engine does on a GPU, rehearsed on a CPU: the same tokens, through other layers, tables, graphs and draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bench.gpu.engine import what_is_missing
from engine.engine import Engine
from engine.errors import UnsupportedModel
from engine.options import EngineOptions
from engine.types import PENDING, Chunk, SampledToken, SampleSpec, SamplingParams, Step
from tests.engine.rehearsal import rehearse
from tests.engine.test_engine import greedy, page_tables, prompts, save

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "mistral": ("MistralConfig", {"sliding_window": 20}),
    "gemma2": (
        "Gemma2Config",
        {"head_dim": 16, "sliding_window": 24},
    ),  # not of Llama's layers: only its norms are fused
    "gpt2": ("GPT2Config", {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 256}),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
}
WHOLE_MODEL_FUSED = {"llama", "qwen2", "qwen3", "mistral"}
SOME = ((70, 5, 1, 33, 16), 6)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {
        name: save(tmp_path_factory.mktemp(name), config_class, **changes)
        for name, (config_class, changes) in MODELS.items()
    }


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_generate(directories: dict[str, str], name: str) -> None:
    engine = rehearse(directories[name])
    model = transformers.AutoModelForCausalLM.from_pretrained(directories[name])
    lengths, new = SOME
    wanted = [
        model.generate(torch.tensor([p]), max_new_tokens=new, min_new_tokens=new, do_sample=False)[0, len(p) :].tolist()
        for p in prompts(lengths)
    ]
    assert greedy(engine, prompts(lengths), new_tokens=new, chunk=16) == wanted
    body = engine.model.module.base_model.forward
    assert (type(body).__name__ == "Decoder") == (name in WHOLE_MODEL_FUSED)


@pytest.mark.parametrize(
    ("fused", "graphs", "decode"), [(False, True, "xqa"), (True, False, "tensor"), (True, True, "cores")]
)
def test_every_way_gives_the_tokens_of_the_cpu_engine(
    directories: dict[str, str], fused: bool, graphs: bool, decode: str
) -> None:
    wanted_of = Engine.load(EngineOptions(model=directories["llama"], dtype="float32", num_pages=64))
    engine = rehearse(directories["llama"], fused=fused, cuda_graphs=graphs, decode=decode)
    assert engine.info == wanted_of.info
    lengths, new = SOME
    wanted = greedy(wanted_of, prompts(lengths), new, chunk=64)
    assert greedy(engine, prompts(lengths), new, chunk=64) == wanted


@pytest.mark.parametrize(("graphs", "missing"), [(True, ""), (False, "without CUDA graphs")])
def test_the_benchmark_says_what_an_engine_does_without(
    directories: dict[str, str], graphs: bool, missing: str
) -> None:
    found = what_is_missing(rehearse(directories["llama"], cuda_graphs=graphs))
    assert missing in found
    assert bool(found) == bool(missing)


def counted_replays(engine: Engine) -> list[int]:
    steps: Any = engine.steps
    graphs = steps.graphs
    replays: list[int] = []
    original = graphs.replay

    def replay(chunks: list[Chunk], known: object) -> torch.Tensor:
        replays.append(len(chunks))
        logits: torch.Tensor = original(chunks, known)
        return logits

    graphs.replay = replay
    return replays


def test_decode_steps_replay_and_a_dummy_row_touches_no_request_s_page(directories: dict[str, str]) -> None:
    engine = rehearse(directories["llama"])
    replays = counted_replays(engine)
    lengths = (20, 9, 30)  # three rows in a graph of four
    for layer in range(engine.layout.num_layers):
        engine.memory.k(layer)[engine.layout.num_pages] = float("nan")
    out = greedy(engine, prompts(lengths), new_tokens=4, chunk=64)
    assert replays == [3, 3, 3]
    assert engine.memory.layout.num_pages == engine.layout.num_pages + 1
    used = {page for table in page_tables(engine, [n + 4 for n in lengths]) for page in table}
    untouched = [page for page in range(engine.layout.num_pages) if page not in used]
    for layer in range(engine.layout.num_layers):
        assert not engine.memory.k(layer)[untouched].any(), "a page that no request has was written"
        assert not engine.memory.k(layer)[engine.layout.num_pages, 0].isnan().any(), "the dummy rows stand elsewhere"
    assert all(len(tokens) == 4 for tokens in out)


def test_more_requests_than_the_largest_graph_run_without_one(directories: dict[str, str]) -> None:
    engine = rehearse(directories["llama"])
    replays = counted_replays(engine)
    five = greedy(engine, prompts((9, 8, 7, 6, 5)), new_tokens=3, chunk=64)
    assert replays == []
    assert greedy(engine, prompts((9, 8, 7, 6)), new_tokens=3, chunk=64) == five[:4]
    assert replays == [4, 4]


def overlapped(engine: Engine, prompt: list[int], params: SamplingParams, new_tokens: int) -> list[SampledToken]:
    """Every step is begun before the tokens of the one before it are asked for."""
    [table] = page_tables(engine, [len(prompt) + new_tokens])

    def step(ids: list[int], start: int) -> Step:
        spec = SampleSpec(params=params, position=start + len(ids))
        return Step(chunks=[Chunk(request_id="a", token_ids=ids, start=start, block_table=table, sample=spec)])

    begun = [engine.begin(step(prompt, 0))]
    tokens: list[SampledToken] = []
    for position in range(len(prompt), len(prompt) + new_tokens - 1):
        begun.append(engine.begin(step([PENDING], position)))
        tokens += begun.pop(0).result()
    return tokens + begun.pop().result()


@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0.0), SamplingParams(temperature=0.9, seed=11, top_p=0.9)]
)
@pytest.mark.parametrize("kind", ["cpu", "graphs", "no graphs"])
def test_a_step_begun_before_its_tokens_are_known_gives_the_same_ones(
    directories: dict[str, str], kind: str, params: SamplingParams
) -> None:
    if kind == "cpu":
        engine = Engine.load(EngineOptions(model=directories["llama"], dtype="float32", num_pages=64))
    else:
        engine = rehearse(directories["llama"], cuda_graphs=kind == "graphs")
    assert engine.can_overlap == (kind != "cpu")
    [prompt] = prompts((21,))
    [table] = page_tables(engine, [40])
    wanted: list[int] = []
    while len(wanted) < 7:  # each token known before the next step is made
        ids = prompt if not wanted else [wanted[-1]]
        start = 0 if not wanted else len(prompt) + len(wanted) - 1
        spec = SampleSpec(params=params, position=len(prompt) + len(wanted))
        chunk = Chunk(request_id="a", token_ids=ids, start=start, block_table=table, sample=spec)
        wanted += [token.token_id for token in engine.step(Step(chunks=[chunk]))]
    assert [token.token_id for token in overlapped(engine, prompt, params, 7)] == wanted


def test_a_pending_token_that_nobody_draws_is_an_error(directories: dict[str, str]) -> None:
    engine = rehearse(directories["llama"])
    chunk = Chunk(request_id="stranger", token_ids=[PENDING], start=3, block_table=[0])
    with pytest.raises(KeyError, match="stranger"):
        engine.begin(Step(chunks=[chunk]))


def test_a_row_that_is_not_finite_brings_an_error_and_the_others_their_tokens(directories: dict[str, str]) -> None:
    engine = rehearse(directories["llama"])
    spec = SampleSpec(params=SamplingParams(temperature=0.0), position=3)
    chunks = [Chunk(request_id=str(i), token_ids=[5, 6, 7], start=0, block_table=[i], sample=spec) for i in range(2)]
    good = engine.step(Step(chunks=chunks))
    engine.memory.v(0)[1] = float("nan")
    more = [
        Chunk(request_id=c.request_id, token_ids=[9], start=3, block_table=c.block_table,
              sample=SampleSpec(params=SamplingParams(temperature=0.0), position=4))
        for c in chunks
    ]  # fmt: skip
    fine, broken = engine.step(Step(chunks=more))
    assert all(not token.error for token in good)
    assert not fine.error
    assert "logits of row 1 hold NaN" in broken.error


def test_layers_are_reported_in_order_after_their_pages_are_written(directories: dict[str, str]) -> None:
    engine = rehearse(directories["qwen3"])
    written: list[bool] = []

    def look(layer: int) -> None:
        written.append(bool(engine.memory.v(layer)[7, :3].any()))

    engine.step(Step(chunks=[Chunk(request_id="a", token_ids=[5, 6, 7], start=0, block_table=[7])], on_layer=look))
    assert written == [True, True]


@pytest.mark.parametrize("rehearsed", [False, True])
def test_pages_in_fp8_serve_with_scales_that_the_fingerprint_holds(
    directories: dict[str, str], rehearsed: bool
) -> None:
    plain = Engine.load(EngineOptions(model=directories["llama"], num_pages=64, dtype="bfloat16"))
    options: dict[str, Any] = {"kv_dtype": "fp8_e4m3", "dtype": "bfloat16", "num_pages": 64}

    def load() -> Engine:
        if rehearsed:
            return rehearse(directories["llama"], **options)
        return Engine.load(EngineOptions(model=directories["llama"], **options))

    engine = load()
    assert engine.layout.dtype == "float8_e4m3fn"
    assert engine.layout.page_bytes() * 2 == plain.layout.page_bytes()
    assert engine.info.fingerprint != plain.info.fingerprint
    assert load().info.fingerprint == engine.info.fingerprint
    out = greedy(engine, prompts((20, 9)), new_tokens=4, chunk=64)
    assert [len(tokens) for tokens in out] == [4, 4]
    assert not torch.isnan(engine.memory.k(0).float()).any()


def test_fp8_through_the_native_backend_is_refused(directories: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="attention is 'native', which has no kernels for kv_dtype 'fp8_e4m3'"):
        Engine.load(EngineOptions(model=directories["llama"], kv_dtype="fp8_e4m3", attention="native", num_pages=8))


def test_a_model_that_fp8_spoils_is_refused(
    monkeypatch: pytest.MonkeyPatch, directories: dict[str, str], tmp_path: Path
) -> None:
    from engine.pages import fp8 as kv_fp8

    monkeypatch.setattr(kv_fp8, "scale_for", lambda largest: 2.0**40)  # everything underflows
    with pytest.raises(UnsupportedModel, match=r"kv_dtype is 'fp8_e4m3', but .* give kv_dtype: auto"):
        Engine.load(EngineOptions(model=directories["llama"], kv_dtype="fp8_e4m3", num_pages=8))
