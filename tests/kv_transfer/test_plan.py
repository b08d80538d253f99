"""The transfer plan covers what it must, for every pair of parallel degrees; layer groups cover the layers."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from engine.pages.layout import KvLayout, LayerKv
from kv_transfer.plan import Parallel, heads_of, layer_groups, layers_of, plan_transfer

pytestmark = pytest.mark.unit
DEGREES = [Parallel(tp, pp) for tp in (1, 2, 3, 4, 8, 16) for pp in (1, 2, 3, 5)]


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 8])
@pytest.mark.parametrize("src", DEGREES, ids=str)
def test_every_layer_and_head_of_every_rank_arrives_once(src: Parallel, kv_heads: int) -> None:
    num_layers = 7
    for dst in DEGREES:
        pieces = plan_transfer(src, dst, num_layers, kv_heads)
        got = Counter((p.dst_rank, *cell) for p in pieces for cell in itertools.product(p.layers, p.heads))
        wanted = {
            (rank, layer, head)
            for rank in range(dst.ranks)
            for layer in layers_of(dst, rank, num_layers)
            for head in heads_of(dst, rank, kv_heads)
        }
        assert got == Counter(wanted)
        for p in pieces:
            assert set(p.layers) <= set(layers_of(src, p.src_rank, num_layers)), f"{p} sends layers it has not"
            assert set(p.heads) <= set(heads_of(src, p.src_rank, kv_heads)), f"{p} sends heads it has not"


@pytest.mark.parametrize("parallel", DEGREES, ids=str)
def test_ranks_hold_every_layer_and_head(parallel: Parallel) -> None:
    held = {
        cell
        for rank in range(parallel.ranks)
        for cell in itertools.product(layers_of(parallel, rank, 7), heads_of(parallel, rank, 8))
    }
    assert held == set(itertools.product(range(7), range(8)))


def test_equal_degrees_send_rank_to_rank() -> None:
    pieces = plan_transfer(Parallel(2, 2), Parallel(2, 2), 4, 8)
    assert [(p.src_rank, p.dst_rank) for p in pieces] == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_all_replicas_send() -> None:
    pieces = plan_transfer(Parallel(4), Parallel(4), 1, 1)
    assert [(p.src_rank, p.dst_rank) for p in pieces] == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_degrees_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="tp=0 pp=1"):
        Parallel(0, 1)


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
