"""Pieces are a step's rows as layers with a state take them: cut where pages end, each with the page whose state it
goes on from and the page that holds the state behind it.

A piece that writes another page than it reads can be run again. One that writes the page it reads, as each token of an
answer does, cannot: States remembers what it wrote over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.attention.base import StepMeta

NOTHING = -1  # read: the sequence begins here


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows begin .. end of the step, within one page."""

    begin: int
    end: int
    read: int  # a page, or NOTHING
    write: int  # a page


@dataclass(frozen=True, slots=True)
class Pieces:
    one_by_one: Sequence[Piece]  # of one sequence in their order
    together: Sequence[Piece]  # one row each, of as many sequences, that go on from a state


def cut(meta: StepMeta) -> Pieces:
    """Every row of the step but the padding."""
    assert meta.host_tables is not None, "the step was packed elsewhere"
    one_by_one: list[Piece] = []
    together: list[Piece] = []
    size, rows, tables = meta.page_size, meta.query_starts.tolist(), meta.host_tables
    for sequence, position in enumerate(meta.starts.tolist()):
        row, end, table = rows[sequence], rows[sequence + 1], tables[sequence]
        is_one = end - row == 1 and position > 0
        while row < end:
            stop = min(end, row + size - position % size)
            read = int(table[(position - 1) // size]) if position else NOTHING
            piece = Piece(row, stop, read, int(table[position // size]))
            (together if is_one else one_by_one).append(piece)
            row, position = stop, position + stop - row
    return Pieces(one_by_one, together)
