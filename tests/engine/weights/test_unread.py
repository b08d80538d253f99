"""Weights that a model was trained with and would be served without are told; other parts are left out."""

from __future__ import annotations

import pytest
from torch import nn

from engine.errors import UnsupportedModel
from engine.weights.unread import check

pytestmark = pytest.mark.unit


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(2, 2, bias=False)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer()])
        self.norm = nn.LayerNorm(2, bias=False)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Decoder()
        self.lm_head = nn.Linear(2, 2, bias=False)


@pytest.mark.parametrize(
    "key",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_proj.lora_A.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.extra.weight",
        "model.norm.bias",
        "lm_head.lora_B.default.weight",
    ],
)
def test_what_belongs_to_a_module_that_is_computed_is_refused_by_name(key: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"^model 'm' has weights that Model .* with \(1, first {key}\); give"):
        check("m", Model(), ["score.weight", key], None)


@pytest.mark.parametrize(
    "key",
    [
        "score.weight",
        "vision_tower.layers.0.q_proj.weight",
        "model.mtp_layers.0.eh_proj.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.0.self_attn.bias",  # GPT-J's causal mask
        "model.layers.0.self_attn.masked_bias",
        "model.layers.0.self_attn.q_proj.input_scale",
    ],
)
def test_other_parts_are_left_out(key: str) -> None:
    check("m", Model(), [key], None)


def test_biases_of_zeros_that_autogptq_wrote_are_left_out() -> None:
    check("m", Model(), ["model.layers.0.self_attn.q_proj.bias"], "gptq")
