"""A LoRA adapter changes the model as PEFT's merged weights do, for its own rows of a step and for no others, and a
row's bits do not depend on who stands beside it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.adapters.files import AdapterError
from engine.adapters.weights import load_weights
from engine.engine import Engine
from engine.options import EngineOptions
from engine.types import Adapter, Chunk, SampleSpec, SamplingParams, Step
from tests.adapters import KINDS, adapter_at, make_adapter, merged
from tests.zoo import make_tiny_model

PROMPT = [5 + (7 * i * i) % 500 for i in range(41)]
PAGES = 3  # of a prompt
MODELS = ("llama", "gpt2", "mixtral", "gemma2", "bloom", "falcon", "qwen3_next")
TARGETS = {
    "gpt2": ["c_attn", "c_fc"],
    "mixtral": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "qwen3_next": ["q_proj", "k_proj", "v_proj", "o_proj"],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: make_tiny_model(name, folder / name) for name in MODELS}


@pytest.fixture(scope="module")
def adapters(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of the llama, by kind."""
    folder = tmp_path_factory.mktemp("adapters")
    return {kind: make_adapter(models["llama"], kind, folder / kind, seed) for seed, kind in enumerate(KINDS)}


def load(model: Path, dtype: str = "float32", **changes: object) -> Engine:
    options = EngineOptions(model=str(model), num_pages=32, threads=2, parity_check=False, max_model_len=256)
    return Engine.load(replace(options, **{"dtype": dtype, **changes}))  # type: ignore[arg-type]


def chunk(adapter: Adapter | None, place: int = 0, token_ids: Sequence[int] = PROMPT, start: int = 0) -> Chunk:
    pages = range(place * PAGES, place * PAGES + PAGES)
    return Chunk(request_id=str(place), token_ids=token_ids, start=start, block_table=pages, adapter=adapter)


def logits(engine: Engine, *chunks: Chunk) -> list[torch.Tensor]:
    """Of each chunk's rows."""
    lengths = [len(each.token_ids) for each in chunks]
    with torch.inference_mode(), engine.adapters.of(chunks):
        rows = engine.model.forward(engine.pages, chunks)[: sum(lengths)]
    return [each.float().clone() for each in rows.split(lengths)]


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-5), ("bfloat16", 0.06)])
def test_each_row_is_as_pefts_merged_model_has_it(
    models: dict[str, Path], adapters: dict[str, Path], dtype: str, most: float
) -> None:
    engine = load(models["llama"], dtype)
    kinds = [None, *adapters]
    chunks = [chunk(adapter_at(adapters[kind]) if kind else None, i) for i, kind in enumerate(kinds)]
    together = logits(engine, *chunks)
    for kind, each, rows in zip(kinds, chunks, together, strict=True):
        reference = merged(models["llama"], adapters[kind] if kind else None)
        with torch.inference_mode():
            wanted = reference(torch.tensor([PROMPT])).logits[0]
        assert error(rows, wanted) < most, kind
        assert kind is None or error(rows, together[0]) > 0.2, f"{kind} changes next to nothing"
        assert torch.equal(rows, logits(engine, each)[0]), "its bits depend on who stands beside it"


def test_a_row_has_the_same_bits_however_its_prompt_is_cut(models: dict[str, Path], adapters: dict[str, Path]) -> None:
    engine = load(models["llama"], "bfloat16")
    adapter = adapter_at(adapters["everywhere"])
    [whole] = logits(engine, chunk(adapter))
    first = logits(engine, chunk(adapter, 0, PROMPT[:17]), chunk(None, 1))[0]
    singles = [logits(engine, chunk(adapter, 0, [PROMPT[i]], i))[0] for i in range(17, len(PROMPT))]
    assert torch.equal(torch.cat([first, *singles]), whole)


@pytest.mark.parametrize("name", MODELS[1:])
def test_layers_that_are_not_fused_are_adapted_too(models: dict[str, Path], name: str, tmp_path: Path) -> None:
    kind = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS.get(name, "all-linear")}
    directory = make_adapter(models[name], kind, tmp_path / "lora")
    with torch.inference_mode():
        wanted = merged(models[name], directory)(torch.tensor([PROMPT])).logits[0]
    for attention in ("native", "torch"):
        [ours] = logits(load(models[name], attention=attention), chunk(adapter_at(directory)))
        assert error(ours, wanted) < 1e-5, attention


