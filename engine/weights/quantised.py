"""Checkpoints that bring quantised weights: which are read, each by its own library, and their weights in full width.

What they hold in the end is for the loader to look at; int8.py is another matter, which rounds what was loaded.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from engine.errors import UnsupportedModel

WIDENED = ("awq", "bitsandbytes", "gptq")  # formats whose layers give their weights in full once they are loaded


def method_of(config: Any) -> str | None:
    """As its checkpoint names it; None: it says nothing of being quantised."""
    quantised = getattr(config, "quantization_config", None)
    return str(quantised.get("quant_method", "no named method")) if isinstance(quantised, dict) else None


def check(model: str, config: Any) -> None:
    """Have transformers give a quantised checkpoint's weights in full, where it does. Raises UnsupportedModel where
    nobody does."""
    method = method_of(config)
    if method is None:
        return
    kinds = AUTO_QUANTIZATION_CONFIG_MAPPING.items()
    able = {name for name, kind in kinds if "dequantize" in inspect.signature(kind.__init__).parameters}
    if method in able:
        config.quantization_config |= {"dequantize": True}
    elif method not in WIDENED:
        raise UnsupportedModel(
            f"model {model!r} is quantised by {method}, which cannot be loaded in full width; give one that is not "
            f"quantised, or by one of {', '.join(sorted(able.union(WIDENED)))}"
        )


def widen(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Plain linear layers in place of those that hold their weights otherwise, by their own library's arithmetic."""
    if any(type(module).__module__.startswith("bitsandbytes") for module in model.modules()):
        model.dequantize(dtype)
        for weight in model.parameters():  # the others were loaded as they are in the files
            weight.data = weight.data.to(dtype)
    for name, module in list(model.named_modules()):
        if not hasattr(module, "dequantize_weight"):  # GPTQModel's, of GPTQ and AWQ
            continue
        weight, bias = module.dequantize_weight().T.to(dtype).contiguous(), module.bias
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device=weight.device, dtype=dtype)
        linear.weight.data = weight
        if bias is not None:
            linear.bias.data = bias.to(dtype)
        model.set_submodule(name, linear)
