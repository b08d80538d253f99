"""Which layers FlashInfer can serve, and which of its kernels may be tried for each. It runs nothing.

Legend: H query heads, G key/value heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from engine.attention.base import AttentionCall

HEAD_DIMS = (64, 128, 256)
GROUPS_ON_CUDA_CORES = (1, 2, 3, 4, 8)
XQA_PAGE_SIZES = (16, 32, 64, 128)
HALF = (torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What one plan is made for: layers that agree in it share a wrapper."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    scaling: float
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    dtype: torch.dtype = torch.bfloat16  # of queries and output
    kv_dtype: torch.dtype = torch.bfloat16

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def page_bytes(self) -> int:
        """Of one page, K and V."""
        return 2 * self.page_size * self.kv_heads * self.head_dim * self.kv_dtype.itemsize

    @property
    def window_left(self) -> int:
        """FlashInfer counts the keys before the row's own; -1: all."""
        return self.window - 1 if self.window else -1


@dataclass(frozen=True, slots=True)
class BatchChoice:
    """The decode kernel of steps of about so many sequences."""

    sequences: int
    kernel: str  # the best over all lengths: a graph is captured once for all
    by_keys: tuple[tuple[int, str], ...] = ()  # (keys of a sequence, kernel), where that differs


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChoice:
    """Which kernel serves a shape."""

    prefill: str = "fa2"  # fa2 | fa3
    decode: str = "tensor"  # tensor | cores | xqa: where no size was measured
    by_batch: tuple[BatchChoice, ...] = ()

    def decode_for(self, sequences: int, keys: int | None = None) -> str:
        """Of a step with so many sequences, the longest of `keys`; None: of any. What was measured nearest counts, by
        ratio."""
        if not self.by_batch:
            return self.decode
        nearest = min(self.by_batch, key=lambda batch: _apart(batch.sequences, sequences))
        if keys is None or not nearest.by_keys:
            return nearest.kernel
        return min(nearest.by_keys, key=lambda measured: _apart(measured[0], keys))[1]

    @property
    def decode_kernels(self) -> set[str]:
        """Every one that some step takes."""
        if not self.by_batch:
            return {self.decode}
        return {kernel for b in self.by_batch for kernel in (b.kernel, *(name for _, name in b.by_keys))}


def _apart(measured: int, asked: int) -> float:
    return max(measured, asked) / min(measured, asked)


def why_not(heads: int, kv_heads: int, k_dim: int, v_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> str:
    """Why FlashInfer cannot serve such a layer, in a sentence; empty when it can."""
    if k_dim != v_dim:
        return f"its keys are {k_dim} wide and its values {v_dim}, and FlashInfer's paged kernels want one width"
    if k_dim not in HEAD_DIMS:
        return f"its heads are {k_dim} wide, and FlashInfer has kernels for {', '.join(map(str, HEAD_DIMS))}"
    if dtype not in HALF:
        return f"it computes in {str(dtype).removeprefix('torch.')}, and FlashInfer's kernels want bfloat16 or float16"
    if kv_dtype not in (dtype, FP8):
        return f"its pages are in {str(kv_dtype).removeprefix('torch.')} and its queries in another"
    if heads % kv_heads:
        return f"its {heads} query heads do not share {kv_heads} KV heads evenly"
    return ""


def prefill_candidates(shape: Shape, capability: tuple[int, int]) -> tuple[str, ...]:
    """fa3 is Hopper's, and wants keys of the queries' dtype."""
    return ("fa2", "fa3") if capability[0] == 9 and shape.kv_dtype == shape.dtype else ("fa2",)


def decode_candidates(shape: Shape, capability: tuple[int, int]) -> tuple[str, ...]:
    """XQA has no soft cap, fixed page sizes, and runs from Hopper on; CUDA cores have some group sizes only. Over pages
    in fp8 XQA rounds queries and weights to fp8, too, which nobody asked for."""
    if shape.kv_dtype != shape.dtype:
        return ("tensor",)
    names = ["tensor"]
    if shape.group in GROUPS_ON_CUDA_CORES:
        names.append("cores")
    if capability[0] in (9, 10, 12) and not shape.softcap and shape.page_size in XQA_PAGE_SIZES:
        names.append("xqa")
    return tuple(names)


def shape_of(q_THD: torch.Tensor, k_pages: torch.Tensor, call: AttentionCall) -> Shape:
    return Shape(
        heads=q_THD.shape[1],
        kv_heads=k_pages.shape[2],
        head_dim=q_THD.shape[2],
        page_size=k_pages.shape[1],
        scaling=call.scaling,
        window=call.window,
        softcap=call.softcap,
        sinks=call.sinks is not None,
        dtype=q_THD.dtype,
        kv_dtype=k_pages.dtype,
    )


def distinct(shapes: Iterable[Shape]) -> list[Shape]:
    """Each once, in order."""
    return list(dict.fromkeys(shapes))
