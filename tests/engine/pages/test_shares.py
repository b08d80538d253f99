"""Pages whose heads stand in several shares are the whole pages: whatever is copied, gathered or scattered."""

from __future__ import annotations

import itertools
import os
import random

import numpy as np
import pytest
import torch

from engine.pages.layout import KvLayout, LayerKv, LayerState, StateTensor
from engine.pages.memory import KvMemory, ShareBytes
from engine.pages.page_table import check_pages
from engine.pages.share import WHOLE, Share, check_whole, sent_bytes
from tests.kv_transfer.fake_gpu import copy_rows, row_bytes

STATE = LayerState((StateTensor(0, (3,), "float32"),), (StateTensor(0, (5,), "float32"),))
LAYERS = (LayerKv(4, 8, 16), LayerKv(2, 6, 6), STATE, LayerKv(4, 3, 1))
LATENT = (LayerKv(1, 24, 8),) * 2
TWO_HEADS = (LayerKv(2, 8, 8), LayerKv(2, 3, 5))


def shares_of(size: int, cuts: tuple[int, ...] = ()) -> list[Share]:
    """Ranks, in stages that end at the layers `cuts`."""
    stages: list[range | None] = [range(*pair) for pair in itertools.pairwise((0, *cuts))] if cuts else [None]
    return [Share(rank, size, layers) for layers in stages for rank in range(size)]


CUTS = {
    "whole": ("bfloat16", LAYERS, [WHOLE]),
    "two ranks": ("bfloat16", LAYERS, shares_of(2)),
    "two ranks in two stages": ("bfloat16", LAYERS, shares_of(2, (1, 4))),
    "three stages": ("bfloat16", LAYERS, shares_of(1, (1, 3, 4))),
    "more ranks than heads": ("float32", TWO_HEADS, shares_of(4)),
    "latents": ("float32", LATENT, shares_of(4)),
    "int8 rows": ("int8", TWO_HEADS, shares_of(2)),
}


def cut_memory(name: str, num_pages: int, seed: int) -> tuple[KvMemory, list[KvMemory]]:
    """As a leader has it; and each rank's own. Heads that several have are the same bytes, as they are computed."""
    dtype, layers, shares = CUTS[name]
    layout = KvLayout(4, dtype, layers, num_pages)
    ranks = [KvMemory(layout, share=share) for share in shares[1:]]
    others = [
        ShareBytes(share=rank.share, num_bytes=len(rank.bytes), fd=os.dup(rank.fd or -1), address=rank.address)
        for rank in ranks
    ]
    leader = KvMemory(layout, share=shares[0], others=others)
    data = np.random.default_rng(seed).integers(0, 256, layout.page_bytes() * num_pages, dtype=np.uint8)
    leader.rows.scatter(range(len(layers)), range(num_pages), data)
    return leader, [leader, *ranks]


def whole(memory: KvMemory, layers: range, pages: list[int]) -> bytes:
    out = np.empty(memory.layout.page_bytes(layers) * len(pages), np.uint8)
    memory.rows.gather(layers, pages, out)
    return out.tobytes()


@pytest.mark.unit
@pytest.mark.parametrize("name", CUTS)
def test_heads_stand_where_a_rank_computes_them(name: str) -> None:
    leader, ranks = cut_memory(name, 7, 1)
    for layer, shape in enumerate(leader.layout.layers):
        if not isinstance(shape, LayerKv):
            continue
        k_bytes = leader.layout.k_page_bytes(layer) * 2
        data = np.frombuffer(whole(leader, range(layer, layer + 1), [5, 2]), np.uint8)
        pages = data[:k_bytes].reshape(2, 4, shape.kv_heads, -1)
        for rank in ranks:
            if layer in rank.share.layers_of(rank.layout):
                heads = rank.share.heads(shape.kv_heads)
                own = rank.k(layer)[[5, 2]].contiguous().view(torch.uint8).numpy()
                assert (own.reshape(2, 4, len(heads), -1) == pages[:, :, heads.start : heads.stop]).all()


