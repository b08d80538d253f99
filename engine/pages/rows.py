"""PageRows shows the bytes of a KvLayout as numpy rows, one row for a page, and copies, gathers and scatters them.

Where a page's heads are in several ranks' shares, it is put together of runs, and taken apart again: the order of bytes
outside is always that of whole pages. A head that several have is read from the first and written to all.

CPU only. Neighbouring pages move as one block; scattered ones in numpy's own loops, a cache's worth at a time, so that
no page costs a turn of the interpreter. (Measured over 32 MiB of random pages against one memcpy of 22 GB/s: a Python
loop of memmove 1.5, 4.5, 12 GB/s at pages of 1, 4, 24 KiB; these loops 6, 9, 14.) The GIL is free meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.pages.layout import KvLayout
from engine.pages.share import Plane, PlaneRun, Share, planes

Bytes = npt.NDArray[np.uint8]
Rows = npt.NDArray[Any]  # [num_pages, words of a page]
Pages = npt.NDArray[np.intp]
Seen = Callable[[Rows], None]  # is shown all bytes in KvLayout's order, cut anyhow, while they are in cache

CHUNK_BYTES = 256 * 1024  # a bounce through a buffer of this size stays in the cache
WORD_BYTES = 8
BLOCK_BYTES = 16 * 1024  # runs of at least this many bytes on average are copied one by one


class PageRows:
    def __init__(self, layout: KvLayout, shares: Sequence[tuple[Share, Bytes]]) -> None:
        """`shares`: together they have all of `layout`."""
        self.layout = layout
        runs = [(share.runs(layout), data) for share, data in shares]
        self._planes: list[tuple[_Plane, _Plane]] = []
        for layer in range(layout.num_layers):
            there = [(of_share[layer], data) for of_share, data in runs if layer in of_share]
            k, v = (
                _plane(plane, layout.num_pages, [(pair[which], data) for pair, data in there])
                for which, plane in enumerate(planes(layout, layer))
            )
            self._planes.append((k, v))

    def parts(self, layers: range) -> Iterator[_Plane]:
        """K then V of each layer: the order of the wire and of the checksum."""
        for layer in layers:
            yield from self._planes[layer]

    def copy_from(
        self,
        source: PageRows,
        layers: range,
        src_pages: Sequence[int],
        dst_pages: Sequence[int],
        seen: Seen | None = None,
    ) -> None:
        """Copy pages of `source`, which may have another number of pages, into these."""
        src, dst = np.asarray(src_pages, np.intp), np.asarray(dst_pages, np.intp)
        runs = _paired_runs(src, dst)
        for src_plane, dst_plane in zip(source.parts(layers), self.parts(layers), strict=True):
            src_rows, dst_rows = src_plane.blocks_of(len(src), len(runs)), dst_plane.whole
            if src_rows is not None and dst_rows is not None:
                _copy_blocks(src_rows, dst_rows, runs, seen)
            else:
                _copy_scattered(src_plane, dst_plane, src, dst, seen)

    def gather(self, layers: range, pages: Sequence[int], out: Bytes, seen: Seen | None = None) -> None:
        """Put the pages' bytes into `out` in KvLayout's order."""
        index, at = np.asarray(pages, np.intp), 0
        runs = _paired_runs(index, np.arange(len(index)))
        for plane in self.parts(layers):
            block = _rows(out, at, len(index), plane.page_bytes)
            at += block.nbytes
            if (rows := plane.blocks_of(len(index), len(runs))) is not None:
                _copy_blocks(rows, block, runs, seen)
            else:
                _take_scattered(plane, block, index, seen)

    def scatter(self, layers: range, pages: Sequence[int], data: Bytes) -> None:
        """The inverse of gather."""
        index, at = np.asarray(pages, np.intp), 0
        runs = _paired_runs(np.arange(len(index)), index)
        for plane in self.parts(layers):
            block = _rows(data, at, len(index), plane.page_bytes)
            at += block.nbytes
            if (rows := plane.blocks_of(len(index), len(runs))) is not None:
                _copy_blocks(block, rows, runs, None)
            else:
                plane.put(index, block)

    def blocks(self, layers: range, pages: Sequence[int]) -> Iterator[Rows]:
        """The pages' bytes in KvLayout's order, cut anyhow. A block is valid until the next is asked for."""
        for batch in self.batches(layers, pages):
            yield from batch

    def batches(self, layers: range, pages: Sequence[int]) -> Iterator[list[Rows]]:
        """The bytes of `blocks`, in lists of CHUNK_BYTES or little more for one system call, each valid until the next
        is asked for."""
        index, waiting, num_bytes = np.asarray(pages, np.intp), list[Rows](), 0
        runs = _paired_runs(index, np.arange(len(index)))
        for plane in self.parts(layers):
            rows = plane.blocks_of(len(index), len(runs))
            if rows is None:
                if waiting:
                    yield waiting
                    waiting, num_bytes = [], 0
                for block in _gathered_chunks(plane, index):
                    yield [block]
                continue
            step = plane.chunk_pages
            for first, _, count in runs:
                for at in range(first, first + count, step):
                    waiting.append(rows[at : min(at + step, first + count)])
                    num_bytes += waiting[-1].nbytes
                    if num_bytes >= CHUNK_BYTES:
                        yield waiting
                        waiting, num_bytes = [], 0
        if waiting:
            yield waiting


class _Plane:
    """One layer's K or V of all pages. `whole`: its rows, where they are in one place."""

    def __init__(self, page_bytes: int, whole: Rows | None, dtype: npt.DTypeLike) -> None:
        self.page_bytes = page_bytes
        self.whole = whole
        self.dtype = np.dtype(dtype)

    @property
    def words(self) -> int:
        return self.page_bytes // self.dtype.itemsize

    @property
    def chunk_pages(self) -> int:
        return max(1, CHUNK_BYTES // self.page_bytes)

    def blocks_of(self, num_pages: int, num_runs: int) -> Rows | None:
        """The rows, if so many pages in so many runs are better copied run by run."""
        return self.whole if num_pages * self.page_bytes >= num_runs * BLOCK_BYTES else None

    def take(self, index: Pages, out: Rows) -> None:
        assert self.whole is not None
        np.take(self.whole, index, 0, out=out.view(self.dtype), mode="clip")

    def put(self, index: Pages, block: Rows) -> None:
        assert self.whole is not None
        self.whole[index] = block.view(self.dtype)


class _CutPlane(_Plane):
    """In several places, each with a run of the words of every token's row: [num_pages, tokens, words of the run]."""

    def __init__(self, plane: Plane, dtype: npt.DTypeLike, runs: list[tuple[int, Rows]]) -> None:
        """`runs`: the first word of each, and what stands there."""
        super().__init__(plane.page_bytes, None, dtype)
        self._tokens = plane.tokens
        self._runs = [(slice(start, start + rows.shape[2]), rows) for start, rows in runs]
        seen, self._read = 0, []
        for at, rows in sorted(self._runs, key=lambda run: run[0].start):
            if at.start == seen:
                self._read.append((at, rows))
                seen = at.stop

    def take(self, index: Pages, out: Rows) -> None:
        tokens, where = out.view(self.dtype).reshape(len(index), self._tokens, -1), _as_slice(index)
        for at, rows in self._read:
            tokens[:, :, at] = rows[where]

    def put(self, index: Pages, block: Rows) -> None:
        tokens, where = block.view(self.dtype).reshape(len(index), self._tokens, -1), _as_slice(index)
        for at, rows in self._runs:
            rows[where] = tokens[:, :, at]


def _as_slice(index: Pages) -> Pages | slice:
    """Of neighbours, which need no copy of their own."""
    if len(index) and (np.diff(index) == 1).all():
        return slice(int(index[0]), int(index[-1]) + 1)
    return index


def _plane(plane: Plane, num_pages: int, runs: Sequence[tuple[PlaneRun, Bytes]]) -> _Plane:
    if len(runs) == 1:
        [(only, data)] = runs
        rows = _rows(data, only.offset, num_pages, plane.page_bytes)
        return _Plane(plane.page_bytes, rows, rows.dtype)
    word = gcd(plane.token_bytes, *(n for run, data in runs for n in (run.start, run.nbytes, data.ctypes.data)))
    dtype = np.dtype(np.int64 if word % WORD_BYTES == 0 else np.uint8)
    return _CutPlane(plane, dtype, [_run_of(plane, num_pages, run, data, dtype) for run, data in runs])


def _run_of(plane: Plane, num_pages: int, run: PlaneRun, data: Bytes, dtype: np.dtype[Any]) -> tuple[int, Rows]:
    nbytes = num_pages * plane.tokens * run.nbytes
    rows = data[run.offset : run.offset + nbytes].view(dtype).reshape(num_pages, plane.tokens, -1)
    return run.start // dtype.itemsize, rows


def _rows(data: Bytes, offset: int, num_pages: int, page_bytes: int) -> Rows:
    rows = data[offset : offset + num_pages * page_bytes].reshape(num_pages, page_bytes)
    return rows.view(np.int64) if page_bytes % WORD_BYTES == 0 and rows.ctypes.data % WORD_BYTES == 0 else rows


def _paired_runs(src: Pages, dst: Pages) -> list[tuple[int, int, int]]:
    """(first source page, first destination page, count) of each run consecutive on both sides."""
    if len(src) == 0:
        return []
    cuts = np.flatnonzero((np.diff(src) != 1) | (np.diff(dst) != 1)) + 1
    starts = np.concatenate(([0], cuts))
    counts = np.diff(np.append(starts, len(src)))
    return list(zip(src[starts].tolist(), dst[starts].tolist(), counts.tolist(), strict=True))


def _copy_blocks(src_rows: Rows, dst_rows: Rows, runs: list[tuple[int, int, int]], seen: Seen | None) -> None:
    if seen is None:
        for s, d, count in runs:
            dst_rows[d : d + count] = src_rows[s : s + count]
        return
    step = max(1, CHUNK_BYTES // (src_rows.shape[1] * src_rows.itemsize))
    for s, d, count in runs:
        for at in range(0, count, step):
            block = src_rows[s + at : s + min(at + step, count)]
            dst_rows[d + at : d + at + len(block)] = block
            seen(block)


def _copy_scattered(source: _Plane, target: _Plane, src: Pages, dst: Pages, seen: Seen | None) -> None:
    step = source.chunk_pages
    buffer = np.empty((min(step, len(src)), source.words), source.dtype)
    for at in range(0, len(src), step):
        chunk = src[at : at + step]
        block = buffer[: len(chunk)]
        source.take(chunk, block)
        target.put(dst[at : at + step], block)
        if seen is not None:
            seen(block)


def _take_scattered(plane: _Plane, out: Rows, index: Pages, seen: Seen | None) -> None:
    step = plane.chunk_pages
    for at in range(0, len(index), step):
        block = out[at : at + step]
        plane.take(index[at : at + step], block)
        if seen is not None:
            seen(block)


def _gathered_chunks(plane: _Plane, index: Pages) -> Iterator[Rows]:
    step = plane.chunk_pages
    buffer = np.empty((min(step, len(index)), plane.words), plane.dtype)
    for at in range(0, len(index), step):
        chunk = index[at : at + step]
        block = buffer[: len(chunk)]
        plane.take(chunk, block)
        yield block
