"""Rotates a step's queries and keys and puts keys and values into their pages: one kernel, in Triton.

A program takes some heads of a row: queries, or keys and the values beside them. It rounds where FlashInfer's rope for
sm_90 does: in float32, after the product with the sine and after the FMA with the cosine. Only what is below 2**-126,
which counts as 0 there, may differ.

Shapes: T rows, H query heads, G key/value heads, D head_dim, P pages.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.fused.kernels import RopeTable

PAIRS = 512  # of a program: D/2 of each head
NUM_WARPS = 2  # so that a thread moves 16 bytes at a time


@triton.jit
def _turn(x, out, cos, sin, is_inside, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    low = tl.load(x, mask=is_inside, other=0.0).to(tl.float32)
    high = tl.load(x + HALF, mask=is_inside, other=0.0).to(tl.float32)
    less = high * -1.0  # Triton's own minus takes from 0, which loses the sign of a zero
    tl.store(out, tl.fma(low, cos, less * sin).to(out.dtype.element_ty), mask=is_inside)
    tl.store(out + HALF, tl.fma(high, cos, low * sin).to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def _rotate_and_write(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    q_row,
    k_row,
    v_row,
    cos_sin,
    positions,
    slots,
    q_out,
    k_pages,
    v_pages,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """q_row, k_row, v_row: elements from a row to the next."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    pair = tl.arange(0, HALF)[None, :]
    angles = cos_sin + tl.load(positions + row) * (2 * HALF) + pair + tl.zeros((BLOCK, 1), tl.int32)
    cos = tl.load(angles)  # by each thread for its own pairs: nothing goes through shared memory
    sin = tl.load(angles + HALF)
    if block < tl.cdiv(HEADS, BLOCK):
        head = block * BLOCK + tl.arange(0, BLOCK)[:, None]
        at = head * (2 * HALF) + pair
        _turn(q + row * q_row + at, q_out + row * (HEADS * 2 * HALF) + at, cos, sin, head < HEADS, HALF)
    else:
        head = (block - tl.cdiv(HEADS, BLOCK)) * BLOCK + tl.arange(0, BLOCK)[:, None]
        at = head * (2 * HALF) + pair
        to = tl.load(slots + row) * (KV_HEADS * 2 * HALF) + at
        is_inside = head < KV_HEADS
        _turn(k + row * k_row + at, k_pages + to, cos, sin, is_inside, HALF)
        value = v + row * v_row + at
        tl.store(v_pages + to, tl.load(value, mask=is_inside), mask=is_inside)
        tl.store(v_pages + to + HALF, tl.load(value + HALF, mask=is_inside), mask=is_inside)


def rotate_and_write(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    table: RopeTable,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots_T: torch.Tensor,
) -> torch.Tensor:
    """The rotated queries, contiguous. Rows may be parts of wider ones. D is a power of two; queued on the current
    stream."""
    num_rows, heads, dim = q_THD.shape
    kv_heads = k_TGD.shape[1]
    assert slots_T.shape[0] == num_rows, "every row has a page, padding the reserved one"
    assert all(x.stride()[1:] == (dim, 1) for x in (q_THD, k_TGD, v_TGD)), "a row's heads stand side by side"
    assert all(x.is_contiguous() for x in (k_pages, v_pages)), "a slot is a row of the pages"
    q_out = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    block = max(1, 2 * PAIRS // dim)
    _rotate_and_write[(num_rows, triton.cdiv(heads, block) + triton.cdiv(kv_heads, block))](
        q_THD,
        k_TGD,
        v_TGD,
        q_THD.stride(0),
        k_TGD.stride(0),
        v_TGD.stride(0),
        table.cos_sin,
        table.positions,
        slots_T,
        q_out,
        k_pages,
        v_pages,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=dim // 2,
        BLOCK=block,
        num_warps=NUM_WARPS,
    )
    return q_out
