"""How many KV pages an engine gets, and in what dtype: as many as were asked for, or as fit. Arithmetic only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from engine.attention.probe import Probe
from engine.options import EngineOptions
from engine.pages import fp8, int8_rows
from engine.pages.layout import PAGE_SIZE, kv_and_state_bytes

DEFAULT_KV_BYTES = 1 << 30
MOST_PAGE_SIZE = 1024  # tokens
WRAPPER_BYTES = 8 << 20  # that FlashInfer's wrapper of a shape keeps on the GPU, in each graph
SMALLER_BYTES = 1 << 29  # of all graphs: their nodes, products' workspaces, the activations that they share


def page_dtype(options: EngineOptions, probe: Probe) -> torch.dtype:
    return {"fp8_e4m3": fp8.DTYPE, "int8": int8_rows.DTYPE}.get(options.kv_dtype, probe.kv_dtype)


def page_size(options: EngineOptions, probe: Probe) -> int:
    """As asked for; else so many tokens that a page holds no more of states than of KV."""
    if options.page_size is not None:
        return options.page_size
    dtype = str(page_dtype(options, probe)).removeprefix("torch.")
    kv, states = kv_and_state_bytes(probe.shapes, PAGE_SIZE, dtype)
    times = -(-states // kv) if kv else MOST_PAGE_SIZE
    return min(PAGE_SIZE * max(1, times), MOST_PAGE_SIZE)


def num_pages(options: EngineOptions, page_bytes: int, default_kv_bytes: Callable[[], int]) -> int:
    """As many as were asked for, or as fit in kv_bytes; where neither is given, in what the machine has for them."""
    if options.num_pages is not None:
        return options.num_pages
    kv_bytes = options.kv_bytes if options.kv_bytes is not None else default_kv_bytes()
    if kv_bytes < page_bytes:
        raise ValueError(f"kv_memory is {kv_bytes} bytes, less than one page; give at least {page_bytes}")
    return kv_bytes // page_bytes


def kv_budget(*, total_bytes: int, used_bytes: int, peak_bytes: int, utilization: float, reserve_bytes: int = 0) -> int:
    """Bytes for KV pages: `utilization` of the GPU, less what this process uses of it (weights, CUDA), what a step
    needs at its peak beyond that, and `reserve_bytes` (workspaces, graphs).

    Raises ValueError when nothing is left.
    """
    budget = int(total_bytes * utilization) - used_bytes - peak_bytes - reserve_bytes
    if budget <= 0:
        total, used, peak = (n / (1 << 30) for n in (total_bytes, used_bytes, peak_bytes + reserve_bytes))
        raise ValueError(
            f"gpu_memory_utilization is {utilization:g}: of the GPU's {total:.1f} GiB nothing is left for KV pages "
            f"beside {used:.1f} GiB in use and {peak:.1f} GiB that a step needs; give a larger share, a smaller model, "
            "or kv_memory"
        )
    return budget


def graph_bytes(sizes: Sequence[int], logits_row_bytes: int, num_shapes: int) -> int:
    """What graphs of steps of so many rows keep: each its own logits, and a wrapper for each shape of attention."""
    return SMALLER_BYTES + sum(sizes) * logits_row_bytes + len(sizes) * num_shapes * WRAPPER_BYTES


def checked_free(budget_bytes: int, *, free_bytes: int, utilization: float) -> int:
    """`budget_bytes`, if so much is free. Raises ValueError: another process has taken more than was left to it."""
    if budget_bytes <= free_bytes:
        return budget_bytes
    gib = 1 << 30
    raise ValueError(
        f"gpu_memory_utilization is {utilization:g}, which leaves {budget_bytes / gib:.1f} GiB for KV pages, but only "
        f"{free_bytes / gib:.1f} GiB of the GPU are free beside other processes; end them, or give a smaller share"
    )
