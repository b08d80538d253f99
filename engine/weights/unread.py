"""Weights that a checkpoint has and its model does not, though the model was trained with them: transformers leaves
them out and goes on. So it may with parts that are not computed at all: other heads, towers, layers beyond the last."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from engine.errors import UnsupportedModel


def check(model: str, loaded: nn.Module, unexpected: Collection[str], method: str | None) -> None:
    """Of the names that were `unexpected` in the files, none is of a module that is computed, or within one. Raises
    UnsupportedModel."""
    modules = dict(loaded.named_modules())
    if parts := [key for key in sorted(unexpected) if _is_part(key, modules, method)]:
        raise UnsupportedModel(
            f"model {model!r} has weights that {type(loaded).__name__} by its config.json does not compute with "
            f"({len(parts)}, first {parts[0]}); give the config.json that belongs to them, or files without them"
        )


def _is_part(key: str, modules: dict[str, nn.Module], method: str | None) -> bool:
    module, _, kind = key.rpartition(".")
    if kind == "bias":  # AutoGPTQ wrote one of zeros for every layer; an attention's is a mask
        return method != "gptq" and module in modules and _has_weights(modules[module])
    return kind == "weight" and _is_computed(module, modules)


def _is_computed(name: str, modules: dict[str, nn.Module]) -> bool:
    """Whether what there is of the modules in its name leads to one with weights, or into a layer of a list; not just
    to what holds such."""
    while name not in modules:
        name = name.rpartition(".")[0]
    is_in_a_list = any(isinstance(modules[outer], nn.ModuleList) for outer in _outer(name))
    return is_in_a_list or _has_weights(modules[name])


def _outer(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None
