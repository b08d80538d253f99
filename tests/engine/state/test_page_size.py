"""How many tokens a page has where nobody says it."""

import pytest
import torch

from engine.attention.probe import LayerProbe, Probe
from engine.loading.capacity import page_size
from engine.options import EngineOptions
from engine.pages.layout import LayerKv, LayerState, StateTensor

KV = LayerProbe(LayerKv(2, 64, 64), torch.float32, 4, 0, 1.0)  # 1 KiB for each token


def state(num_bytes: int) -> LayerState:
    return LayerState((), (StateTensor(0, (num_bytes // 4,), "float32"),))


@pytest.mark.parametrize(
    ("layers", "asked", "tokens"),
    [
        ([KV], None, 16),
        ([KV], 8, 8),
        ([KV, state(15 << 10)], None, 16),
        ([KV, state(100 << 10)], None, 112),
        ([KV, KV, state(100 << 10)], None, 64),
        ([KV, state(9 << 20)], None, 1024),
        ([state(4096)], None, 1024),
        ([KV, state(100 << 10)], 16, 16),
    ],
)
def test_a_page_holds_no_more_of_states_than_of_kv(
    layers: list[LayerProbe | LayerState], asked: int | None, tokens: int
) -> None:
    assert page_size(EngineOptions(model="m", page_size=asked), Probe(2, layers)) == tokens
