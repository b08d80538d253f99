"""KvMemory copies whole pages, whatever they hold, and no other page is changed."""

from __future__ import annotations

import pytest
import torch

from engine.pages.layout import KvLayout, LayerKv, LayerState, StateTensor
from engine.pages.memory import KvMemory

STATE = LayerState((StateTensor(0, (3,), "float32"),), (StateTensor(0, (5, 2), "float32"),))
LAYERS = (LayerKv(2, 8, 16), STATE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8"])
def test_pages_are_copied_in_all_layers(dtype: str) -> None:
    layout = KvLayout(page_size=4, dtype=dtype, layers=LAYERS, num_pages=7)
    memory = KvMemory(layout)
    memory.bytes.copy_(torch.randint(256, memory.bytes.shape, dtype=torch.uint8))
    before = _pages(memory)
    memory.copy_pages([(1, 4), (1, 6), (3, 0)])
    wanted = {4: before[1], 6: before[1], 0: before[3]}
    assert _pages(memory) == [wanted.get(page, content) for page, content in enumerate(before)]
    memory.close()


def _pages(memory: KvMemory) -> list[bytes]:
    """What each holds, in all layers."""
    parts = [part(layer) for layer in range(memory.layout.num_layers) for part in (memory.k, memory.v)]
    return [
        b"".join(each[page].contiguous().view(torch.uint8).numpy().tobytes() for each in parts)
        for page in range(memory.layout.num_pages)
    ]
