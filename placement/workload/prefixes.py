"""Prefixes says how much of each prompt earlier requests of its workload have brought: what a cache that keeps all
of it for ever would hit, and so what no worker can do better than. Nothing is simulated here.

It holds for what is drawn, too: Traffic plays prompts that share prefixes in the workload's order, and a lap shares
none with another.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import chain

import numpy as np
import numpy.typing as npt

from placement.workload.requests import Ints, Workload


@lru_cache(maxsize=8)
def brought_len(workload: Workload) -> Ints:
    """Tokens at the beginning of each prompt. A workload is never changed, so that it is looked at once."""
    sizes = np.fromiter(map(len, workload.blocks), dtype=np.int64)
    if not sizes.sum():
        return np.zeros(len(workload), dtype=np.int64)
    rows = np.repeat(np.arange(len(workload)), sizes)
    places = np.arange(len(rows)) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # of a block in its prompt
    is_new = _is_new(_names(workload), places)
    num_brought = sizes.copy()  # blocks before the first one that is new
    np.minimum.at(num_brought, rows[is_new], places[is_new])
    brought: Ints = np.minimum(num_brought * workload.block_len, workload.prompt_len)
    return brought


def _names(workload: Workload) -> Ints:
    """Of all blocks, numbered anew: they may be any whole numbers."""
    named = (name % 2**64 for name in chain.from_iterable(workload.blocks))
    numbers: Ints = np.unique(np.fromiter(named, dtype=np.uint64), return_inverse=True)[1]
    return numbers.astype(np.int64)


def _is_new(names: Ints, places: Ints) -> npt.NDArray[np.bool_]:
    """Whether no earlier prompt has the block at the same place."""
    first = np.unique(names * (places.max() + 1) + places, return_index=True)[1]
    is_new = np.zeros(len(names), dtype=np.bool_)
    is_new[first] = True
    return is_new
