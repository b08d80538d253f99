"""PartTable says where the pages of each layer's K and V stand, as addresses: what a kernel that copies pages is told.

A *part* is a run of heads of one layer's K or V, in one place (engine/pages/share.py); without ranks there is one for
each of them. Layers' K and V are numbered in KvLayout's order (K then V, layer after layer), which is
that of the wire and of the checksum. Arithmetic only: addresses are numbers, of memory of any device, and nothing here
reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.pages.layout import KvLayout
from engine.pages.share import Plane, PlaneRun, Share, planes

_Runs = list[tuple[PlaneRun, int]]  # of one plane, with the addresses of the shares that have them
Int64s = npt.NDArray[np.int64]
WIDE_BYTES = 16  # what one thread loads at once, where addresses and sizes allow
WORD_BYTES = 8


@dataclass(frozen=True, slots=True, eq=False)
class PartTable:
    """Arrays of one number for each part. Sizes are in bytes."""

    planes: Int64s  # K or V of a layer, counted from the first layer that is asked for
    addresses: Int64s  # of page 0
    page_bytes: Int64s  # of the part in a page
    starts: Int64s  # of the part among a whole token's bytes
    run_bytes: Int64s  # of the part in a token
    tokens: Int64s  # of a page
    token_bytes: Int64s  # of a whole token

    @property
    def num_parts(self) -> int:
        return len(self.addresses)

    @property
    def is_cut(self) -> bool:
        """Whether a part is less than its plane."""
        return bool((self.run_bytes != self.token_bytes).any())

    @property
    def has_words(self) -> bool:
        """Whether every run is whole, aligned 8-byte words."""
        runs = self.run_bytes | self.starts if self.is_cut else self.page_bytes
        return not ((self.addresses | runs) % WORD_BYTES).any()


@dataclass(frozen=True, slots=True, eq=False)
class CopyTable:
    """What parts of two workers have in common. Sizes are in bytes: of a page, and of a token in it, on each side."""

    src: Int64s
    dst: Int64s
    run_bytes: Int64s
    runs: Int64s  # of a page
    src_page_bytes: Int64s
    dst_page_bytes: Int64s
    src_run_bytes: Int64s  # from a run to the next
    dst_run_bytes: Int64s

    @property
    def is_wide(self) -> bool:
        """Whether every run begins and ends on a 16-byte boundary."""
        at = self.src | self.dst | self.run_bytes | self.src_run_bytes | self.dst_run_bytes
        return not (at % WIDE_BYTES).any()

    @property
    def is_cut(self) -> bool:
        return bool((self.runs > 1).any())


def common(src: PartTable, dst: PartTable) -> CopyTable:
    """Whole pages are one run; of others, each token's heads are."""
    ends = [table.starts + table.run_bytes for table in (src, dst)]
    first = np.maximum(src.starts[:, None], dst.starts)
    last = np.minimum(ends[0][:, None], ends[1])
    i, j = np.nonzero((src.planes[:, None] == dst.planes) & (first < last))
    start, nbytes = first[i, j], (last - first)[i, j]
    is_whole = (src.run_bytes[i] == nbytes) & (dst.run_bytes[j] == nbytes)
    tokens = src.tokens[i]
    return CopyTable(
        src=src.addresses[i] + start - src.starts[i],
        dst=dst.addresses[j] + start - dst.starts[j],
        run_bytes=np.where(is_whole, nbytes * tokens, nbytes),
        runs=np.where(is_whole, 1, tokens),
        src_page_bytes=src.page_bytes[i],
        dst_page_bytes=dst.page_bytes[j],
        src_run_bytes=np.where(is_whole, src.page_bytes[i], src.run_bytes[i]),
        dst_run_bytes=np.where(is_whole, dst.page_bytes[j], dst.run_bytes[j]),
    )


class Places:
    """Where a worker's pages stand, whoever of its processes has them."""

    def __init__(self, layout: KvLayout, shares: Sequence[tuple[Share, int]]) -> None:
        """`shares`: with the address of each."""
        self.layout = layout
        runs = [(share.runs(layout), address) for share, address in shares]
        self._planes: list[tuple[Plane, _Runs]] = []
        for layer in range(layout.num_layers):
            there = [(of_share[layer], address) for of_share, address in runs if layer in of_share]
            for which, plane in enumerate(planes(layout, layer)):
                self._planes.append((plane, [(pair[which], address) for pair, address in there]))

    def to_write(self, layers: range) -> PartTable:
        """A head that several have is in it several times."""
        return self._table(layers, lambda runs: runs)

    def to_read(self, layers: range) -> PartTable:
        """Every head once."""
        return self._table(layers, lambda runs: list({run.start: (run, at) for run, at in reversed(runs)}.values()))

    def _table(self, layers: range, choose: Callable[[_Runs], _Runs]) -> PartTable:
        chosen = self._planes[2 * layers.start : 2 * layers.stop]
        rows = [
            (n, at + run.offset, plane.tokens * run.nbytes, run.start, run.nbytes, plane.tokens, plane.token_bytes)
            for n, (plane, runs) in enumerate(chosen)
            for run, at in choose(runs)
        ]
        return PartTable(*_int64s(rows).T)


def buffer_at(layout: KvLayout, address: int, layers: range, num_pages: int) -> PartTable:
    """Whole pages, `num_pages` of them, gathered without gaps at `address`: row i is the i-th page."""
    parts = [plane for layer in layers for plane in planes(layout, layer)]
    token_bytes, tokens = _int64s([plane.token_bytes for plane in parts]), _int64s([plane.tokens for plane in parts])
    page_bytes = token_bytes * tokens
    ends = np.cumsum(page_bytes * num_pages)
    addresses = ends - page_bytes * num_pages + address
    starts = np.zeros_like(tokens)
    return PartTable(np.arange(len(parts)), addresses, page_bytes, starts, token_bytes, tokens, token_bytes)


def part_at(address: int, run_bytes: int, token_bytes: int) -> PartTable:
    """One part of a lone plane of two tokens: the first of its heads."""
    columns = (0, address, 2 * run_bytes, 0, run_bytes, 2, token_bytes)
    return PartTable(*(_int64s([number]) for number in columns))


def check_pages(pages: Sequence[int], num_pages: int) -> Int64s:
    """`pages` as an array. Raises ValueError when one of them does not exist: a kernel would write anywhere."""
    index = _int64s(pages)
    if len(index) and not 0 <= int(index.min()) <= int(index.max()) < num_pages:
        raise ValueError(f"pages {int(index.min())} to {int(index.max())} of {num_pages} are to be copied")
    return index


def _int64s(values: Any) -> Int64s:
    return np.asarray(values, np.int64)