def test_by_torch_it_is_the_same(
    models: dict[str, Path], adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU."""
    chunks = [chunk(adapter_at(path), i) for i, path in enumerate(adapters.values())]
    ours = logits(load(models["llama"], attention="torch"), *chunks)
    monkeypatch.setattr("engine.loading.load.has_kernels", lambda *_: False)
    by_torch = logits(load(models["llama"], attention="torch"), *chunks)
    assert max(error(a, b) for a, b in zip(ours, by_torch, strict=True)) < 1e-5


def test_with_weights_in_int8_it_is_beside_what_those_say(models: dict[str, Path], adapters: dict[str, Path]) -> None:
    engine = load(models["llama"], "bfloat16", quantization="int8")
    base, changed = logits(engine, chunk(None), chunk(adapter_at(adapters["everywhere"]), 1))
    with torch.inference_mode():
        wanted = merged(models["llama"], adapters["everywhere"])(torch.tensor([PROMPT])).logits[0]
    assert error(changed, wanted) < 0.1 < error(base, wanted)


def test_the_last_used_are_kept_and_those_that_somebody_holds(models: dict[str, Path], tmp_path: Path) -> None:
    paths = [make_adapter(models["llama"], "usual", tmp_path / str(i), seed=i) for i in range(4)]
    engine, all_four = load(models["llama"], max_adapters=2), [adapter_at(path) for path in paths]
    digests = [adapter.digest for adapter in all_four]
    alone = [logits(engine, chunk(adapter))[0] for adapter in all_four]
    assert engine.adapters.digests == set(digests[2:])
    together = logits(engine, *(chunk(adapter, i) for i, adapter in enumerate(all_four)))
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
    held = [engine.adapters.begin(adapter) for adapter in all_four]
    assert [each.result(timeout=60).digest for each in held] == digests
    assert engine.adapters.digests == set(digests)
    loads = engine.adapters.num_loads
    for adapter in all_four:
        logits(engine, chunk(adapter))
    assert engine.adapters.num_loads == loads, "what is held is read once"
    held.clear()
    assert engine.adapters.digests == set(digests[2:])


def test_a_step_does_not_wait_for_another_adapter_that_is_being_loaded(
    models: dict[str, Path], adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, first, second = load(models["llama"]), adapter_at(adapters["usual"]), adapter_at(adapters["odd"])
    [before] = logits(engine, chunk(first))
    gate = threading.Event()

    def slow(*args: Any, **kwargs: Any) -> Any:
        assert gate.wait(60)
        return load_weights(*args, **kwargs)

    monkeypatch.setattr("engine.adapters.store.load_weights", slow)
    one, other = engine.adapters.begin(second), engine.adapters.begin(second)
    assert one is other, "it is loaded once, whoever asks"
    assert torch.equal(logits(engine, chunk(first))[0], before)
    assert not one.done()
    gate.set()
    assert one.result(timeout=60).digest == second.digest


def test_where_no_thread_is_to_be_had_one_load_fails_and_the_next_is_tried(
    models: dict[str, Path], adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, adapter = load(models["llama"]), adapter_at(adapters["usual"])

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        failed = engine.adapters.begin(adapter)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        failed.result(timeout=1)
    assert engine.adapters.begin(adapter).result(timeout=60).digest == adapter.digest


def test_what_sees_a_part_of_the_rows_cannot_be_adapted(tmp_path: Path) -> None:
    """A head's own layers see the rows that have logits."""
    linears = load(make_tiny_model("modernbert_decoder", tmp_path / "head")).adapters.linears
    assert "lm_head.dense" not in {linear.name for linear in linears}
    assert len(linears) > 6


def test_what_computes_a_state_cannot_be_adapted(models: dict[str, Path], tmp_path: Path) -> None:
    kind = {"r": 4, "target_modules": ["in_proj_qkvz"]}
    adapter = adapter_at(make_adapter(models["qwen3_next"], kind, tmp_path / "lora"))
    with pytest.raises(AdapterError, match="in_proj_qkvz"):
        load(models["qwen3_next"]).adapters.load(adapter)


def test_a_linear_that_computes_in_float32_is_adapted_so(tmp_path: Path) -> None:
    """Of a model in bfloat16: a router."""
    model = make_tiny_model("hunyuan_v1_moe", tmp_path / "router")
    engine, kind = load(model, "bfloat16"), {"r": 4, "target_modules": ["wg", "o_proj"]}
    dtypes = {linear.name.rpartition(".")[2]: linear.dtype for linear in engine.adapters.linears}
    assert (dtypes["wg"], dtypes["o_proj"]) == (torch.float32, torch.bfloat16)
    directory = make_adapter(model, kind, tmp_path / "lora")
    base, changed = logits(engine, chunk(None), chunk(adapter_at(directory), 1))
    with torch.inference_mode():
        wanted = merged(model, directory)(torch.tensor([PROMPT])).logits[0]
    assert error(changed, wanted) < 0.5 * error(base, wanted)


def test_one_that_was_changed_since_is_not_taken_for_it(
    models: dict[str, Path], adapters: dict[str, Path], tmp_path: Path
) -> None:
    engine, before = load(models["llama"]), adapter_at(make_adapter(models["llama"], "usual", tmp_path / "a", seed=1))
    make_adapter(models["llama"], "usual", tmp_path / "a", seed=2)
    params = SamplingParams(temperature=0.0)
    bad = replace(chunk(before), sample=SampleSpec(params=params, position=len(PROMPT)))
    good = replace(chunk(adapter_at(adapters["usual"]), 1), sample=SampleSpec(params=params, position=len(PROMPT)))
    with pytest.raises(AdapterError, match="holds another one than when it was added; remove it, and add it again"):
        engine.step(Step(chunks=[bad, good]))
    [token] = engine.step(Step(chunks=[good]))
    assert not token.error


def test_one_of_another_model_is_refused_before_it_is_read(models: dict[str, Path], tmp_path: Path) -> None:
    engine = load(models["llama"])
    other = adapter_at(make_adapter(models["gpt2"], {"r": 4, "target_modules": ["c_attn"]}, tmp_path / "gpt2"))
    wide = adapter_at(make_adapter(make_tiny_model("qwen3", tmp_path / "qwen3"), "usual", tmp_path / "wide"))
    with pytest.raises(AdapterError, match=r"adapter 'gpt2' cannot be served: its directory changes transformer"):
        engine.adapters.check(other)
    with pytest.raises(AdapterError, match=r"changes model.layers.0.self_attn.\w+ from \d+ to \d+; the model's is"):
        engine.adapters.check(wide)
    assert not engine.adapters.digests
