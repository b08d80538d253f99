"""PagePool owns every KV page of one worker: who holds it, what it caches, which is reused next.

A page is in exactly one place: **free** (holds nothing), **held** (one or more holders), or **cached** (no holder,
but its content is known by hash and can be held again until it is evicted). Holders are running requests and
leases; the pool only counts them. It knows page numbers, never bytes.

    free --allocate--> held --release--> free            (content unknown)
                        |  ^
                 publish|  |match (hit)
                        v  |
                       held --release--> cached --evicted, oldest release first--> free

A cached page counts as available: allocate takes free pages first, then the least recently released cached one.
LRU counts events, not seconds, so that the simulator and the live worker evict alike.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.pages.news import HASH_BYTES, News, PageNews
from engine.pages.news import PageHash as PageHash


class OutOfPages(Exception):
    """Fewer pages are available than were asked for; nothing was taken."""

    def __init__(self, wanted: int, available: int) -> None:
        super().__init__(f"{wanted} pages wanted, {available} available")
        self.wanted = wanted
        self.available = available


def pages_for(num_tokens: int, page_size: int) -> int:
    """How many pages hold `num_tokens`."""
    return -(-num_tokens // page_size)


def chain_root(cache_salt: str, adapter: str = "", rope: str = "") -> PageHash:
    """The parent of a first page. Pages of requests with different salts, with different adapters (by their digests),
    or turned otherwise (LengthRope.salt), are never found for one another, though their tokens be the same."""
    if not cache_salt and not adapter and not rope:
        return b""
    kind = f"{adapter}\n{rope}" if rope else adapter
    key = hashlib.blake2b(kind.encode()).digest() if kind else b""
    return hashlib.blake2b(cache_salt.encode(), digest_size=HASH_BYTES, key=key, person=b"cache_salt").digest()


def page_hashes(
    token_ids: Sequence[int], page_size: int, *, salt: bytes = b"", parent: PageHash = b""
) -> list[PageHash]:
    """One chained hash for each full page of `token_ids`: equal hashes mean equal tokens from position 0 on.

    `parent` continues a chain: the hash of the page before the first token given, or a chain_root.
    """
    hashes: list[PageHash] = []
    tokens = array("I", token_ids)
    content, size = tokens.tobytes(), page_size * tokens.itemsize
    empty = hashlib.blake2b(digest_size=HASH_BYTES, salt=salt[:16])
    for start in range(0, len(content) - size + 1, size):
        page = empty.copy()  # in two thirds of the time that a new one takes
        page.update(parent + content[start : start + size])
        parent = page.digest()
        hashes.append(parent)
    return hashes


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolUsage:
    total: int
    free: int
    cached: int
    held: int

    @property
    def available(self) -> int:
        return self.free + self.cached


class PagePool:
    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a pool needs at least one page of one token, not {num_pages} of {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self._free: list[int] = list(range(num_pages - 1, -1, -1))  # a stack: the lowest number goes first
        self._holders: list[int] = [0] * num_pages
        self._hash_of: dict[int, PageHash] = {}
        self._page_of: dict[PageHash, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest release first
        self._news = News()  # of what is known by hash
        self.hit_tokens = 0
        self.lookup_tokens = 0

    @property
    def num_news(self) -> int:
        """How often a page has come to be known, or was lost."""
        return self._news.count

    def news_since(self, told: int) -> PageNews:
        """For who was told of the first `told` of these; -1: of none."""
        return self._news.since(told, self._page_of)

    @property
    def available(self) -> int:
        """Pages that allocate can give now."""
        return len(self._free) + len(self._cached)

    @property
    def usage(self) -> PoolUsage:
        free, cached = len(self._free), len(self._cached)
        return PoolUsage(total=self.num_pages, free=free, cached=cached, held=self.num_pages - free - cached)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages whose content nobody knows. Raises OutOfPages and takes nothing if there are fewer."""
        if count > self.available:
            raise OutOfPages(count, self.available)
        pages = [self._free.pop() if self._free else self._evict_oldest() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def match(self, hashes: Sequence[PageHash]) -> list[int]:
        """Hold the longest run of pages, from the first hash on, that the pool still has."""
        pages: list[int] = []
        for page_hash in hashes:
            page = self._page_of.get(page_hash)
            if page is None:
                break
            self._hold(page)
            pages.append(page)
        self.lookup_tokens += len(hashes) * self.page_size
        self.hit_tokens += len(pages) * self.page_size
        return pages

    def count_matching(self, hashes: Sequence[PageHash]) -> int:
        """How many pages `match` would hold; changes nothing."""
        count = 0
        for page_hash in hashes:
            if page_hash not in self._page_of:
                break
            count += 1
        return count

    def count_matching_unheld(self, hashes: Sequence[PageHash]) -> int:
        """How many of the pages `match` would hold are only cached, so that holding them lowers `available`."""
        count = 0
        for page_hash in hashes[: self.count_matching(hashes)]:
            count += self._page_of[page_hash] in self._cached
        return count

    def hold(self, pages: Iterable[int]) -> None:
        """One hold more on each of these held pages."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is held once more but nobody holds it"
            self._holders[page] += 1

    def publish(self, page: int, page_hash: PageHash) -> None:
        """Say what a held, full page holds. A second page with the same content stays unknown to the cache."""
        assert self._holders[page] > 0, f"page {page} is published but nobody holds it"
        if page_hash in self._page_of or page in self._hash_of:
            return
        self._hash_of[page] = page_hash
        self._page_of[page_hash] = page
        self._news.note(page_hash, True)

    def withdraw(self, pages: Iterable[int]) -> None:
        """What these held pages hold is not to be trusted: nobody more finds it."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is withdrawn but nobody holds it"
            if page in self._hash_of:
                self._forget(page)

    def release(self, pages: Iterable[int]) -> None:
        """Give up one hold on each page. The last holder's page is cached if published, free otherwise."""
        for page in reversed(list(pages)):  # the end of a prefix is evicted before its beginning
            assert self._holders[page] > 0, f"page {page} is released but nobody holds it"
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page in self._hash_of:
                self._cached[page] = None
            else:
                self._free.append(page)

    def _hold(self, page: int) -> None:
        if self._holders[page] == 0:
            del self._cached[page]
        self._holders[page] += 1

    def _evict_oldest(self) -> int:
        page, _ = self._cached.popitem(last=False)
        self._forget(page)
        return page

    def _forget(self, page: int) -> None:
        page_hash = self._hash_of.pop(page)
        del self._page_of[page_hash]
        self._news.note(page_hash, False)

    @property
    def at_rest(self) -> tuple[list[int], list[tuple[int, PageHash]]]:
        """What it is while nobody holds a page: those that are free, and those that are cached; the next to be taken
        last, and first."""
        assert not any(self._holders), "somebody holds a page"
        return list(self._free), [(page, self._hash_of[page]) for page in self._cached]

    def rest(self, free: Iterable[int], cached: Iterable[tuple[int, PageHash]]) -> None:
        """Be what another pool was at rest: told of a fresh one."""
        self._free = list(free)
        for page, page_hash in cached:
            self._cached[page] = None
            self._hash_of[page], self._page_of[page_hash] = page_hash, page

    def check_invariants(self) -> None:
        """Assert that every page is in exactly one place and that the two hash maps agree."""
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a page is free twice"
        for page in range(self.num_pages):
            places = (page in free) + (page in cached) + (self._holders[page] > 0)
            assert places == 1, f"page {page} is in {places} places"
            assert page not in free or page not in self._hash_of, f"free page {page} still has a hash"
        assert cached <= self._hash_of.keys(), "a cached page has no hash"
        assert {p: h for h, p in self._page_of.items()} == self._hash_of, "the hash maps disagree"

    def check_holders(self, held: dict[int, int]) -> None:
        """Assert that each page has at least the holders that the caller counts on."""
        for page, count in held.items():
            assert self._holders[page] >= count, f"page {page} has {self._holders[page]} holders, not {count}"
