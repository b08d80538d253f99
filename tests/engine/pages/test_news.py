"""Whoever is told a pool's news knows what can be found there, however late, and however much has happened since."""

from __future__ import annotations

import random

import pytest

from engine.pages import news
from engine.pages.news import NO_NEWS, PageNews
from engine.pages.pool import PagePool, page_hashes

pytestmark = pytest.mark.unit


class Reader:
    """An account of what can be found, kept by news alone."""

    def __init__(self) -> None:
        self.told = -1
        self.known: set[bytes] = set()

    def hear(self, pages: PageNews) -> None:
        self.known = (set() if pages.is_all else self.known) | set(pages.found)
        self.known -= set(pages.lost)

    def ask(self, pool: PagePool) -> PageNews:
        told, self.told = self.told, pool.num_news
        return pool.news_since(told)


def in_pool(pool: PagePool, hashes: list[bytes]) -> set[bytes]:
    return {each for each in hashes if pool.count_matching([each])}


@pytest.mark.parametrize("kept", [4, 1000])
def test_a_reader_knows_what_is_there_however_seldom_it_asks(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(news, "KEPT", kept)  # with 4, who asks seldom is told anew
    pool, chance = PagePool(6, 4), random.Random(1)
    hashes = page_hashes(list(range(80)), 4)
    often, seldom, merged = Reader(), Reader(), Reader()
    waiting = NO_NEWS
    for turn in range(300):
        page_hash = chance.choice(hashes)
        if not pool.count_matching([page_hash]):
            (page,) = pool.allocate(1)  # evicts the oldest
            pool.publish(page, page_hash)
            if chance.random() < 0.1:
                pool.withdraw([page])
            pool.release([page])
        often.hear(often.ask(pool))
        assert often.known == in_pool(pool, hashes)
        waiting = merged.ask(pool).after(waiting)
        if turn % 7 == 0:
            seldom.hear(seldom.ask(pool))
            merged.hear(waiting)
            waiting = NO_NEWS
            assert seldom.known == merged.known == often.known
    assert often.ask(pool) is NO_NEWS


def test_of_very_many_pages_the_newest_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(news, "MOST_ANEW", 3)
    pool = PagePool(8, 4)
    hashes = page_hashes(list(range(32)), 4)
    for page, page_hash in zip(pool.allocate(8), hashes, strict=True):
        pool.publish(page, page_hash)
    assert pool.news_since(-1) == PageNews(found=tuple(hashes[-3:]), is_all=True)
