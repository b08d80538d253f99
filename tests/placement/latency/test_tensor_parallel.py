"""A degree is planned just where the engine loads it."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from engine.options import EngineOptions
from placement.catalogs.base import Degrees
from placement.catalogs.roofline import RooflineCatalog
from placement.latency.hardware import load_hardware
from placement.latency.model_config import shape_of
from placement.latency.model_files import load_shape
from placement.latency.tensor_parallel import why_not_cut, why_not_staged
from placement.named_files import CONFIGS

ATTENTION = {"hidden_size": 1024, "num_hidden_layers": 2, "vocab_size": 512, "head_dim": 64}
GIVEN: dict[str, dict[str, Any]] = {
    "Qwen2.5-14B": {
        "model_type": "qwen2",
        "hidden_size": 5120,
        "num_hidden_layers": 48,
        "vocab_size": 152_064,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "intermediate_size": 13_824,
    },
    "Qwen2.5-0.5B": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "vocab_size": 151_936,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "vocab_size": 151_936,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "odd experts": {
        "model_type": "mixtral",
        **ATTENTION,
        "num_attention_heads": 24,
        "num_key_value_heads": 12,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": 130,
    },
    "odd shared experts": {
        "model_type": "deepseek_v3",
        **ATTENTION,
        "num_attention_heads": 24,
        "num_key_value_heads": 24,
        "kv_lora_rank": 32,
        "q_lora_rank": 48,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "n_routed_experts": 12,
        "num_experts_per_tok": 2,
        "n_shared_experts": 3,
        "first_k_dense_replace": 1,
        "intermediate_size": 240,
        "moe_intermediate_size": 20,
    },
}
SHIPPED = ("deepseek-v3", "llama-3.1-70b", "mixtral-8x7b", "kvrelay-demo-125m", "kvrelay-demo-tiny", "qwen3-0.6b")


@pytest.mark.parametrize("name", [*GIVEN, *SHIPPED])
def test_what_is_shared_out_is_what_the_engine_shares_out(name: str) -> None:
    from transformers import AutoConfig

    from engine.errors import UnsupportedModel
    from engine.parallel.sharding import check_config

    def is_loaded(degree: int, has_whole_experts: bool) -> bool:
        try:
            check_config(known, degree, has_whole_experts)
        except UnsupportedModel:
            return False
        return True

    given = GIVEN.get(name) or json.loads((CONFIGS / "models" / f"{name}.json").read_text())
    given.pop("quantization_config", None)
    known, shape = AutoConfig.for_model(**given), shape_of(given, name)
    for has_whole_experts in (False, True) if shape.experts else (False,):
        degrees = range(1, shape.heads + 1)
        expected = [degree for degree in degrees if is_loaded(degree, has_whole_experts)]
        assert expected[:1] == [1]
        planned = [d for d in degrees if not why_not_cut(shape, d, has_whole_experts=has_whole_experts)]
        assert planned == expected


@pytest.mark.unit
@pytest.mark.parametrize("model_type", ["opt", "phi3", "glm4", "llama4_text", "nobody_knows"])
def test_what_is_not_known_to_be_cut_is_offered_whole(model_type: str) -> None:
    shape = replace(load_shape("llama-3.1-8b"), name="mine", model_type=model_type)
    catalog = RooflineCatalog(shape, load_hardware("h200-sxm"), max_pp=2)
    assert catalog.degrees(8) == [Degrees(1), Degrees(1, 2)]
    assert catalog.offer(Degrees(2)) == (
        f"mine ({model_type}) has no tensor-parallel plan in transformers that is known to be served, and TP is 2; "
        "give TP 1"
    )


@pytest.mark.unit
def test_norms_of_each_head_are_not_cut() -> None:
    """As of Command R+, and not of Command R."""
    given = GIVEN["Qwen2.5-14B"] | {"model_type": "cohere"}
    assert not why_not_cut(shape_of(given | {"use_qk_norm": False}), 2)
    why = "model (cohere) has norms with weights for each head, which are not cut, and TP is 2"
    assert why_not_cut(shape_of(given | {"use_qk_norm": True}), 2) == why


@pytest.mark.unit
def test_stages_are_no_more_than_layers() -> None:
    assert why_not_staged(load_shape("llama-3.1-8b"), 64).startswith("PP 64 is more than the 32 layers of llama-3.1-8b")


@pytest.mark.unit
@pytest.mark.parametrize("few", [{"kv_dtype": "fp8_e4m3"}, {"kv_dtype": "int8"}, {"quantization": "int8"}])
def test_few_bits_are_of_one_process(few: dict[str, Any]) -> None:
    """As the engine has it."""
    shape = load_shape("llama-3.1-8b").in_few_bits(**few)
    cuts: tuple[tuple[dict[str, Any], str], ...] = (
        ({"tensor_parallel": 2}, why_not_cut(shape, 2)),
        ({"pipeline_parallel": 2}, why_not_staged(shape, 2)),
    )
    for degrees, why_not in cuts:
        with pytest.raises(ValueError, match="give one of the two") if why_not else nullcontext():
            EngineOptions(model="", **few, **degrees).validate()
        [(key, value)] = few.items()
        assert not why_not or why_not.startswith(f"{key} {value} goes with ")
    assert not why_not_cut(shape, 1)


@pytest.mark.unit
def test_whole_experts_of_a_model_that_has_none() -> None:
    catalog = RooflineCatalog(load_shape("llama-3.1-8b"), load_hardware("h200-sxm"), expert_parallel=True)
    why = "llama-3.1-8b (llama) has no experts for expert_parallel, and TP is 2; give TP 1"
    assert catalog.offer(Degrees(2)) == why


@pytest.mark.unit
@pytest.mark.parametrize(
    ("name", "degree", "what", "mend"),
    [
        ("Qwen2.5-14B", 5, "13824 columns of the MLP", "1, 2, 4 or 8"),
        ("Qwen2.5-0.5B", 7, "4864 columns of the MLP", "1 or 2"),
        ("odd shared experts", 3, "20 columns of an expert", "1, 2 or 4"),
        ("odd experts", 8, "130 columns of the MLP", "1 or 2"),
    ],
)
def test_what_no_worker_loads_is_neither_offered_nor_advised(name: str, degree: int, what: str, mend: str) -> None:
    catalog = RooflineCatalog(shape_of(GIVEN[name], name), load_hardware("h200-sxm"))
    assert degree not in {degrees.tp for degrees in catalog.degrees(8)}
    assert catalog.offer(Degrees(degree)) == f"TP {degree} does not divide the {what} of {name}; give TP {mend}"


@pytest.mark.unit
def test_kv_heads_are_shared_out_or_shared() -> None:
    shape = shape_of(GIVEN["Qwen2.5-0.5B"] | {"intermediate_size": 4900})
    assert why_not_cut(shape, 7) == "TP 7 does not divide the 2 KV heads of model"
    assert not why_not_cut(shape_of(GIVEN["Qwen3-30B-A3B"]), 8)


@pytest.mark.unit
def test_whole_experts_are_simulated_at_degrees_that_do_not_divide_their_width() -> None:
    shape, hardware = shape_of(GIVEN["odd shared experts"]), load_hardware("h200-sxm")
    assert isinstance(RooflineCatalog(shape, hardware).offer(Degrees(6)), str)
    assert not isinstance(RooflineCatalog(shape, hardware, expert_parallel=True).offer(Degrees(6)), str)
