"""PagePool: every page in exactly one place, hits by content, eviction by age."""

from __future__ import annotations

import random

import pytest

from engine.pages.pool import OutOfPages, PagePool, chain_root, page_hashes, pages_for

pytestmark = pytest.mark.unit


def test_pages_for_rounds_up() -> None:
    assert [pages_for(n, 16) for n in (0, 1, 16, 17, 32)] == [0, 1, 1, 2, 2]


def test_allocate_takes_nothing_when_there_are_too_few() -> None:
    pool = PagePool(4, 16)
    pool.allocate(3)
    with pytest.raises(OutOfPages, match="2 pages wanted, 1 available"):
        pool.allocate(2)
    assert pool.available == 1


def test_a_published_page_is_found_again_after_its_release() -> None:
    pool = PagePool(4, 2)
    hashes = page_hashes([1, 2, 3, 4], 2)
    pages = pool.allocate(2)
    for page, page_hash in zip(pages, hashes, strict=True):
        pool.publish(page, page_hash)
    pool.release(pages)
    assert pool.usage.cached == 2
    assert pool.match(page_hashes([1, 2, 9, 9], 2)) == pages[:1]
    assert pool.match(page_hashes([1, 2, 3, 4], 2)) == pages
    assert pool.usage.held == 2


def test_a_held_page_is_shared_and_freed_by_its_last_holder() -> None:
    pool = PagePool(2, 2)
    [page] = pool.allocate(1)
    pool.publish(page, page_hashes([1, 2], 2)[0])
    assert pool.match(page_hashes([1, 2], 2)) == [page]
    pool.release([page])
    assert pool.usage.held == 1
    pool.release([page])
    assert pool.usage.cached == 1


def test_the_oldest_cached_page_is_evicted_first_and_the_end_of_a_prefix_before_its_beginning() -> None:
    pool = PagePool(3, 1)
    old, new = page_hashes([1, 2], 1), page_hashes([7], 1)
    pages = pool.allocate(2)
    for page, page_hash in zip(pages, old, strict=True):
        pool.publish(page, page_hash)
    pool.release(pages)
    third = pool.allocate(1)
    pool.publish(third[0], new[0])
    pool.release(third)
    pool.allocate(1)
    assert pool.count_matching(old) == 1
    assert pool.count_matching(new) == 1


def test_hashes_depend_on_all_tokens_before_and_on_the_salt() -> None:
    assert page_hashes([1, 2, 3, 4], 2)[1] != page_hashes([9, 2, 3, 4], 2)[1]
    assert page_hashes([1, 2], 2) != page_hashes([1, 2], 2, salt=b"other model")
    first = page_hashes([1, 2], 2)
    assert page_hashes([3, 4], 2, parent=first[0]) == page_hashes([1, 2, 3, 4], 2)[1:]
    assert page_hashes([1, 2, 3], 2) == first


def test_a_random_walk_keeps_the_invariants() -> None:
    rng = random.Random(1)
    pool = PagePool(24, 2)
    holds: list[list[int]] = []
    for _ in range(3000):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(2, 12))]
        hashes = page_hashes(tokens, 2)
        if holds and rng.random() < 0.5:
            pool.release(holds.pop(rng.randrange(len(holds))))
        else:
            cached = pool.match(hashes)
            try:
                pages = cached + pool.allocate(pages_for(len(tokens), 2) - len(cached))
            except OutOfPages:
                pool.release(cached)
                continue
            for page, page_hash in zip(pages, hashes, strict=False):
                pool.publish(page, page_hash)
            holds.append(pages)
        pool.check_invariants()
    for pages in holds:
        pool.release(pages)
    assert pool.available == 24


def test_requests_with_different_salts_never_find_each_others_pages() -> None:
    pool, tokens = PagePool(8, 2), [1, 2, 3, 4]
    ours, theirs, open_to_all = (page_hashes(tokens, 2, parent=chain_root(salt)) for salt in ("ours", "theirs", ""))
    for page, page_hash in zip(pool.allocate(2), ours, strict=True):
        pool.publish(page, page_hash)
    assert len(pool.match(ours)) == 2
    assert pool.match(theirs) == pool.match(open_to_all) == []
    assert open_to_all == page_hashes(tokens, 2)
