"""Whether a kernel of FlashInfer is right for a layer's shape: its answers beside the torch reference's.

Nothing is taken on trust. Pages come in random order, and unowned bytes, and those past each sequence's end, are NaN:
a kernel that ignores an option, or reads what is not its own, gives a wrong answer here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.base import AttentionCall, StepMeta
from engine.attention.flashinfer.backend import FlashInferBackend
from engine.attention.flashinfer.shapes import FP8, Shape
from engine.attention.tables import page_tables
from engine.attention.torch_backend import TorchBackend

Int32s = npt.NDArray[np.int32]

TOLERANCE = 2e-2  # of the output's norm: a half-precision output against one accumulated in float32
DECODE = (32, 1024)  # sequences, keys of each
PREFILL = (2, 2048)  # the second is shorter, and ends within a page
LONGER_THAN_WINDOW = 1.25  # a trial's sequences, at least


@dataclass(frozen=True, slots=True)
class Problem:
    """A step over pages of its own."""

    q_THD: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    meta: StepMeta
    call: AttentionCall


def past_window(size: tuple[int, int], window: int) -> tuple[int, int]:
    """(sequences, keys): about as many keys in all, but each sequence well longer than the window. In shorter ones a
    kernel that ignores the window would look right."""
    sequences, keys = size
    longer = int(window * LONGER_THAN_WINDOW)
    return (sequences, keys) if longer <= keys else (max(min(sequences, 2), sequences * keys // longer), longer)


def make_problem(shape: Shape, sequences: int, keys: int, rows: int, device: torch.device) -> Problem:
    """`rows` of each sequence's last positions over `keys` keys in poisoned pages."""
    generator = torch.Generator().manual_seed(0)
    lengths = [keys - (i * 7) % min(keys, 13) for i in range(sequences)]  # last pages filled differently
    starts = np.array([max(0, n - rows) for n in lengths], dtype=np.int32)
    query_starts = np.cumsum([0, *(n - s for n, s in zip(lengths, starts, strict=True))]).astype(np.int32)
    counts = [-(-n // shape.page_size) for n in lengths]
    order = torch.randperm(sum(counts) + 1, generator=generator).numpy().astype(np.int32)
    tables = np.zeros((sequences, max(counts)), dtype=np.int32)
    at = 0
    for i, count in enumerate(counts):
        tables[i, :count] = order[at : at + count]
        at += count
    k_pages, v_pages = (_pages(shape, tables, lengths, counts, int(order.size), seed, device) for seed in (1, 2))
    q = torch.randn(int(query_starts[-1]), shape.heads, shape.head_dim, generator=generator)
    sinks = torch.randn(shape.heads, generator=generator).to(device) if shape.sinks else None
    meta = step_over(query_starts, starts, tables, shape.page_size, device)
    return Problem(q.to(device, shape.dtype), k_pages, v_pages, meta, call_of(shape, sinks))


def step_over(query_starts: Int32s, starts: Int32s, tables: Int32s, page_size: int, device: torch.device) -> StepMeta:
    """As attention is told of it: it has no tokens, and writes nothing."""
    placed = page_tables(query_starts, starts, tables, page_size).place(
        lambda arrays: {name: torch.from_numpy(np.ascontiguousarray(a)).to(device) for name, a in arrays.items()}
    )
    none = torch.zeros(0, dtype=torch.long, device=device)
    return StepMeta(
        token_ids=torch.zeros(int(query_starts[-1]), dtype=torch.long),
        positions=none,
        query_starts=torch.from_numpy(query_starts),
        starts=torch.from_numpy(starts),
        block_tables=placed.on_device("block_tables"),
        slots=none,
        page_size=page_size,
        tables=placed,
    )


def call_of(shape: Shape, sinks: torch.Tensor | None) -> AttentionCall:
    scales = (0.5, 0.25) if shape.kv_dtype == FP8 else (1.0, 1.0)
    return AttentionCall(shape.scaling, shape.window, shape.softcap, sinks, *scales)


def _pages(
    shape: Shape,
    tables: Int32s,
    lengths: Sequence[int],
    counts: Sequence[int],
    total: int,
    seed: int,
    device: torch.device,
) -> torch.Tensor:
    size = shape.page_size
    values = torch.full((total, size, shape.kv_heads, shape.head_dim), float("nan"))
    generator = torch.Generator().manual_seed(seed)
    for i, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        rows = torch.full((count * size, shape.kv_heads, shape.head_dim), float("nan"))
        rows[:length] = torch.randn(length, shape.kv_heads, shape.head_dim, generator=generator)
        values[torch.from_numpy(tables[i, :count].astype(np.int64))] = rows.view(count, size, *rows.shape[1:])
    return values.to(shape.kv_dtype).to(device)


def answer(backend: FlashInferBackend | TorchBackend, problem: Problem) -> torch.Tensor:
    return backend.attend(problem.q_THD, problem.k_pages, problem.v_pages, problem.meta, problem.call)


def relative_error(backend: FlashInferBackend, problem: Problem, wanted: torch.Tensor) -> float:
    """By the norm of what is wanted."""
    return float((answer(backend, problem).float() - wanted.float()).norm() / wanted.float().norm())
