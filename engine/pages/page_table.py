"""PartTable says where the pages of each layer's K and V stand, as addresses: what a kernel that copies pages is told.

A *part* is one layer's K or V; its rows are pages. Parts come in the order of KvLayout.spans (K then V, layer after
layer), which is the order of the wire and of the checksum. Arithmetic only: addresses are numbers, of memory of any
device, and nothing here reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.pages.layout import KvLayout

Int64s = npt.NDArray[np.int64]
WIDE_BYTES = 16  # what one thread loads at once, where addresses and rows allow
WORD_BYTES = 8


@dataclass(frozen=True, slots=True, eq=False)
class PartTable:
    """`addresses[p]` is where row 0 of part p begins, `row_bytes[p]` how long each of its rows is."""

    addresses: Int64s
    row_bytes: Int64s

    @property
    def num_parts(self) -> int:
        return len(self.addresses)

    @property
    def is_wide(self) -> bool:
        """Whether every row begins and ends on a 16-byte boundary."""
        return not ((self.addresses | self.row_bytes) % WIDE_BYTES).any()

    @property
    def has_words(self) -> bool:
        """Whether every row is whole, aligned 8-byte words."""
        return not ((self.addresses | self.row_bytes) % WORD_BYTES).any()


def pages_at(layout: KvLayout, address: int, layers: range) -> PartTable:
    """The pages of `layers` in a worker's KV memory that begins at `address`."""
    offsets = [offset for i in layers for offset in (layout.k_offset(i), layout.v_offset(i))]
    return PartTable(_int64s(offsets) + address, _row_bytes(layout, layers))


def buffer_at(layout: KvLayout, address: int, layers: range, num_pages: int) -> PartTable:
    """The same pages, `num_pages` of them, gathered without gaps at `address`: row i is the i-th page."""
    row_bytes = _row_bytes(layout, layers)
    ends = np.cumsum(row_bytes * num_pages)
    return PartTable(ends - row_bytes * num_pages + address, row_bytes)


def check_pages(pages: Sequence[int], num_pages: int) -> Int64s:
    """`pages` as an array. Raises ValueError when one of them does not exist: a kernel would write anywhere."""
    index = _int64s(pages)
    if len(index) and not 0 <= int(index.min()) <= int(index.max()) < num_pages:
        raise ValueError(f"pages {int(index.min())} to {int(index.max())} of {num_pages} are to be copied")
    return index


def _row_bytes(layout: KvLayout, layers: range) -> Int64s:
    return _int64s([nbytes for i in layers for nbytes in (layout.k_page_bytes(i), layout.v_page_bytes(i))])


def _int64s(values: Any) -> Int64s:
    return np.asarray(values, np.int64)
