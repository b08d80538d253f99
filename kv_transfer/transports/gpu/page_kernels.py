"""The two kernels that touch KV pages on a GPU: copy rows between two PartTables, and digest rows. In Triton.

Both take one table of int64 in device memory and read raw addresses from it, so that one launch covers every page of
every layer of a segment, in this process's memory or in another's that was opened (CUDA IPC). One program moves one
block of one row; rows of parts that are shorter than the longest leave programs with nothing to do.

digest = sum over words of word * odd(position), modulo 2**64, where position counts words in the order of the wire. An
odd factor can be undone, so no single word can change, and no two can change places, unseen.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from engine.pages.page_table import WORD_BYTES, Int64s, PartTable

COPY_BLOCK = 1024  # words of a program: 8 KiB, or 1 KiB where bytes must be moved one by one
DIGEST_BLOCK = 1024
MIX_1 = -7046029254386353131  # 0x9E3779B97F4A7C15, as a signed number
MIX_2 = -4658895280553007687  # 0xBF58476D1CE4E5B9


@triton.jit(do_not_specialize=["num_parts", "num_rows"])
def _copy_rows(table, num_parts, num_rows, BLOCK: tl.constexpr, IS_WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """table: source addresses, destination addresses, words of a row (each [num_parts]), then source and destination
    rows (each [num_rows])."""
    part = tl.program_id(0) // num_rows
    row = tl.program_id(0) % num_rows
    src_at = tl.load(table + part)
    dst_at = tl.load(table + num_parts + part)
    words = tl.load(table + 2 * num_parts + part)
    src_row = tl.load(table + 3 * num_parts + row)
    dst_row = tl.load(table + 3 * num_parts + num_rows + row)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if IS_WIDE:  # the hints stand on the pointers: elsewhere the compiler loses them, and loads 8 bytes instead of 16
        src = tl.multiple_of((src_at + src_row * words * 8).to(tl.pointer_type(tl.int64)), 16)
        dst = tl.multiple_of((dst_at + dst_row * words * 8).to(tl.pointer_type(tl.int64)), 16)
        is_inside = at < (words // 2) * 2
    else:
        src = (src_at + src_row * words).to(tl.pointer_type(tl.uint8))
        dst = (dst_at + dst_row * words).to(tl.pointer_type(tl.uint8))
        is_inside = at < words
    tl.store(dst + at, tl.load(src + at, mask=is_inside), mask=is_inside)


@triton.jit(do_not_specialize=["num_parts", "num_rows"])
def _digest_rows(  # type: ignore[no-untyped-def]
    table,
    out,
    num_parts,
    num_rows,
    MIX_A: tl.constexpr,
    MIX_B: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_WORDS: tl.constexpr,
):
    """table: addresses, words of a row, position of the part's first word (each [num_parts]), then rows [num_rows]."""
    part = tl.program_id(0) // num_rows
    number = tl.program_id(0) % num_rows
    start = tl.load(table + part)
    words = tl.load(table + num_parts + part)
    position = tl.load(table + 2 * num_parts + part) + number * words
    row = tl.load(table + 3 * num_parts + number)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = at < words
    if HAS_WORDS:
        data = tl.load(start.to(tl.pointer_type(tl.int64)) + row * words + at, mask=is_inside, other=0)
    else:
        data = tl.load(start.to(tl.pointer_type(tl.uint8)) + row * words + at, mask=is_inside, other=0).to(tl.int64)
    mixed = (position + at + 1) * MIX_A
    mixed = (mixed ^ (mixed >> 32)) * MIX_B
    tl.atomic_add(out, tl.sum(data * (mixed | 1), 0), sem="relaxed")


def copy_rows(src: PartTable, dst: PartTable, src_rows: Int64s, dst_rows: Int64s, device: str) -> None:
    """Row src_rows[i] of every part of `src` to row dst_rows[i] of the same part of `dst`, on the current stream."""
    is_wide = src.is_wide and dst.is_wide
    words = src.row_bytes // WORD_BYTES if is_wide else src.row_bytes
    table = _upload([src.addresses, dst.addresses, words, src_rows, dst_rows], device)
    grid = (src.num_parts * len(src_rows), triton.cdiv(int(words.max()), COPY_BLOCK))
    _copy_rows[grid](table, src.num_parts, len(src_rows), BLOCK=COPY_BLOCK, IS_WIDE=is_wide)


def digest_rows(parts: PartTable, rows: Int64s, device: str) -> torch.Tensor:
    """The digest of `rows` of every part, int64 [1], on the current stream."""
    words = parts.row_bytes // WORD_BYTES if parts.has_words else parts.row_bytes
    starts = np.cumsum(words * len(rows)) - words * len(rows)
    table = _upload([parts.addresses, words, starts, rows], device)
    out = torch.zeros(1, dtype=torch.int64, device=device)
    grid = (parts.num_parts * len(rows), triton.cdiv(int(words.max()), DIGEST_BLOCK))
    _digest_rows[grid](
        table,
        out,
        parts.num_parts,
        len(rows),
        MIX_A=MIX_1,
        MIX_B=MIX_2,
        BLOCK=DIGEST_BLOCK,
        HAS_WORDS=parts.has_words,
    )
    return out


def _upload(columns: list[Any], device: str) -> torch.Tensor:
    table = torch.from_numpy(np.concatenate(columns))
    return table if device == "cpu" else table.pin_memory().to(device, non_blocking=True)
