"""How much scratch memory FlashInfer's kernels ask for at most, before there is a step. Arithmetic only.

FA2 splits long contexts: a block computes a tile of rows over some of the keys and leaves a partial answer in float32,
with its weight, in the workspace. Its plan counts whole tiles for every query head, also where a KV head's many query
heads are rows of one tile, so that with few KV heads it wants much. As PrefillPlan in FlashInfer 0.6.14 (scheduler.cuh)
has it; decode on CUDA cores and fa3 want less.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.attention.flashinfer.shapes import Shape

BLOCKS = 2  # of a multiprocessor, as the plan takes it
PARTIAL_BYTES = 4
ALIGNMENT = 16  # of each of its two arrays


def workspace_bytes(shapes: Sequence[Shape], multiprocessors: int, sequences: int) -> int:
    """For all layers of a model. `sequences`: of the largest graph of decode steps."""
    return max((_split_bytes(shape, multiprocessors, sequences) for shape in shapes), default=0)


def _split_bytes(shape: Shape, multiprocessors: int, sequences: int) -> int:
    blocks = BLOCKS * multiprocessors // shape.kv_heads
    in_graph = _tile_rows(shape.group, shape.head_dim)
    tiles = -(-sequences * shape.group // in_graph) + sequences - 1  # that a graph has room for, split or not
    rows = max(blocks * _tile_rows(None, shape.head_dim), max(blocks, tiles) * in_graph)
    return rows * shape.heads * (shape.head_dim + 1) * PARTIAL_BYTES + 2 * ALIGNMENT


def _tile_rows(rows: int | None, head_dim: int) -> int:
    """Of a tile, where a sequence has so many rows for a KV head; None: any number. (FA2DetermineCtaTileQ.)"""
    if (rows is None or rows > 64) and head_dim < 256:
        return 128
    return 64 if rows is None or rows > 16 else 16
