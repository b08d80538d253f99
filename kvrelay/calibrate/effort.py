"""How much is measured: how often, how long, and at which lengths of prompts and sizes of batches."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much to measure. `steps`: of decode in one window. `at_most_s`: no second look at anything after that."""

    repeats: int = 5
    steps: int = 32
    slowdown_repeats: int = 3
    at_most_s: float = 150.0
    minutes: float = 3.0  # of a load that has all workers at work; 0: none
    is_coarse: bool = False  # every second point of the grids


USUAL = Effort()
QUICK = Effort(repeats=2, steps=16, slowdown_repeats=1, at_most_s=45.0, minutes=0.5, is_coarse=True)


def prefill_lengths(max_chunk: int, is_coarse: bool) -> tuple[list[int], list[int]]:
    """Lengths to measure, by doubling and halfway between, and lengths to hold out, elsewhere between."""
    doubled = sorted({1, max_chunk, *(max_chunk >> k for k in range(1, 6) if max_chunk >> k >= 8)})
    between = [(a + b) // 2 for a, b in pairwise(doubled[-3:])] if not is_coarse else []
    grid = sorted({*doubled, *between})
    held = {a + (b - a) * 2 // 5 for a, b in pairwise(grid) if b - a >= 4} - set(grid)
    wanted = sorted(held)[-4:]
    return grid, wanted


def batch_sizes(max_batch: int, is_coarse: bool) -> tuple[list[int], list[int]]:
    """By doubling, and between to hold out."""
    doubled = [1 << k for k in range(max_batch.bit_length()) if 1 << k <= max_batch]
    sizes = sorted({*(doubled[::2] if is_coarse else doubled), max_batch})
    held = sorted({(a + b) // 2 for a, b in pairwise(sizes)} - set(sizes))
    return sizes, held[: 2 if is_coarse else 4]
