"""The transfer plan: layer groups cover the layers, evenly or as asked."""

from __future__ import annotations

import pytest

from engine.pages.layout import KvLayout, LayerKv
from kv_transfer.plan import layer_groups

pytestmark = pytest.mark.unit


def layout(num_layers: int, page_kib: int) -> KvLayout:
    return KvLayout(1, "float32", (LayerKv(1, page_kib * 128, page_kib * 128),) * num_layers, 8)


@pytest.mark.parametrize(
    ("num_layers", "page_kib", "pages", "wanted"),
    [
        (12, 1, 1, 1),  # 12 KiB in all
        (12, 48, 8, 5),  # 4.5 MiB
        (12, 48, 512, 8),  # 288 MiB
        (3, 1024, 4, 3),  # no more groups than layers
    ],
)
def test_groups_are_about_a_megabyte_and_at_most_eight(num_layers: int, page_kib: int, pages: int, wanted: int) -> None:
    groups = layer_groups(layout(num_layers, page_kib), pages, 0)
    assert len(groups) == wanted
    assert [layer for group in groups for layer in group] == list(range(num_layers))
    sizes = {len(group) for group in groups}
    assert max(sizes) - min(sizes) <= 1


def test_groups_of_a_given_size() -> None:
    assert layer_groups(layout(7, 1), 1, 3) == [range(3), range(3, 6), range(6, 7)]
    with pytest.raises(ValueError, match="layers_per_group is -1"):
        layer_groups(layout(7, 1), 1, -1)
