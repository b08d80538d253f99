"""What FlashInfer modules a model needs, by its config alone: no weight is read, and no GPU is wanted.

The model is made without storage: a linear layer gives zeros of its width, and what else has weights has zeros that
take no memory. Its probe is the one that a load goes by.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.attention.flashinfer.modules import Wanted, wanted
from engine.attention.probe import Probe
from engine.loading.capacity import page_dtype, page_size
from engine.loading.gpu import shapes_of, why_not_layer
from engine.options import EngineOptions
from engine.state import mixers
from engine.weights import loader
from engine.weights.config import ServedConfig, served_config

NARROW = 64
WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")  # attention knows none


def modules_needed(options: EngineOptions, capability: tuple[int, int]) -> list[Wanted]:
    """By a worker with these options, on a GPU of this capability. Raises ValueError with a sentence where FlashInfer
    cannot serve the model, UnsupportedModel where nobody can."""
    probe = probe_of(served_config(options))
    kv_dtype = page_dtype(options, probe)
    if why := why_not_layer(probe, kv_dtype):
        raise ValueError(f"model {options.model!r} runs without FlashInfer; {why}")
    return wanted(shapes_of(probe, page_size(options, probe), kv_dtype), capability)


def probe_of(served: ServedConfig) -> Probe:
    text = served.config.get_text_config()
    for width in WIDTHS:
        if isinstance(getattr(text, width, None), int):
            setattr(text, width, NARROW)
    with torch.inference_mode():
        return loader.probe_model(_without_weights(served.config, served.dtype), served.max_len)


def _without_weights(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
        )
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            zeros = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
            module.register_parameter(name, nn.Parameter(zeros, requires_grad=False))
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, torch.zeros(buffer.shape, dtype=buffer.dtype), persistent=False)
        if type(module) is nn.Linear:
            module.forward = partial(_zeros, module.out_features)  # type: ignore[method-assign]
    model.eval()
    mixers.adopt(model)
    return model


def _zeros(width: int, x: torch.Tensor) -> torch.Tensor:
    return x.new_zeros(*x.shape[:-1], width)
