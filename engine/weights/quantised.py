"""Checkpoints that bring quantised weights: which are read, each by its own library, and their weights in full width.

One whose config does not say what its files hold would be read as if its whole numbers were the weights: scales that
nobody asked for tell it. int8.py is another matter, which rounds what was loaded.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from engine.errors import UnsupportedModel
from engine.weights.files import folder_of, whole_numbers

ADVISED = ("awq", "bitsandbytes", "compressed-tensors", "fp8", "gptq", "mxfp4")  # methods that docs/serving.md names
WIDENED = ("awq", "bitsandbytes", "gptq")  # formats whose layers give their weights in full once they are loaded
TOLD_BY = {  # where transformers reads which layers are not quantised
    "awq": "modules_to_not_convert, a list of what is not",
    "gptq": "modules_in_block_to_quantize, a list of lists of what is",
}
SCALE = re.compile(r"(?P<weight>.+)_scales?(_inv|_2)?")  # of a weight; an input's or a key's leaves weights as they are
PACKED = re.compile(r"(?P<module>.+)\.(qweight|qzeros|scales?|SCB|weight_packed)")

UNCONVERTED = ("int-quantized", "naive-quantized")  # formats of compressed-tensors that transformers has no experts of


def method_of(config: Any) -> str | None:
    """As its checkpoint names it, if it does; None: it says nothing of being quantised."""
    told = _told(config)
    return None if told is None else str(told.get("quant_method") or "")


def _told(config: Any) -> dict[str, Any] | None:
    """By the config, or by the one of its text, which transformers goes by too."""
    sections = (config, config.get_text_config(decoder=True))
    told = (getattr(section, "quantization_config", None) for section in sections)
    return next((each for each in told if isinstance(each, dict)), None)


def check(model: str, config: Any) -> None:
    """Have transformers give a quantised checkpoint's weights in full, where it does. Raises UnsupportedModel where
    nobody does."""
    told, method = _told(config), method_of(config)
    if told is None:
        return
    if not method:
        raise UnsupportedModel(
            f"quantization_config in config.json of model {model!r} names no quant_method; give one of "
            f"{', '.join(ADVISED)}, or of a model that is not quantised leave it out"
        )
    kinds = AUTO_QUANTIZATION_CONFIG_MAPPING.items()
    able = {name for name, kind in kinds if "dequantize" in inspect.signature(kind.__init__).parameters}
    if method in able:
        told["dequantize"] = True
    elif method not in WIDENED:
        raise UnsupportedModel(
            f"model {model!r} is quantised by {method}, which cannot be loaded in full width; give one that is not "
            f"quantised, or by one of {', '.join(ADVISED)}"
        )


def why_not_converted(config: Any, error: Exception) -> str:
    """What transformers, which failed to load it, does not say; nothing where it is something else."""
    if method_of(config) != "compressed-tensors" or "conversion of the weights" not in str(error):
        return ""
    layout = (_told(config) or {}).get("format")
    if layout not in UNCONVERTED:
        return ""
    return (
        f"format of quantization_config is {layout}, which transformers does not convert for a model with experts; "
        "give one in FP8 (float-quantized) or W4A16 (pack-quantized)"
    )


def check_read(model: str, loaded: PreTrainedModel, unexpected: Collection[str], method: str | None) -> None:
    """Of the names that were `unexpected` in the files, none is of a quantised weight that was read as a plain one, or
    not at all, nor of a plain one that was wanted quantised; nor are weights whole numbers where the config says
    nothing of that. Raises UnsupportedModel."""
    parameters = {name for name, _ in loaded.named_parameters()}
    held = loaded.state_dict().keys()
    for key in sorted(unexpected):
        if method in TOLD_BY and f"{key.removesuffix('weight')}qweight" in held:
            raise UnsupportedModel(
                f"model {model!r} has {key} in full width, of which quantization_config in config.json says that it is "
                f"quantised; give there {TOLD_BY[method]}"
            )
        if _is_of_a_weight(key, parameters, unexpected):
            _refuse(model, key, method)
    for key in whole_numbers(folder_of(model)) if method is None else ():
        if key not in unexpected and (key in parameters or key.endswith(".weight")):
            _refuse(model, f"{key} in whole numbers", method)


def _refuse(model: str, what: str, method: str | None) -> NoReturn:
    if method is None:
        why = (
            "of which quantization_config in config.json says nothing; give a checkpoint whose config.json tells how "
            "it is quantised"
        )
    else:
        why = (
            f"which transformers does not read where quant_method in config.json is {method}; give a checkpoint as "
            "transformers writes it, or one by compressed-tensors"
        )
    raise UnsupportedModel(f"model {model!r} has {what}, of a quantised weight, {why}")


def _is_of_a_weight(key: str, parameters: Collection[str], unexpected: Collection[str]) -> bool:
    """Of the model's, that is, and not of a layer that it leaves out."""
    if found := SCALE.fullmatch(key):
        weight = found["weight"]  # perhaps one of many experts, which are no parameter each
        return weight in parameters or (weight.endswith(".weight") and weight not in unexpected)
    found = PACKED.fullmatch(key)
    return found is not None and f"{found['module']}.weight" in parameters


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
