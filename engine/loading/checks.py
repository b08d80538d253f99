"""What a prepared model must show before it serves: parity through poisoned pages, and that narrow ones spoil nothing.

Each check runs in scratch pages of its own.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from engine.errors import UnsupportedModel
from engine.loading import parity
from engine.paged_model import PagedModel
from engine.pages import fp8
from engine.pages.fp8 import KvScale
from engine.pages.layout import PAGE_SIZE
from engine.types import ModelInfo

logger = logging.getLogger(__name__)


def check_parity(
    model: PagedModel, reference: parity.Reference, dtype: torch.dtype, scales: tuple[KvScale, ...] | None = None
) -> float:
    """The largest relative error of a row's logits. What nobody wrote must never be read, so the pages begin as NaN.

    Raises UnsupportedModel when the pages' path says something else than the model's own.
    """
    if model.probe.has_states:  # whose pages are so long that no short prompt would leave the first
        model = replace(model, page_size=PAGE_SIZE)
    with model.scratch_pages(dtype, parity.pages_needed(model.page_size), scales) as pages:
        model.poison(pages.memory)
        return parity.check(model.module, reference, lambda chunks: model.forward(pages, chunks), model.page_size)


def fp8_scales(model: PagedModel, info: ModelInfo) -> tuple[KvScale, ...]:
    """Measured on fixed prompts through pages in the model's own dtype."""
    chunks, num_pages = fp8.prompts(info.vocab_size, info.max_model_len, model.page_size)
    with model.scratch_pages(model.probe.kv_dtype, num_pages) as pages:
        model.forward(pages, chunks, [0])
        layers = range(pages.memory.layout.num_layers)
        return fp8.scales_of([(pages.memory.k(i), pages.memory.v(i)) for i in layers])


def check_narrow(
    model: PagedModel,
    reference: parity.Reference,
    name: str,
    dtype: torch.dtype,
    scales: tuple[KvScale, ...] | None,
) -> None:
    """Raises UnsupportedModel when pages of `dtype`, called `name`, cost more than rounding."""
    lenient = replace(reference, tolerance=parity.narrow_tolerance(reference))
    try:
        error = check_parity(model, lenient, dtype, scales)
    except parity.ParityMismatch as mismatch:
        raise UnsupportedModel(f"kv_dtype is {name!r}, but {mismatch}; give kv_dtype: auto") from mismatch
    logger.info("KV in %s: largest relative error of logits %.2g", name, error)
