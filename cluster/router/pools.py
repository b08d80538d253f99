"""PrefillPool and DecodePool say which worker of a role a request should go to, without looking at all of them.

What is best is said here once, over the accounts (cluster/router/accounts.py); the rankings only find it. A worker
whose account changed is ranked anew when the next choice is made. The choice is exactly that of a scan over all workers
(tests/policies/scanning.py is that scan): ties break by the worker's name.

Every worker that looks better in a ranking than it turns out to be costs a look. So what few workers have (a prompt's
prefix cached; enough pages, when they are short) is looked up from the side of those few, and what many have is found
soon by going through the ranking.
"""

from __future__ import annotations

from collections.abc import Iterable

from cluster.router.accounts import DecodeAccount, PrefillAccount, Report, RequestShape, RoutedRequest
from cluster.router.ranking import Ranking
from engine.pages.pool import PageHash, pages_for

FEW = 32  # workers, looked at one by one


class PrefillPool:
    """The best is the one that would be done with a prompt first: least queued, less what it has cached of it."""

    def __init__(self) -> None:
        self.accounts: dict[str, PrefillAccount] = {}
        self.most_tokens = 0  # that any of them can hold
        self._by_queue = Ranking()  # those that take new requests
        self._changed: dict[str, None] = {}
        self._holders: dict[PageHash, set[str]] = {}  # to whom a page was sent
        self._page_size = 1  # the largest

    def up(self, account: PrefillAccount) -> None:
        account.holders = self._holders
        self.accounts[account.view.name] = account
        self._note_members(account.view.name)

    def lost(self, name: str) -> PrefillAccount | None:
        account = self.accounts.pop(name, None)
        if account is not None:
            account.forget_prefixes()
            self._note_members(name)
        return account

    def _note_members(self, changed: str) -> None:
        views = [account.view for account in self.accounts.values()]
        self.most_tokens = max([view.total_pages * view.page_size for view in views], default=0)
        self._page_size = max([view.page_size for view in views], default=1)
        self._changed[changed] = None

    def take_report(self, account: PrefillAccount, report: Report) -> None:
        account.take_report(report)
        self._changed[account.view.name] = None

    def add(self, account: PrefillAccount, request: RoutedRequest) -> None:
        account.add(request)
        self._changed[account.view.name] = None

    def drop(self, request: RoutedRequest) -> None:
        account = self.accounts.get(request.prefill)
        if account is not None:
            account.drop(request)
            self._changed[request.prefill] = None

    @property
    def is_open(self) -> bool:
        """Some worker takes new requests."""
        self._rank()
        return len(self._by_queue) > 0

    def best(self, shape: RequestShape) -> PrefillAccount | None:
        """None when no worker that takes new requests could hold the prompt."""
        self._rank()
        best: PrefillAccount | None = None
        least = 0
        elsewhere_tokens, cachers = self._cachers(shape)
        for name in cachers:
            account = self.accounts[name]
            if name in shape.avoid or not self._fits(account, shape):
                continue
            left = account.queued_tokens - account.cached_len(shape)
            if best is None or (left, name) < (least, best.view.name):
                best, least = account, left
        for queued, name in self._by_queue.keys:
            if best is not None and (queued - elsewhere_tokens, name) > (least, best.view.name):
                break  # nor could any after it be better
            account = self.accounts[name]
            if name in shape.avoid or not self._fits(account, shape):
                continue
            left = queued - account.cached_len(shape)
            if best is None or (left, name) < (least, best.view.name):
                best, least = account, left
        return best if best is not None else self._best_avoided(shape)

    def _cachers(self, shape: RequestShape) -> tuple[int, Iterable[str]]:
        """Few workers that may have much of the prompt cached, and how many tokens all others have at most."""
        pages = 0
        few: Iterable[str] = ()
        for page_hash in shape.page_hashes:
            holders = self._holders.get(page_hash)
            if holders is None:
                break
            if len(holders) <= FEW:
                few = holders
                break
            pages += 1
        return min(pages * self._page_size, shape.prompt_len - 1), few

    def _best_avoided(self, shape: RequestShape) -> PrefillAccount | None:
        best: PrefillAccount | None = None
        least = 0
        for name in sorted(shape.avoid):
            account = self.accounts.get(name)
            if account is not None and self._fits(account, shape):
                left = account.queued_tokens - account.cached_len(shape)
                if best is None or left < least:
                    best, least = account, left
        return best

    def _fits(self, account: PrefillAccount, shape: RequestShape) -> bool:
        view = account.view
        return not account.report.draining and pages_for(shape.prompt_len, view.page_size) <= view.total_pages

    def _rank(self) -> None:
        if not self._changed:
            return
        for name in self._changed:
            account = self.accounts.get(name)
            if account is None or account.report.draining:
                self._by_queue.drop(name)
            else:
                self._by_queue.put(name, account.queued_tokens)
        self._changed.clear()

    def check_invariants(self) -> None:
        self._rank()
        accounts = self.accounts.values()
        for account in accounts:
            account.check_invariants()
        self._by_queue.check_invariants({a.view.name: a.queued_tokens for a in accounts if not a.report.draining})
        holders: dict[PageHash, set[str]] = {}
        for account in accounts:
            for page_hash in account.prefixes:
                holders.setdefault(page_hash, set()).add(account.view.name)
        assert self._holders == holders, "the pages sent are not those that the workers' accounts remember"