@pytest.mark.unit
@pytest.mark.parametrize(
    ("source", "target"),
    [(a, b) for a, b in itertools.product(CUTS, repeat=2) if CUTS[a][:2] == CUTS[b][:2]],
)
def test_pages_are_copied_between_any_two_cuts(source: str, target: str) -> None:
    """By the CPU's copies, and by what a GPU's kernels are told; what is shown on the way are whole pages."""
    rng, layers = random.Random(3), range(len(CUTS[source][1]))
    shown: list[bytes] = []
    for chosen, by_table in itertools.product((layers, layers[1:]), (False, True)):
        shown.clear()
        ours, our_ranks = cut_memory(source, 23, 1)
        theirs, their_ranks = cut_memory(target, 31, 2)
        src, dst = rng.sample(range(23), 7), rng.sample(range(31), 7)
        wanted, kept = whole(ours, chosen, src), [page for page in range(31) if page not in dst]
        before = whole(theirs, layers, kept)
        if by_table:
            tables = ours.places.to_read(chosen), theirs.places.to_write(chosen)
            copy_rows(*tables, check_pages(src, 23), check_pages(dst, 31))
            assert b"".join(row_bytes(tables[0], check_pages(src, 23))) == wanted
        else:
            theirs.rows.copy_from(ours.rows, chosen, src, dst, lambda block: shown.append(block.tobytes()))
            assert b"".join(shown) == wanted
        assert whole(theirs, chosen, dst) == wanted
        assert whole(theirs, layers, kept) == before
        assert b"".join(block.tobytes() for block in theirs.rows.blocks(chosen, dst)) == wanted
        assert len(our_ranks) + len(their_ranks) == len(ours.shares) + len(theirs.shares)  # their addresses are used
        again = KvMemory(theirs.layout)
        again.rows.scatter(chosen, dst, np.frombuffer(wanted, np.uint8))
        assert whole(again, chosen, dst) == wanted


@pytest.mark.unit
@pytest.mark.parametrize("name", ["more ranks than heads", "latents"])
def test_a_head_that_several_have_is_written_to_all(name: str) -> None:
    leader, ranks = cut_memory(name, 5, 1)
    layers = range(leader.layout.num_layers)
    leader.rows.scatter(layers, [3], np.full(leader.layout.page_bytes(), 7, np.uint8))
    for rank in ranks:
        for part in (pages[3] for i in layers for pages in (rank.k(i), rank.v(i))):
            assert (part.contiguous().view(torch.uint8) == 7).all()


@pytest.mark.unit
@pytest.mark.parametrize("name", CUTS)
def test_each_byte_of_a_page_is_sent_by_one(name: str) -> None:
    dtype, layers, shares = CUTS[name]
    layout = KvLayout(4, dtype, layers, 5)
    sent = sent_bytes(layout, shares)
    assert sum(sent) == layout.page_bytes()
    if name == "more ranks than heads":
        assert sent == [layout.page_bytes() // 2, 0] * 2


@pytest.mark.unit
def test_shares_that_lack_something_are_refused() -> None:
    layout = KvLayout(4, "float32", LAYERS, 3)
    with pytest.raises(ValueError, match=r"^nobody has head 2 of layer 0$"):
        check_whole(layout, [Share(0, 2)])
    with pytest.raises(ValueError, match=r"^nobody has head 0 of layer 3$"):
        check_whole(layout, [Share(0, 1, range(3))])
    with pytest.raises(ValueError, match=r"^share 0/1:2-9 has other layers than the 4 that there are$"):
        check_whole(layout, [WHOLE, Share(0, 1, range(2, 9))])
    with pytest.raises(ValueError, match=r"^4 KV heads cannot be divided among 3 ranks$"):
        check_whole(layout, [Share(0, 3)])
    for share in (WHOLE, Share(1, 4), Share(0, 2, range(3, 7))):
        assert Share.read(str(share)) == share
    for text in ("", "2/2", "a/b", "0/1:3"):
        with pytest.raises(ValueError, match=r"."):
            Share.read(text)
