"""CountedPool stands in for a PagePool where no two prompts share anything: it counts pages and does not number them.

The policies see the same `available` at every moment, so they decide the same; handing out a thousand pages costs as
much as one. `block_hashes` gives a PagePool the hashes of prompts that do share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.pages.news import NO_NEWS, PageNews
from engine.pages.pool import OutOfPages, PageHash, PagePool, PoolUsage


class CountedPool(PagePool):
    """Every page is number 0. Nothing can be published or matched."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a pool needs at least one page of one token, not {num_pages} of {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.hit_tokens = 0
        self.lookup_tokens = 0
        self._left = num_pages
        self._held_twice = 0

    @property
    def num_news(self) -> int:
        return 0

    def news_since(self, told: int) -> PageNews:
        return NO_NEWS

    @property
    def available(self) -> int:
        return self._left

    @property
    def usage(self) -> PoolUsage:
        return PoolUsage(total=self.num_pages, free=self._left, cached=0, held=self.num_pages - self._left)

    def allocate(self, count: int) -> list[int]:
        if count > self._left:
            raise OutOfPages(count, self._left)
        self._left -= count
        return [0] * count

    def match(self, hashes: Sequence[PageHash]) -> list[int]:
        return []

    def count_matching(self, hashes: Sequence[PageHash]) -> int:
        return 0

    def count_matching_unheld(self, hashes: Sequence[PageHash]) -> int:
        return 0

    def hold(self, pages: Iterable[int]) -> None:
        self._held_twice += len(list(pages))

    def publish(self, page: int, page_hash: PageHash) -> None:
        """Nobody is to find it: there is no prefix cache."""

    def release(self, pages: Iterable[int]) -> None:
        count = len(list(pages))
        still_held = min(count, self._held_twice)
        self._held_twice -= still_held
        self._left += count - still_held

    def check_invariants(self) -> None:
        assert 0 <= self._left <= self.num_pages, f"{self._left} of {self.num_pages} pages are left"

    def check_holders(self, held: dict[int, int]) -> None:
        given = self.num_pages - self._left + self._held_twice
        assert sum(held.values()) == given, "the pages held are not those that are missing"


def block_hashes(blocks: Sequence[int], block_len: int, prompt_len: int, page_size: int) -> list[PageHash]:
    """One hash for each full page of the prompt that lies in its named blocks. A block's name stands for all tokens up
    to its end, as Mooncake's hash_ids do, so a page is known by the block it ends in and its place."""
    covered = min(prompt_len, len(blocks) * block_len)
    return [
        (blocks[((page + 1) * page_size - 1) // block_len] % 2**64).to_bytes(8, "little") + page.to_bytes(8, "little")
        for page in range(covered // page_size)
    ]
