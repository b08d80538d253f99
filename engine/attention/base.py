"""What an attention backend is: it writes a step's K and V into their pages and attends over the pages.

`StepMeta` says which packed row belongs to whom. A backend never looks at a page that its block table does not name,
and never lets what stands beyond a request's length (another request's old bytes, even NaN) reach an output.

Shapes: T packed rows, S sequences, H query heads, G key/value heads, D key width, E value width, P pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.tables import PageTables
from engine.types import AttentionMass, Chunk


@dataclass(frozen=True, slots=True)
class StepMeta:
    """Where the rows of one forward pass stand. Rows past `query_starts[-1]` are padding and get zeros.

    On a GPU `query_starts` and `starts` stay on the host, where plans are made; the others are on the device.
    """

    token_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    query_starts: torch.Tensor  # int32 [S + 1]: rows query_starts[s] .. query_starts[s + 1] are sequence s
    starts: torch.Tensor  # int32 [S]: keys before a sequence's first row, its position where none were dropped
    block_tables: torch.Tensor  # int32 [S, pages of the longest]: unused entries are 0
    slots: torch.Tensor  # int64 [rows without padding]: page * page_size + offset
    page_size: int
    rope_lengths: torch.Tensor | None = None  # int64 [T]: for which rows are turned; None: each for its position + 1
    tables: PageTables | None = None  # the same pages in the form FlashInfer reads; only where it runs
    host_tables: npt.NDArray[np.int32] | None = None  # block_tables, on the host; of steps that were packed here
    masses: Sequence[tuple[int, AttentionMass]] = ()  # sequences whose attention to their pages is wanted

    @property
    def num_rows(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_sequences(self) -> int:
        return int(self.starts.shape[0])


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The part of attention that may differ between layers."""

    scaling: float
    window: int = 0  # a query sees its own and the `window - 1` positions before it; 0: all
    softcap: float = 0.0  # 0: none
    sinks: torch.Tensor | None = None  # [H]: one more logit in each softmax, with no value
    k_scale: float = 1.0  # a page's element times this is the key; 1 unless pages are in fp8
    v_scale: float = 1.0
    chunk: int = 0  # a query sees its own chunk of so many positions, up to itself; 0: all
    slopes: torch.Tensor | None = None  # [H], float32: taken from a score for each token between (ALiBi, Press, 2022)


class AttentionBackend(Protocol):
    name: str

    def write(
        self, k_TGD: torch.Tensor, v_TGE: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, meta: StepMeta
    ) -> None:
        """Copy rows into `k_pages` [P, page_size, G, D] and `v_pages` [P, page_size, G, E] at `meta.slots`.

        The rows are already what the pages hold: in fp8 or int8, where pages are (engine/pages/).
        """

    def attend(
        self, q_THD: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, meta: StepMeta, call: AttentionCall
    ) -> torch.Tensor:
        """Causal attention of every row over its sequence's pages: [T, H, E], contiguous, of q's dtype."""


def build_meta(chunks: Sequence[Chunk], page_size: int, row_multiple: int = 1) -> StepMeta:
    """Pack `chunks` in order; padding rows (token 0 at position 0) follow, up to a multiple of `row_multiple`."""
    dropped: npt.NDArray[np.int64] | None = None  # tokens before each that it does not see; None: none
    if any(c.kept is not None for c in chunks):
        pieces = [piece for chunk in chunks for piece in _pieces(chunk, page_size)]
        chunks, dropped = [chunk for chunk, _ in pieces], np.array([tokens for _, tokens in pieces], dtype=np.int64)
    lengths = np.array([len(c.token_ids) for c in chunks], dtype=np.int64)
    starts = np.array([c.start for c in chunks], dtype=np.int64)
    query_starts = np.zeros(len(chunks) + 1, dtype=np.int64)
    np.cumsum(lengths, out=query_starts[1:])
    rows = int(query_starts[-1])
    padded = -(-rows // row_multiple) * row_multiple

    token_ids = np.zeros(padded, dtype=np.int64)
    tables = np.zeros((len(chunks), max(len(c.block_table) for c in chunks)), dtype=np.int32)
    for i, chunk in enumerate(chunks):
        token_ids[query_starts[i] : query_starts[i + 1]] = chunk.token_ids
        tables[i, : len(chunk.block_table)] = chunk.block_table
    sequence = np.repeat(np.arange(len(chunks)), lengths)
    positions = np.zeros(padded, dtype=np.int64)
    positions[:rows] = np.arange(rows) - query_starts[sequence] + starts[sequence]
    page = tables[sequence, positions[:rows] // page_size].astype(np.int64)
    slots = page * page_size + positions[:rows] % page_size
    if dropped is not None:
        positions[:rows] += dropped[sequence]

    return StepMeta(
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(positions),
        query_starts=torch.from_numpy(query_starts.astype(np.int32)),
        starts=torch.from_numpy(starts.astype(np.int32)),
        block_tables=torch.from_numpy(tables),
        slots=torch.from_numpy(slots),
        page_size=page_size,
        rope_lengths=_rope_lengths(chunks, positions, sequence),
        host_tables=tables,
        masses=[(i, chunk.mass) for i, chunk in enumerate(chunks) if chunk.mass is not None],
    )


def _pieces(chunk: Chunk, page_size: int) -> Iterator[tuple[Chunk, int]]:
    """The chunk in parts whose rows see the same pages, as chunks of sequences that have no others; with each, how many
    tokens stand before it and are not seen."""
    if (kept := chunk.kept) is None:
        yield chunk, 0
        return
    numbers = kept.held(chunk.num_dropped, chunk.start + len(chunk.token_ids))
    table = dict(zip(numbers, chunk.block_table, strict=False))
    for start, length in kept.pieces(chunk.start, len(chunk.token_ids)):
        num_dropped = kept.num_dropped(start)
        assert num_dropped >= chunk.num_dropped, f"{chunk.request_id}: a row sees a page that is gone"
        offset, missing = start - chunk.start, num_dropped * page_size
        piece = replace(
            chunk,
            token_ids=chunk.token_ids[offset : offset + length],
            start=start - missing,
            block_table=[table[number] for number in kept.held(num_dropped, start + length)],
        )
        yield piece, missing


def _rope_lengths(
    chunks: Sequence[Chunk], positions: npt.NDArray[np.int64], sequence: npt.NDArray[np.int64]
) -> torch.Tensor | None:
    if not any(chunk.rope_len for chunk in chunks):
        return None
    lengths = positions + 1
    own = np.array([chunk.rope_len for chunk in chunks], dtype=np.int64)
    lengths[: len(sequence)] = np.maximum(lengths[: len(sequence)], own[sequence])
    return torch.from_numpy(lengths)
