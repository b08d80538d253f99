"""Frequencies that go by a request's length, whoever runs beside it: on a CPU, on a GPU's way, in several processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from engine.engine import Engine
from engine.errors import UnsupportedModel
from engine.options import EngineOptions
from engine.types import LengthRope
from engine.weights import ropes
from engine.weights.config import length_rope, resolve_max_len
from tests.engine.rehearsal import rehearse
from tests.engine.test_engine import save
from tests.engine.test_zoo import MAX_LEN, NUM_PAGES, PAGE_SIZE, generated, served
from tests.forked import forked_ranks
from tests.zoo import LENGTH_ROPES, LONGROPE, ROPE_LIMIT, VOCAB, make_tiny_model

__all__ = ["forked_ranks"]

LENGTHS = (1, 30, 38, 39, 40, 41, 60, 100)  # with 16 more: below the limit of 40, on it, across, and above
SMALL: dict[str, Any] = {
    "dtype": "float32",
    "page_size": PAGE_SIZE,
    "num_pages": NUM_PAGES,
    "max_model_len": MAX_LEN,
    "threads": 1,
}


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(5, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]


@pytest.mark.parametrize("name", LENGTH_ROPES)
def test_a_gpu_s_steps_and_graphs_give_transformers_tokens(name: str, tmp_path: Path) -> None:
    directory = make_tiny_model(name, tmp_path)
    assert served(rehearse(str(directory), **SMALL), prompts()) == generated(directory, prompts())


@pytest.mark.parametrize("name", ["llama_dynamic_rope", "llama_longrope"])
def test_several_processes_give_transformers_tokens(name: str, tmp_path: Path) -> None:
    directory = make_tiny_model(name, tmp_path)
    engine = Engine.load(EngineOptions(model=str(directory), tensor_parallel=2, **SMALL))
    try:
        assert served(engine, prompts()) == generated(directory, prompts())
    finally:
        engine.close()


def test_a_row_s_bits_do_not_depend_on_those_beside_it(tmp_path: Path) -> None:
    engine = Engine.load(EngineOptions(model=str(make_tiny_model("llama_dynamic_rope", tmp_path)), **SMALL))
    [ours] = [m.forward for m in engine.model.module.modules() if hasattr(m, "original_inv_freq")]
    lengths = torch.arange(1, 200)
    x = torch.zeros(1, 1, 1)
    together = ours.turned(x, lengths[None] - 1, lengths)
    for at in (0, 39, 40, 41, 198):
        alone = ours.turned(x, lengths[None, at : at + 1] - 1, lengths[at : at + 1])
        assert all(torch.equal(a[0, 0], b[0, at]) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("config_class", ["Phi3Config", "LlamaConfig"])
def test_the_parity_check_goes_beyond_a_limit_that_is_near(config_class: str, tmp_path: Path) -> None:
    near: dict[str, Any] = {"original_max_position_embeddings": 20}
    directory = save(tmp_path, config_class, rope_parameters=LONGROPE | near, **near)
    engine = Engine.load(EngineOptions(model=directory, **SMALL))
    assert engine.info.rope == LengthRope(limit=20, is_dynamic=False, is_anew=config_class == "Phi3Config")


def test_up_to_the_limit_nothing_goes_by_the_length(tmp_path: Path) -> None:
    directory = make_tiny_model("phi3_longrope", tmp_path)
    engine = Engine.load(EngineOptions(model=str(directory), **SMALL | {"max_model_len": ROPE_LIMIT}))
    assert engine.info.rope is None


def test_a_module_that_takes_one_length_for_all_is_refused_beyond_the_limit(tmp_path: Path) -> None:
    rope = LONGROPE | {"short_mscale": 1.0, "long_mscale": 1.2}
    directory = save(tmp_path, "PhimoeConfig", num_local_experts=2, rope_parameters=rope)
    with pytest.raises(UnsupportedModel, match=r"PhimoeRotaryEmbedding turns .*; set max_model_len to at most 40"):
        Engine.load(EngineOptions(model=directory, **SMALL))
    Engine.load(EngineOptions(model=directory, **SMALL | {"max_model_len": 40}))


def test_dynamic_ropes_stretch_the_positions() -> None:
    config = LlamaConfig(
        max_position_embeddings=64, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    )
    assert resolve_max_len(None, config) == 64
    assert length_rope(config, 64) is None
    assert resolve_max_len(128, config) == 128
    assert length_rope(config, 128) == LengthRope(limit=64, is_dynamic=True, is_anew=False)
    with pytest.raises(ValueError, match="max_model_len is 129, but the model has 128 positions"):
        resolve_max_len(129, config)


@pytest.mark.parametrize("name", ["llama_dynamic_rope", "llama_longrope"])
def test_what_turns_rows_goes_with_its_model_to_another_device(name: str, tmp_path: Path) -> None:
    engine = Engine.load(EngineOptions(model=str(make_tiny_model(name, tmp_path)), parity_check=False, **SMALL))
    ropes.move(engine.model.module, torch.device("meta"))
    [ours] = [m.forward for m in engine.model.module.modules() if hasattr(m, "original_inv_freq")]
    held = [value for value in vars(ours).values() if isinstance(value, torch.Tensor)]
    assert {value.device.type for value in held} == {ours.device.type} == {"meta"}
    assert len(held) == (3 if name == "llama_dynamic_rope" else 2)