class DecodePool:
    """The best has pages for the prompt now, and of those the smallest batch. A worker may be promised somewhat more
    pages than it has free, a share `overcommit` of its own: the KV waits at prefill meanwhile."""

    def __init__(self, overcommit: float) -> None:
        self.accounts: dict[str, DecodeAccount] = {}
        self.most_tokens = 0  # that any of them can hold
        self._overcommit = overcommit
        self._by_batch = Ranking()  # those that take new requests
        self._by_pages = Ranking()  # the same
        self._changed: dict[str, None] = {}
        self._page_size = 1  # the largest
        self._most_beyond = 0  # pages

    def up(self, account: DecodeAccount) -> None:
        self.accounts[account.view.name] = account
        self._note_members(account.view.name)

    def lost(self, name: str) -> DecodeAccount | None:
        account = self.accounts.pop(name, None)
        if account is not None:
            self._note_members(name)
        return account

    def _note_members(self, changed: str) -> None:
        accounts = self.accounts.values()
        self.most_tokens = max([a.view.total_pages * a.view.page_size for a in accounts], default=0)
        self._page_size = max([a.view.page_size for a in accounts], default=1)
        self._most_beyond = max([self._beyond(a) for a in accounts], default=0)
        self._changed[changed] = None

    def take_report(self, account: DecodeAccount, report: Report) -> None:
        account.take_report(report)
        self._changed[account.view.name] = None

    def promise(self, account: DecodeAccount, request: RoutedRequest) -> None:
        account.promise(request.shape.id, request.pages)
        self._changed[account.view.name] = None

    def drop(self, request: RoutedRequest) -> None:
        account = self.accounts.get(request.decode)
        if account is not None:
            account.drop(request.shape.id)
            self._changed[request.decode] = None

    @property
    def is_open(self) -> bool:
        """Some worker takes new requests."""
        self._rank()
        return len(self._by_batch) > 0

    @property
    def most_free_pages(self) -> int:
        """Of any worker that takes new requests."""
        self._rank()
        return self._by_pages.keys[-1][0] if self._by_pages.keys else 0

    def best(self, shape: RequestShape) -> DecodeAccount | str:
        """Or why none may have it now."""
        self._rank()
        least = pages_for(shape.prompt_len + 1, self._page_size)
        found = self._first(shape, self._roomy(least), 0)
        if found is None:
            found = self._first_beyond(shape, least)
        if found is not None:
            return found
        avoided = self._avoided(shape)
        for account in avoided:
            if account.batch == 0 or account.free_pages + self._beyond(account) >= self._needed(account, shape):
                return account
        return self._why_none(shape, avoided)

    def with_pages(self, shape: RequestShape, pages: int, but: str) -> DecodeAccount | None:
        """The best that has so many pages now, other than `but`."""
        self._rank()
        second: DecodeAccount | None = None
        for _, name in self._roomy(pages):
            account = self.accounts[name]
            if name == but or name in shape.avoid or account.free_pages < pages or not self._fits(account, shape):
                continue
            if account.free_pages >= self._needed(account, shape):
                return account
            second = second or account  # it counts in larger pages
        if second is not None:
            return second
        for account in self._avoided(shape):
            if account.view.name != but and account.free_pages >= pages:
                return account
        return None

    def _roomy(self, pages: int) -> list[tuple[int, str]]:
        """By batch, all that have so many pages free. When they are not few, others too."""
        count = len(self._by_pages) - self._by_pages.least(pages)
        if count == 0:
            return []
        if count > FEW or count == len(self._by_pages):
            return self._by_batch.keys
        return sorted([(self.accounts[name].batch, name) for _, name in self._by_pages.keys[-count:]])

    def _first(self, shape: RequestShape, keys: list[tuple[int, str]], share: float) -> DecodeAccount | None:
        """The first that has the pages, or may be promised them beyond `share` of all its own."""
        for _, name in keys:
            account = self.accounts[name]
            beyond = self._beyond(account) if share else 0
            if account.free_pages + beyond < self._needed(account, shape) or name in shape.avoid:
                continue
            if self._fits(account, shape):
                return account
        return None

    def _first_beyond(self, shape: RequestShape, least: int) -> DecodeAccount | None:
        """Nobody has the pages: one that runs nothing, or may be promised them."""
        found = self._first(shape, self._roomy(least - self._most_beyond), self._overcommit)
        for batch, name in self._by_batch.keys[self._by_batch.least(0) :]:
            if batch > 0:
                break
            if name not in shape.avoid and self._fits(self.accounts[name], shape):
                return self.accounts[name] if found is None or (found.batch, found.view.name) > (0, name) else found
        return found

    def _avoided(self, shape: RequestShape) -> list[DecodeAccount]:
        """Of the workers that failed the request those that could hold it, the best first."""
        if not shape.avoid:
            return []
        accounts = [self.accounts[name] for name in shape.avoid if name in self.accounts]
        fitting = [account for account in accounts if self._fits(account, shape)]
        return sorted(fitting, key=lambda a: (a.free_pages < self._needed(a, shape), a.batch, a.view.name))

    def _why_none(self, shape: RequestShape, avoided: list[DecodeAccount]) -> str:
        """Of all that lack pages, the one that would have been asked last."""
        last = avoided[-1] if avoided else None
        if last is None:
            for _, name in reversed(self._by_batch.keys):
                if self._fits(self.accounts[name], shape):
                    last = self.accounts[name]
                    break
        if last is None:
            return "no decode worker that takes new requests has so many pages"
        return f"{last.view.name}: {max(0, last.free_pages)} of {last.view.total_pages} pages free"

    def _needed(self, account: DecodeAccount, shape: RequestShape) -> int:
        """Pages at first: for the prompt and the first token."""
        return pages_for(shape.prompt_len + 1, account.view.page_size)

    def _beyond(self, account: DecodeAccount) -> int:
        return int(account.view.total_pages * self._overcommit)

    def _fits(self, account: DecodeAccount, shape: RequestShape) -> bool:
        view = account.view
        pages = pages_for(shape.prompt_len + shape.max_tokens, view.page_size)
        return not account.report.draining and pages <= view.total_pages

    def _rank(self) -> None:
        if not self._changed:
            return
        for name in self._changed:
            account = self.accounts.get(name)
            if account is None or account.report.draining:
                self._by_batch.drop(name)
                self._by_pages.drop(name)
            else:
                self._by_batch.put(name, account.batch)
                self._by_pages.put(name, account.free_pages)
        self._changed.clear()

    def check_invariants(self) -> None:
        self._rank()
        for account in self.accounts.values():
            account.check_invariants()
        is_open = [account for account in self.accounts.values() if not account.report.draining]
        self._by_batch.check_invariants({account.view.name: account.batch for account in is_open})
        self._by_pages.check_invariants({account.view.name: account.free_pages for account in is_open})
