"""Where adapters come in: each Linear of a model has a number, and a Site is what a product of one Linear, or of
several joined ones, adds to its outputs while a step runs that has adapters.

    numbered (as the model is probed) --> site_of (as products are made of Linears) --> Site.add, in each product
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

LIKE_LINEAR = ("FalconLinear",)  # of transformers: classes that compute as torch's own does
BARE = "kvrelay_bare"  # the attribute of a Linear that another module multiplies by itself
NUMBERED = "kvrelay_numbered"  # the attribute of a Linear that may be adapted
EXPERTS = ".experts."  # see a part of a step's rows only


class StepAdapters(Protocol):
    """The adapters of the step that runs, over its rows."""

    def add(self, site: Site, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add to y [.., T, out] what they make of x [.., T, in]."""


@dataclass(frozen=True, slots=True)
class Numbered:
    """A Linear that may be adapted."""

    name: str
    in_features: int
    out_features: int
    dtype: torch.dtype


@dataclass(slots=True)
class Adaptable:
    """A model's Linears by number, and what adapts them now. One thread runs steps."""

    linears: list[Numbered] = field(default_factory=list)
    step: StepAdapters | None = None


class NativeSite(ctypes.Structure):
    """KvrelaySite of csrc/kernels.h, field for field."""

    _fields_ = (("numbers", ctypes.c_void_p), ("ends", ctypes.c_void_p), ("count", ctypes.c_int64))


class Site:
    def __init__(self, adaptable: Adaptable, numbers: Sequence[int], ends: Sequence[int]) -> None:
        """`numbers`: of its Linears; `ends`: where the outputs of each end."""
        self.adaptable = adaptable
        self.numbers = numbers
        self.ends = ends
        self._arrays = np.array(numbers, np.int64), np.array(ends, np.int64)
        self.native = NativeSite(*(array.ctypes.data for array in self._arrays), len(numbers))

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.adaptable.step is not None:
            self.adaptable.step.add(self, x, y)
        return y


class AdaptedProduct:
    """A product that is no module of its own."""

    def __init__(self, product: Any, site: Site) -> None:
        self._product = product
        self._site = site

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._site.add(x, self._product(x))


def is_linear(module: nn.Module) -> bool:
    """One whose products are made by us: x W^T + b, in Conv1D with W the other way round."""
    kind = type(module)
    if hasattr(module, BARE):
        return False
    return kind in (nn.Linear, Conv1D) or (isinstance(module, nn.Linear) and kind.__name__ in LIKE_LINEAR)


@contextmanager
def numbered(model: PreTrainedModel, num_rows: int) -> Iterator[Adaptable]:
    """Inside, the model is to run once over so many rows, of which fewer are to have logits. Behind it those Linears
    have numbers that adapters may change: which were called, and saw every row of the step in their own dtype. Not so
    the head and what stands before it, nor experts, which see a part of the rows."""
    adaptable = Adaptable()
    seen: dict[nn.Module, bool] = {}

    def look(module: nn.Module, args: Any, y: torch.Tensor) -> None:
        x, weight = args[0], module.weight
        assert isinstance(weight, torch.Tensor)
        is_whole = x.numel() == num_rows * x.shape[-1] and x.dtype == y.dtype == weight.dtype
        seen[module] = seen.get(module, True) and is_whole

    linears = [module for module in model.modules() if is_linear(module)]
    hooks = [linear.register_forward_hook(look) for linear in linears]
    try:
        yield adaptable
    finally:
        for hook in hooks:
            hook.remove()
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if not seen.get(module, False) or module is head or EXPERTS in name:
            continue
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        rows, columns = weight.shape
        sizes = (rows, columns) if isinstance(module, Conv1D) else (columns, rows)
        setattr(module, NUMBERED, (adaptable, len(adaptable.linears)))
        adaptable.linears.append(Numbered(name, *sizes, weight.dtype))


def site_of(linears: Sequence[nn.Module]) -> Site | None:
    """Of these side by side; None where they may not be adapted."""
    numbered = [getattr(linear, NUMBERED, None) for linear in linears]
    if any(each is None for each in numbered):
        return None
    found: list[tuple[Adaptable, int]] = [each for each in numbered if each is not None]
    adaptable, ends = found[0][0], [0]
    for _, number in found:
        ends.append(ends[-1] + adaptable.linears[number].out_features)
    return Site(adaptable, [number for _, number in found], ends[1:])


def hook_linears(model: nn.Module) -> None:
    """Those that are still modules of torch's own, and multiply by themselves."""
    for module in model.modules():
        if is_linear(module) and (site := site_of([module])) is not None:
            module.register_forward_hook(lambda _, args, y, site=site: site.add(args[0], y))
