"""The two kernels that touch KV pages on a GPU: copy rows between two PartTables, and digest rows. In Triton.

Both take one table of int64 in device memory and read raw addresses from it, so that one launch covers every page of
every layer of a segment, in this process's memory or in another's that was opened (CUDA IPC). One program moves one
block of one page of a part; parts that are shorter than the longest leave programs with nothing to do. Where the heads
of a page are divided among ranks, here or there, it is copied token by token.

digest = sum over words of word * odd(position), modulo 2**64, where position counts words in the order of the wire. An
odd factor can be undone, so no single word can change, and no two can change places, unseen.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from engine.pages.page_table import WORD_BYTES, Int64s, PartTable, common

COPY_BLOCK = 1024  # words of a program: 8 KiB, or 1 KiB where bytes must be moved one by one
DIGEST_BLOCK = 1024
MIX_1 = -7046029254386353131  # 0x9E3779B97F4A7C15, as a signed number
MIX_2 = -4658895280553007687  # 0xBF58476D1CE4E5B9


@triton.jit(do_not_specialize=["num_parts", "num_rows"])
def _copy_rows(  # type: ignore[no-untyped-def]
    table, num_parts, num_rows, BLOCK: tl.constexpr, IS_WIDE: tl.constexpr, IS_CUT: tl.constexpr
):
    """table: source addresses, destination addresses, words of a run, runs, words from a page to the next at the source
    and at the destination, words from a run to the next there and there (each [num_parts]), then source and destination
    rows (each [num_rows])."""
    part = tl.program_id(0) // num_rows
    row = tl.program_id(0) % num_rows
    src_at = tl.load(table + part)
    dst_at = tl.load(table + num_parts + part)
    words = tl.load(table + 2 * num_parts + part)
    runs = tl.load(table + 3 * num_parts + part)
    src_page = tl.load(table + 4 * num_parts + part)
    dst_page = tl.load(table + 5 * num_parts + part)
    src_row = tl.load(table + 8 * num_parts + row)
    dst_row = tl.load(table + 8 * num_parts + num_rows + row)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    src_word = at
    dst_word = at
    if IS_CUT:
        run = at // words
        src_word = run * tl.load(table + 6 * num_parts + part) + at % words
        dst_word = run * tl.load(table + 7 * num_parts + part) + at % words
    if IS_WIDE:  # the hints stand on the pointers: elsewhere the compiler loses them, and loads 8 bytes instead of 16
        src = tl.multiple_of((src_at + src_row * src_page * 8).to(tl.pointer_type(tl.int64)), 16)
        dst = tl.multiple_of((dst_at + dst_row * dst_page * 8).to(tl.pointer_type(tl.int64)), 16)
        is_inside = at < (words * runs // 2) * 2
        if IS_CUT:
            src_word = tl.max_contiguous(tl.multiple_of(src_word, 2), 2)
            dst_word = tl.max_contiguous(tl.multiple_of(dst_word, 2), 2)
    else:
        src = (src_at + src_row * src_page).to(tl.pointer_type(tl.uint8))
        dst = (dst_at + dst_row * dst_page).to(tl.pointer_type(tl.uint8))
        is_inside = at < words * runs
    tl.store(dst + dst_word, tl.load(src + src_word, mask=is_inside), mask=is_inside)


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
    IS_CUT: tl.constexpr,
):
    """table: addresses, words of a page of the part, of a run of it, of a whole page, of a whole token, position of the
    part's first word (each [num_parts]), then rows [num_rows]."""
    part = tl.program_id(0) // num_rows
    number = tl.program_id(0) % num_rows
    start = tl.load(table + part)
    words = tl.load(table + num_parts + part)
    position = tl.load(table + 5 * num_parts + part) + number * tl.load(table + 3 * num_parts + part)
    row = tl.load(table + 6 * num_parts + number)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = at < words
    if HAS_WORDS:
        data = tl.load(start.to(tl.pointer_type(tl.int64)) + row * words + at, mask=is_inside, other=0)
    else:
        data = tl.load(start.to(tl.pointer_type(tl.uint8)) + row * words + at, mask=is_inside, other=0).to(tl.int64)
    if IS_CUT:
        run = tl.load(table + 2 * num_parts + part)
        at = at // run * tl.load(table + 4 * num_parts + part) + at % run
    mixed = (position + at + 1) * MIX_A
    mixed = (mixed ^ (mixed >> 32)) * MIX_B
    tl.atomic_add(out, tl.sum(data * (mixed | 1), 0), sem="relaxed")


def copy_rows(src: PartTable, dst: PartTable, src_rows: Int64s, dst_rows: Int64s, device: str) -> None:
    """Page src_rows[i] of `src` to page dst_rows[i] of `dst`, on the current stream."""
    both = common(src, dst)
    is_wide = both.is_wide
    size = WORD_BYTES if is_wide else 1
    words = [both.src_page_bytes, both.dst_page_bytes, both.src_run_bytes, both.dst_run_bytes]
    columns = [both.src, both.dst, both.run_bytes // size, both.runs, *(column // size for column in words)]
    table = _upload([*columns, src_rows, dst_rows], device)
    num_parts, most = len(both.src), int((both.run_bytes * both.runs).max()) // size
    grid = (num_parts * len(src_rows), triton.cdiv(most, COPY_BLOCK))
    _copy_rows[grid](table, num_parts, len(src_rows), BLOCK=COPY_BLOCK, IS_WIDE=is_wide, IS_CUT=both.is_cut)


def digest_rows(parts: PartTable, rows: Int64s, device: str) -> torch.Tensor:
    """The digest of `rows` of every part, int64 [1], on the current stream. The parts have every head once."""
    has_words = parts.has_words
    size = WORD_BYTES if has_words else 1
    whole_page_bytes = parts.token_bytes * parts.tokens
    first = np.flatnonzero(np.diff(parts.planes, prepend=-1))  # part of each plane
    plane_bytes = whole_page_bytes[first] * len(rows)
    begins = (np.cumsum(plane_bytes) - plane_bytes)[parts.planes] + parts.starts
    sizes = [parts.page_bytes, parts.run_bytes, whole_page_bytes, parts.token_bytes, begins]
    table = _upload([parts.addresses, *(column // size for column in sizes), rows], device)
    out = torch.zeros(1, dtype=torch.int64, device=device)
    grid = (parts.num_parts * len(rows), triton.cdiv(int(parts.page_bytes.max()) // size, DIGEST_BLOCK))
    _digest_rows[grid](
        table,
        out,
        parts.num_parts,
        len(rows),
        MIX_A=MIX_1,
        MIX_B=MIX_2,
        BLOCK=DIGEST_BLOCK,
        HAS_WORDS=has_words,
        IS_CUT=parts.is_cut,
    )
    return out


def _upload(columns: list[Any], device: str) -> torch.Tensor:
    table = torch.from_numpy(np.concatenate(columns))
    return table if device == "cpu" else table.pin_memory().to(device, non_blocking=True)
