"""The longest sequence to serve, by whatever name a model's config has it; and what is no text model."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import BloomConfig, Gemma3Config, LlamaConfig, LlavaConfig, MptConfig, ViTConfig

from engine.errors import UnsupportedModel
from engine.weights.config import check_config, resolve_max_len

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        (LlamaConfig(max_position_embeddings=300), 300),
        (MptConfig(max_seq_len=200), 200),
        (BloomConfig(seq_length=100), 100),
    ],
)
def test_it_is_the_models_own_unless_less_is_asked_for(config: Any, longest: int) -> None:
    assert resolve_max_len(None, config) == longest
    assert resolve_max_len(64, config) == 64
    with pytest.raises(ValueError, match=f"max_model_len is 301, but the model has {longest} positions"):
        resolve_max_len(301, config)


def test_one_that_yarn_was_added_to_may_be_served_as_far_as_that_stretches_it() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "rope_theta": 1e4}
    config = LlamaConfig(max_position_embeddings=320, rope_parameters=yarn)
    assert resolve_max_len(None, config) == 320
    assert resolve_max_len(1024, config) == 1024
    with pytest.raises(ValueError, match="max_model_len is 1025, but the model has 1024 positions"):
        resolve_max_len(1025, config)


@pytest.mark.parametrize("kind", ["linear", "dynamic"])
def test_rope_that_is_scaled_by_a_factor_stretches_where_it_is_asked_to(kind: str) -> None:
    rope = {"rope_type": kind, "factor": 4.0, "rope_theta": 1e4}
    config = LlamaConfig(max_position_embeddings=128, rope_parameters=rope)
    assert resolve_max_len(None, config) == 128
    assert resolve_max_len(512, config) == 512
    with pytest.raises(ValueError, match="max_model_len is 513, but the model has 512 positions"):
        resolve_max_len(513, config)


def test_a_config_that_names_none_wants_to_be_told() -> None:
    with pytest.raises(ValueError, match="names no max_position_embeddings; give max_model_len"):
        resolve_max_len(None, BloomConfig())
    assert resolve_max_len(77, BloomConfig()) == 77


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (
            LlavaConfig(architectures=["Llava"]),
            "Llava is a model of text with images or sound; kvrelay serves text models",
        ),
        (ViTConfig(), "ViTConfig is of type vit, which transformers has no causal language model of"),
    ],
)
def test_a_model_of_more_or_other_than_text_is_refused_by_name(config: Any, why: str) -> None:
    with pytest.raises(UnsupportedModel, match=why):
        check_config(config)


def test_one_that_transformers_loads_as_a_text_model_is_not() -> None:
    check_config(Gemma3Config())
