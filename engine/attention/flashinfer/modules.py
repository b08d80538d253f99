"""Which of FlashInfer's modules a model's layers ask for. It builds nothing.

A module is one library: a kernel for some dtypes, widths and options. What makes it is a function of flashinfer.jit.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable
from typing import Any

import torch

from engine.attention.flashinfer.shapes import Shape, decode_candidates, prefill_candidates

Wanted = tuple[str, tuple[Any, ...]]  # a generator of flashinfer.jit, and what it is called with
NO_ROTATION = 0  # keys are rotated before they are written
FOR_EVERY_MODEL: tuple[Wanted, ...] = (
    ("gen_page_module", ()),
    ("gen_norm_module", ()),
    ("gen_rope_module", ()),
    ("gen_act_and_mul_module", ("silu",)),
)
HOMES = (".jit", ".jit.page", ".jit.norm", ".jit.rope", ".jit.xqa")  # parts of the package that have generators


def imported(part: str = "") -> Any:
    """FlashInfer, or a part of it, with its norms in CUDA: built once and kept, where those in CuTe are compiled at
    every start."""
    os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")  # read at import
    return importlib.import_module(f"flashinfer{part}")


def wanted(shapes: Iterable[Shape], capability: tuple[int, int]) -> list[Wanted]:
    """Every module that a candidate for one of the shapes is made of, each once."""
    modules = list(FOR_EVERY_MODEL)
    for shape in shapes:
        kernels = (*prefill_candidates(shape, capability), *decode_candidates(shape, capability))
        modules += [module_of(shape, kernel) for kernel in kernels]
    return list(dict.fromkeys(modules))


def module_of(shape: Shape, kernel: str) -> Wanted:
    """Of a kernel that is named in a KernelChoice. Decode on tensor cores is fa2's prefill."""
    options = (shape.window > 0, shape.softcap > 0)
    dtypes = (shape.dtype, shape.kv_dtype, shape.dtype, torch.int32)
    widths = (shape.head_dim, shape.head_dim, NO_ROTATION)
    if kernel == "cores":
        return ("gen_batch_decode_module", (*dtypes, *widths, *options))
    if kernel == "xqa":
        sizes = (shape.page_size, shape.head_dim, shape.group)
        return ("gen_xqa_module", (shape.dtype, shape.kv_dtype, *sizes, options[0], shape.dtype, 1))
    backend = "fa2" if kernel == "tensor" else kernel
    return ("gen_batch_prefill_module", (backend, *dtypes, *widths, *options, False))


def generator(name: str) -> Any:
    """The function of that name, wherever flashinfer.jit has it. Raises AttributeError."""
    for home in HOMES:
        make = getattr(imported(home), name, None)
        if make is not None:
            return make
    raise AttributeError(f"flashinfer.jit has no {name}")
