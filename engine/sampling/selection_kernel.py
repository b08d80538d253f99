"""Top-k and top-p on a GPU without a sort, in Triton: each program narrows one row, in place.

A float32's bits, turned so that they grow with it, are searched for the largest bound above which, itself counted in,
enough is left: ids for top-k, weight for top-p. Two bits are settled in each pass over the row, by sums above three
bounds. A last pass keeps what is above the bound and, of what equals it, the lowest ids that are still needed. Any
distribution takes the same passes, so there is no case that the host would have to decide.

Bytes read of a row of 128k: 18 passes over 0.5 MB for top-k and 19 over 1.5 MB for top-p. By one multiprocessor at some
100 GB/s from the second-level cache an estimate of 0.1 and 0.3 ms, for as many rows as there are multiprocessors; where
they do not fit in the cache, 0.4 and 1.3 ms for 128 rows at 3 TB/s. A stable sort of those moves 12 bytes an element,
read and written, for each of its digits, and the weights in its order are gathered, summed and scattered.

Sums are float64 in an order of their own that no other row changes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.sampling.host import TOP_P_SLACK

BLOCK = 4096
NUM_WARPS = 16
BITS = 32


@triton.jit
def _read(scores, weights, start, VOCAB: tl.constexpr, COUNTS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A block's ids, which of them there are, their order as int32, and what each counts for."""
    ids = start + tl.arange(0, BLOCK)
    is_inside = ids < VOCAB
    values = tl.load(scores + ids, mask=is_inside, other=float("-inf"))
    values = tl.where(values == 0.0, 0.0, values)  # -0.0 is 0.0
    bits = values.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    mass = is_inside.to(tl.float64) if COUNTS else tl.load(weights + ids, mask=is_inside, other=0.0)
    return ids, is_inside, order, mass


@triton.jit
def _bound(scores, weights, wanted, VOCAB: tl.constexpr, COUNTS: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest order from which on the row has `wanted` or more."""
    least = -(1 << (BITS - 1))
    bound = tl.full((), least, tl.int64)
    for turn in range(BITS // 2):
        step = tl.full((), 1, tl.int64) << (BITS - 2 - 2 * turn)
        above_1 = tl.zeros((BLOCK,), tl.float64)
        above_2 = tl.zeros((BLOCK,), tl.float64)
        above_3 = tl.zeros((BLOCK,), tl.float64)
        for start in range(0, VOCAB, BLOCK):
            _, _, order, mass = _read(scores, weights, start, VOCAB, COUNTS, BLOCK)
            above_1 += tl.where(order >= bound + step, mass, 0.0)
            above_2 += tl.where(order >= bound + 2 * step, mass, 0.0)
            above_3 += tl.where(order >= bound + 3 * step, mass, 0.0)
        steps = (tl.sum(above_1) >= wanted).to(tl.int64)
        steps += (tl.sum(above_2) >= wanted).to(tl.int64)
        steps += (tl.sum(above_3) >= wanted).to(tl.int64)
        bound += steps * step
    return bound


@triton.jit
def _keep(scores, weights, wanted, VOCAB: tl.constexpr, COUNTS: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The fewest of the largest that make `wanted`; the others' weights at 0."""
    bound = _bound(scores, weights, wanted, VOCAB, COUNTS, BLOCK, BITS)
    above = tl.zeros((BLOCK,), tl.float64)
    largest = tl.zeros((BLOCK,), tl.float64)  # what each that equals the bound counts for
    for start in range(0, VOCAB, BLOCK):
        _, _, order, mass = _read(scores, weights, start, VOCAB, COUNTS, BLOCK)
        above += tl.where(order > bound, mass, 0.0)
        largest = tl.maximum(largest, tl.where(order == bound, mass, 0.0))
    missing = tl.maximum(tl.ceil((wanted - tl.sum(above)) / tl.max(largest)), 1.0)
    seen = tl.full((), 0, tl.int32)
    for start in range(0, VOCAB, BLOCK):
        ids, is_inside, order, _ = _read(scores, weights, start, VOCAB, True, BLOCK)
        equals = (is_inside & (order == bound)).to(tl.int32)
        is_kept = (order > bound) | ((equals > 0) & (seen + tl.cumsum(equals, 0) <= missing))
        tl.store(weights + ids, tl.zeros((BLOCK,), tl.float64), mask=is_inside & ~is_kept)
        seen += tl.sum(equals)


@triton.jit
def _narrow(  # type: ignore[no-untyped-def]
    scores,
    weights,
    rows,
    top_k,
    top_p,
    VOCAB: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
):
    number = tl.program_id(0)
    row = tl.load(rows + number)
    scores += row * VOCAB
    weights += row * VOCAB
    most = tl.load(top_k + number)
    if most < VOCAB:
        _keep(scores, weights, most.to(tl.float64), VOCAB, True, BLOCK, BITS)
        tl.debug_barrier()  # what one thread has put at 0 another reads
    share = tl.load(top_p + number)
    if share < 1.0:
        total = tl.zeros((BLOCK,), tl.float64)
        for start in range(0, VOCAB, BLOCK):
            _, _, _, mass = _read(scores, weights, start, VOCAB, False, BLOCK)
            total += mass
        _keep(scores, weights, share * tl.sum(total) * SHARE, VOCAB, False, BLOCK, BITS)


def narrow(
    scores_RV: torch.Tensor,
    weights_RV: torch.Tensor,
    rows_S: torch.Tensor,
    top_k_S: torch.Tensor,
    top_p_S: torch.Tensor,
) -> None:
    """See selection.keep_largest; queued on the current stream."""
    assert scores_RV.is_contiguous(), "a row's scores are read one after the other"
    assert weights_RV.is_contiguous(), "and its weights"
    _narrow[(rows_S.shape[0],)](
        scores_RV,
        weights_RV,
        rows_S,
        top_k_S,
        top_p_S,
        VOCAB=scores_RV.shape[1],
        SHARE=1.0 - TOP_P_SLACK,
        BLOCK=BLOCK,
        BITS=BITS,
        num_warps=NUM_WARPS,
    )
