"""A LoRA adapter changes the model as PEFT's merged weights do, for its own rows of a step and for no others, and a
row's bits do not depend on who stands beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.adapters.files import AdapterError
from engine.engine import Engine
from engine.options import EngineOptions
from engine.types import Adapter, Chunk, SampleSpec, SamplingParams, Step
from tests.adapters import KINDS, adapter_at, make_adapter, merged
from tests.zoo import make_tiny_model

PROMPT = [5 + (7 * i * i) % 500 for i in range(41)]
PAGES = 3  # of a prompt
MODELS = ("llama", "gpt2", "mixtral", "gemma2")
TARGETS = {"gpt2": ["c_attn", "c_fc"], "mixtral": ["q_proj", "k_proj", "v_proj", "o_proj"]}


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
    options = EngineOptions(model=str(model), dtype=dtype, num_pages=32, threads=2, parity_check=False)  # type: ignore[arg-type]
    return Engine.load(replace(options, **changes))  # type: ignore[arg-type]


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


def test_those_used_longest_ago_are_forgotten_but_never_one_of_the_step(
    models: dict[str, Path], tmp_path: Path
) -> None:
    paths = [make_adapter(models["llama"], "usual", tmp_path / str(i), seed=i) for i in range(4)]
    engine, all_four = load(models["llama"], max_adapters=2), [adapter_at(path) for path in paths]
    alone = [logits(engine, chunk(adapter))[0] for adapter in all_four]
    assert list(engine.adapters.names) == [adapter.digest for adapter in all_four[2:]]
    together = logits(engine, *(chunk(adapter, i) for i, adapter in enumerate(all_four)))
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
    assert len(engine.adapters.names) == 4
    logits(engine, chunk(adapter_at(make_adapter(models["llama"], "usual", tmp_path / "one more", seed=9))))
    assert len(engine.adapters.names) == 2


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
    with pytest.raises(AdapterError, match=r"adapter 'gpt2' cannot be served: .* changes transformer.h.0.attn.c_attn"):
        engine.adapters.expect(other)
    with pytest.raises(AdapterError, match=r"changes model.layers.0.self_attn.\w+ from \d+ to \d+; the model's is"):
        engine.adapters.expect(wide)
    assert not engine.adapters.names
