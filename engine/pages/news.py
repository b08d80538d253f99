"""What a pool's pages have come to hold, and what was evicted, told to whoever keeps an account of it from afar.

    publish, evict, withdraw -> News.note -> since(told) -> PageNews -> another's account of what is cached here

Bounded both ways: a reader that has fallen behind by more than KEPT notes is told what there is anew, the newest.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice

PageHash = bytes
HASH_BYTES = 16
KEPT = 8192  # notes
MOST_ANEW = 16_384  # pages, HASH_BYTES each


@dataclass(frozen=True, slots=True)
class PageNews:
    found: tuple[PageHash, ...] = ()  # that can be found there now
    lost: tuple[PageHash, ...] = ()  # that cannot any more
    is_all: bool = False  # what was told before is void

    def after(self, earlier: PageNews) -> PageNews:
        """Both in one: whoever hears it knows what it would know of one after the other."""
        if self.is_all or not (earlier.found or earlier.lost or earlier.is_all):
            return self
        found, lost = set(self.found), set(self.lost)
        return PageNews(
            found=(*[each for each in earlier.found if each not in lost], *self.found),
            lost=(*[each for each in earlier.lost if each not in found], *self.lost),
            is_all=earlier.is_all,
        )


NO_NEWS = PageNews()


class News:
    def __init__(self) -> None:
        self.count = 0  # of all notes: what a reader has been told until now
        self._last: deque[tuple[PageHash, bool]] = deque(maxlen=KEPT)

    def note(self, page_hash: PageHash, is_there: bool) -> None:
        self.count += 1
        self._last.append((page_hash, is_there))

    def since(self, told: int, there: dict[PageHash, int]) -> PageNews:
        """What a reader has missed that was told of so many notes; -1: of none, and it is told all that is `there`."""
        behind = self.count - told
        if not behind:
            return NO_NEWS
        if told < 0 or behind > len(self._last):
            newest = list(islice(reversed(there), MOST_ANEW))
            return PageNews(found=tuple(newest[::-1]), is_all=True)
        last = dict(islice(self._last, len(self._last) - behind, None))
        found = tuple([page_hash for page_hash, is_there in last.items() if is_there])
        return PageNews(found=found, lost=tuple([page_hash for page_hash, is_there in last.items() if not is_there]))
