"""The workspace holds what FlashInfer's scheduler may ask for: by a transcript of how it plans."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.attention.flashinfer.backend import FlashInferBackend
from engine.attention.flashinfer.choice import measured
from engine.attention.flashinfer.shapes import Shape
from engine.attention.flashinfer.timing import Limits
from engine.attention.flashinfer.workspace import workspace_bytes
from engine.attention.flashinfer.wrappers import WORKSPACE_BYTES, FlashInfer
from tests.engine.attention import fake_flashinfer

H200 = 132  # multiprocessors
LENGTHS = ([1], [2, 9], [40], [1, 4000], [129] * 5, [64] * 31, [8192], [1] * 64)  # rows of each sequence
CONTEXTS = (1, 500, 8000, 100_000)


def shape(heads: int, kv_heads: int, head_dim: int) -> Shape:
    return Shape(heads=heads, kv_heads=kv_heads, head_dim=head_dim, page_size=16, scaling=1.0)


SHAPES = [
    shape(*sizes) for sizes in ((32, 8, 128), (64, 8, 128), (48, 1, 128), (71, 1, 64), (16, 16, 256), (20, 1, 256))
]


def tile_rows(rows: int, head_dim: int) -> int:
    if rows > 64 and head_dim < 256:
        return 128
    return 64 if rows > 16 else 16


def planned_bytes(layer: Shape, lengths: list[int], context: int, *, in_graph: bool) -> int:
    """What PrefillPlan takes of the workspace for these rows over so many keys each; 0 where it does not split."""
    most = 2 * H200 // layer.kv_heads
    packed = [length * layer.group for length in lengths]
    if in_graph:
        tile = tile_rows((sum(lengths) - len(lengths) + 1) * layer.group, layer.head_dim)
        blocks = max(most, -(-sum(packed) // tile) + len(lengths) - 1)
    else:
        tile = tile_rows(sum(packed) // len(packed), layer.head_dim)
        pages = -(-context // layer.page_size)
        low, high = 128 // layer.page_size, pages
        while low < high:
            middle = (low + high) // 2
            if sum(-(-rows // tile) * -(-pages // middle) for rows in packed) > most:
                low = middle + 1
            else:
                high = middle
        if low >= pages:
            return 0
        blocks = sum(-(-rows // tile) * -(-pages // low) for rows in packed)
    rows = layer.heads * blocks * tile
    return -(-rows * layer.head_dim * 4 // 16) * 16 + rows * 4


@pytest.mark.parametrize("layer", SHAPES, ids=lambda layer: f"{layer.heads}/{layer.kv_heads}, {layer.head_dim}")
def test_no_step_asks_for_more(layer: Shape) -> None:
    least_bytes = workspace_bytes([layer], H200, sequences=128)
    asked = [planned_bytes(layer, rows, context, in_graph=False) for rows in LENGTHS for context in CONTEXTS]
    asked += [planned_bytes(layer, [1] * size, 1, in_graph=True) for size in (1, 2, 8, 120, 128)]
    assert least_bytes >= max(asked)
    assert max(asked) > least_bytes / 2, "and not for much less"


@pytest.mark.parametrize(
    ("layer", "sequences", "is_more"),
    [
        (shape(32, 8, 128), 128, False),
        (shape(64, 8, 128), 256, False),
        (shape(64, 8, 128), 1024, True),
        (shape(48, 1, 128), 1, True),
        (shape(71, 1, 64), 1, True),
    ],
)
def test_few_kv_heads_or_many_sequences_want_more_than_usual(layer: Shape, sequences: int, is_more: bool) -> None:
    assert (workspace_bytes([SHAPES[0], layer], H200, sequences) > WORKSPACE_BYTES) == is_more


def test_what_serves_has_the_workspace_of_its_shapes(tmp_path: Path) -> None:
    plain = FlashInferBackend(FlashInfer.on(torch.device("cpu"), fake_flashinfer))
    layer, limits = shape(4, 2, 64), Limits(sequences=2, keys=40)
    served = measured(plain, [layer], limits, None, tmp_path / "kernels.json")
    assert served.flashinfer.workspace.numel() == workspace_bytes([layer], 0, 2) > plain.flashinfer.workspace.numel()
    again = measured(served, [layer], limits, None, tmp_path / "kernels.json")
    assert again.flashinfer.workspace is served.flashinfer.workspace
