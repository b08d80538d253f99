"""Weights that were joined to one product's are given up at once: a model does not stand in memory twice."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.attention import hooks
from engine.fused.gpu import TorchKernels
from engine.fused.recognise import fuse
from engine.weights.loader import probe_model, set_attention

LAYERS = 6


def test_no_more_than_a_layers_weights_are_there_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    linears = [weakref.ref(m.weight) for m in model.model.modules() if isinstance(m, torch.nn.Linear)]
    whole = standing(linears)
    made, most = 0, 0
    linear = TorchKernels.linear

    def joined(self: TorchKernels, weights: Sequence[torch.Tensor], *rest: Any) -> Any:
        nonlocal made, most
        made += sum(weight.nbytes for weight in weights)
        most = max(most, made + standing(linears))
        return linear(self, weights, *rest)

    monkeypatch.setattr(TorchKernels, "linear", joined)
    with torch.inference_mode():
        probe = probe_model(model, 64)
        set_attention(model, hooks.SERVE)
        fuse(model, probe.layer_of, TorchKernels(), 64)
    assert (made, standing(linears)) == (whole, 0)
    assert most <= whole * (LAYERS + 1) / LAYERS


def standing(weights: list[weakref.ref[torch.Tensor]]) -> int:
    return sum(weight.nbytes for each in weights if (weight := each()) is not None)
