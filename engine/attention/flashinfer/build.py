"""Builds the FlashInfer modules that a model's layers will ask for, all at once, before the first is tried.

FlashInfer compiles a module when it is first asked for, one after another: minutes for a model, where one run of ninja
over all of them takes about as long as the slowest. What is built already is left alone. A build that fails here is no
error: the kernel's own trial says what is wrong with it.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable
from typing import Any

import torch

from engine.attention.flashinfer.shapes import Shape, decode_candidates, prefill_candidates

logger = logging.getLogger(__name__)

Wanted = tuple[str, tuple[Any, ...]]  # a generator of flashinfer.jit, and what it is called with
NO_ROTATION = 0  # keys are rotated before they are written
FOR_EVERY_MODEL: tuple[Wanted, ...] = (
    ("gen_page_module", ()),
    ("gen_norm_module", ()),
    ("gen_rope_module", ()),
    ("gen_act_and_mul_module", ("silu",)),
)
MODULES = ("flashinfer.jit", "flashinfer.jit.page", "flashinfer.jit.norm", "flashinfer.jit.rope", "flashinfer.jit.xqa")


def wanted(shapes: Iterable[Shape], capability: tuple[int, int]) -> list[Wanted]:
    """Every module that a candidate for one of the shapes is made of, each once."""
    modules = list(FOR_EVERY_MODEL)
    for shape in shapes:
        options = (shape.window > 0, shape.softcap > 0)
        dtypes = (shape.dtype, shape.kv_dtype, shape.dtype, torch.int32)
        widths = (shape.head_dim, shape.head_dim, NO_ROTATION)
        decode = decode_candidates(shape, capability)
        modules += [  # decode on tensor cores is fa2's prefill
            ("gen_batch_prefill_module", (backend, *dtypes, *widths, *options, False))
            for backend in prefill_candidates(shape, capability)
        ]
        if "cores" in decode:
            modules.append(("gen_batch_decode_module", (*dtypes, *widths, *options)))
        if "xqa" in decode:
            sizes = (shape.page_size, shape.head_dim, shape.group)
            modules.append(("gen_xqa_module", (shape.dtype, shape.kv_dtype, *sizes, options[0], shape.dtype, 1)))
    return list(dict.fromkeys(modules))


def build(shapes: Iterable[Shape], capability: tuple[int, int]) -> None:
    """Build them in parallel."""
    modules = wanted(shapes, capability)
    logger.info("building %d modules of FlashInfer where they are not built yet", len(modules))
    try:
        specs = [generator(name)(*arguments) for name, arguments in modules]
        generator("build_jit_specs")(specs, verbose=False)
    except Exception as error:  # a compiler's failing, or an interface that has moved
        logger.warning("FlashInfer's modules are built one by one: %s", " ".join(str(error).split())[:300])


def generator(name: str) -> Any:
    """The function of that name, wherever flashinfer.jit has it. Raises AttributeError."""
    for module in MODULES:
        make = getattr(importlib.import_module(module), name, None)
        if make is not None:
            return make
    raise AttributeError(f"flashinfer.jit has no {name}")
