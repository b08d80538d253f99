"""BeamTables says which pages each beam of a search is in: what they share, and what is copied before it is written.

    the prompt's full pages: shared by all, written by none
    behind them the tail of each beam:  fork --> a beam's tail is held once by each that goes on from it
                                        grow --> those that share an open page get one of their own, and a copy of it

All beams have the same length, so that all write at the same position. Each tail holds its pages in the pool; a beam
from which nobody goes on gives its hold up at once. Who has pages, and when, DecodePolicy decides.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.pages.pool import PagePool


class BeamTables:
    def __init__(self, pages: Sequence[int], length: int, pool: PagePool) -> None:
        """One beam, in these pages, of which it holds each once; `length` tokens have KV there."""
        self._pool = pool
        self._shared = list(pages[: length // pool.page_size])
        self._tails = [list(pages[len(self._shared) :])]
        self._copies: list[tuple[int, int]] = []

    @property
    def tables(self) -> list[list[int]]:
        """Of each beam, in order."""
        return [self._shared + tail for tail in self._tails]

    @property
    def held(self) -> list[int]:
        """Every page, once for each hold on it."""
        return self._shared + [page for tail in self._tails for page in tail]

    def fork(self, parents: Sequence[int]) -> None:
        """There is a beam for each of these from now on, which goes on from the beam of that number."""
        tails: list[list[int]] = []
        for parent in parents:
            tails.append(list(self._tails[parent]))
            self._pool.hold(tails[-1])
        for tail in self._tails:
            self._pool.release(tail)
        self._tails = tails

    def missing(self, length: int) -> int:
        """Fresh pages that the beams need to write at this position."""
        at = length // self._pool.page_size - len(self._shared)
        open_pages = {tail[at] for tail in self._tails if at < len(tail)}
        return len(self._tails) - len(open_pages)

    def grow(self, length: int, fresh: Sequence[int]) -> None:
        """These are what was missing."""
        at = length // self._pool.page_size - len(self._shared)
        left, taken = list(fresh), set[int]()
        for tail in self._tails:
            if at == len(tail):
                tail.append(left.pop())
            elif tail[at] in taken:
                source, tail[at] = tail[at], left.pop()
                self._copies.append((source, tail[at]))
                self._pool.release((source,))
            else:
                taken.add(tail[at])
        assert not left, f"{len(left)} pages are nobody's"

    def take_copies(self) -> list[tuple[int, int]]:
        """Pages, and where they are to be copied before the next step; told once."""
        copies, self._copies = self._copies, []
        return copies
