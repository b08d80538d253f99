"""What earlier prompts have brought: by hand, and as a cache that forgets nothing would say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from placement.workload.prefixes import brought_len
from placement.workload.requests import Ints, Workload
from placement.workload.traffic import Traffic
from tests.placement.toys import alike


def of_blocks(*blocks: tuple[int, ...], prompt_len: int = 100) -> Workload:
    return replace(
        alike(len(blocks)), blocks=blocks, block_len=32, prompt_len=np.full(len(blocks), prompt_len, dtype=np.int64)
    )


def remembered(workload: Workload) -> Ints:
    known: set[tuple[int, int]] = set()
    lengths = []
    for blocks, prompt_len in zip(workload.blocks, workload.prompt_len.tolist(), strict=True):
        hit = next((place for place, name in enumerate(blocks) if (place, name) not in known), len(blocks))
        lengths.append(min(hit * workload.block_len, prompt_len))
        known |= set(enumerate(blocks))
    return np.array(lengths)


def test_a_prompt_finds_the_leading_blocks_that_earlier_ones_had_at_the_same_place() -> None:
    shared = of_blocks((1, 2, 3, 4), (1, 2, 5), (5, 2, 3), (1, 2, 3, 4), (), (-1, 2**63), (-1, 2**63 + 1), (2**64 - 1,))
    assert brought_len(shared).tolist() == [0, 64, 0, 100, 0, 0, 32, 32]
    assert brought_len(alike(3)).tolist() == [0, 0, 0]
    assert brought_len(of_blocks((), ())).tolist() == [0, 0]


def test_it_is_what_a_cache_hits_that_forgets_nothing_and_no_draw_hits_more() -> None:
    rng = np.random.default_rng(0)
    rows = [tuple(rng.integers(0, 3, size=rng.integers(0, 6)).tolist()) for _ in range(300)]
    source = of_blocks(*rows, prompt_len=150)
    assert (brought_len(source) == remembered(source)).all()
    drawn = Traffic(source=source).draw(1.0, 700, 0)
    begun = next(row for row in range(300) if list(drawn.blocks[:20]) == rows[row : row + 20])
    assert (remembered(drawn) <= np.roll(np.tile(brought_len(source), 3), -begun)[:700]).all()
