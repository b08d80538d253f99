"""DecodeCandidates say which decode worker a request should go to, without looking at all of them.

As in cluster/router/candidates/prefill.py the choice is exactly that of a scan, found by rankings: when pages are short
the few workers that have enough are looked at, else the smallest batches in turn.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

from cluster.router.accounts import DecodeAccount, Report, RequestShape, RoutedRequest
from cluster.router.candidates.ranking import Ranking, put_or_drop
from cluster.router.health.shunned import BARRED, NOBODY, Shunned
from cluster.router.placing.predicting import is_slow, token_s
from engine.pages.pool import pages_for

FEW = 16  # workers, looked at one by one
NEXT = 4  # likewise, before it is asked who has pages


class DecodeCandidates:
    """The best has pages for the prompt now, and of those the smallest batch. A worker may be promised somewhat more
    pages than it has free, a share `overcommit` of its own: the KV waits at prefill meanwhile."""

    def __init__(self, overcommit: float) -> None:
        self.accounts: dict[str, DecodeAccount] = {}
        self.most_tokens = 0  # that any of them can hold
        self._overcommit = overcommit
        self._by_batch = Ranking()  # those that take new requests
        self._by_pages = Ranking()  # the same
        self._by_token = Ranking()  # the same, by the microseconds that one takes
        self._uneasy: dict[str, None] = {}  # that drain, are short of pages, or slower than somebody there wants
        self._spacious: dict[str, None] = {}  # that would not be short with one request more
        self._changed: dict[str, None] = {}
        self._pages_changed: dict[str, None] = {}  # likewise, where only these are ranked
        self._token_changed: dict[str, None] = {}
        self.page_size = 1  # the largest
        self._most_beyond = 0  # pages

    def set_overcommit(self, overcommit: float) -> None:
        self._overcommit = overcommit
        for name in self.accounts:
            self._note_workers(name)

    def up(self, account: DecodeAccount) -> None:
        self.accounts[account.view.name] = account
        self._note_workers(account.view.name)

    def lost(self, name: str) -> DecodeAccount | None:
        account = self.accounts.pop(name, None)
        if account is not None:
            self._note_workers(name)
        return account

    def _note_workers(self, changed: str) -> None:
        accounts = self.accounts.values()
        # of one that is away for a moment, too: of what comes meanwhile as much is asked as will fit
        self.most_tokens = max([a.view.total_pages * a.view.page_size for a in accounts], default=self.most_tokens)
        self.page_size = max([a.view.page_size for a in accounts], default=self.page_size)
        self._most_beyond = max([self._beyond(a) for a in accounts], default=0)
        self._changed[changed] = None

    def take_report(self, account: DecodeAccount, report: Report) -> None:
        account.take_report(report)
        self._changed[account.view.name] = None

    def promise(self, account: DecodeAccount, request: RoutedRequest) -> None:
        account.promise(request.shape.id, request.pages)
        self._changed[account.view.name] = None

    def drop(self, request: RoutedRequest) -> None:
        for name in (request.decode, request.moving_to):
            self._drop_at(name, request)

    def note(self, name: str) -> None:
        """What is known of the worker has changed."""
        if name in self.accounts:
            self._changed[name] = None

    def _drop_at(self, name: str, request: RoutedRequest) -> None:
        account = self.accounts.get(name)
        if account is not None:
            account.drop(request.shape.id)
            self._changed[name] = None

    def arrive(self, request: RoutedRequest) -> None:
        """It has moved."""
        self._drop_at(request.decode, request)
        request.decode, request.moving_to = request.moving_to, ""

    def stay(self, request: RoutedRequest) -> None:
        """It has not."""
        self._drop_at(request.moving_to, request)
        request.moving_to = ""

    def unsettled(self, gap: int) -> list[str]:
        """Who drains, is short of pages, is slower than somebody wants, or computes so many requests more than the
        least of all workers, and half as many again."""
        self._rank()
        keys = self._by_batch.keys
        names = list(self._uneasy)
        if keys and keys[-1][0] - keys[0][0] >= gap:
            least = keys[0][0]
            over = keys[self._by_batch.least(least + gap) :]
            names += [name for batch, name in over if batch - least >= batch // 2 and name not in self._uneasy]
        return [name for name in names if self.may_shed(self.accounts[name])] if names else names

    def may_shed(self, account: DecodeAccount) -> bool:
        """Whether another one may have room for what leaves it; one that drains need not be asked."""
        self._rank()
        if account.report.draining:
            return len(self.accounts) > 1
        return len(self._spacious) > (account.view.name in self._spacious)

    def least_batch(self, role: str) -> int:
        """Of any worker of this role that takes new requests; very many, if there is none."""
        self._rank()
        for batch, name in self._by_batch.keys:
            if self.accounts[name].view.role == role:
                return batch
        return sys.maxsize

    @property
    def open_names(self) -> list[str]:
        """Of the workers that take new requests."""
        return [name for name, account in self.accounts.items() if not account.report.draining]

    @property
    def is_open(self) -> bool:
        """Some worker takes new requests."""
        self._rank()
        return len(self._by_batch) > 0

    @property
    def most_free_pages(self) -> int:
        """Of any worker that takes new requests."""
        self._rank_pages()
        return self._by_pages.keys[-1][0] if self._by_pages.keys else 0

    def best(self, shape: RequestShape, shunned: Shunned = NOBODY, first: str = "") -> DecodeAccount | str:
        """Or why none may have it now. `first`: the one that is taken if it has the pages, whatever its batch."""
        self._rank()
        at_first = self.accounts.get(first)
        if at_first is not None and first not in shunned and self.has_room(at_first, shape):
            return at_first
        least = pages_for(shape.held_len(shape.prompt_len + 1), self.page_size)
        best = self._first(shape, self._by_batch.keys[:NEXT], 0, shunned)
        best = best or self._first(shape, self._roomy(least), 0, shunned) or self._first_beyond(shape, least, shunned)
        if best is not None:
            return best
        last_resorts = self._last_resorts(shape, shunned)
        for account in last_resorts:
            if account.batch == 0 or account.free_pages + self._beyond(account) >= self._needed(account, shape):
                return account
        return self._why_none(shape, shunned, last_resorts)

    def few(self, shape: RequestShape, shunned: Shunned, readers: Iterable[str]) -> list[DecodeAccount]:
        """Those of the smallest batches, those whose tokens take least, as who reads few prompts has a larger batch,
        and these readers; of all that have pages for it now."""
        self._rank()
        first = self._by_batch.first(FEW)
        if len(self._by_batch) > FEW:
            self._rank_tokens()
            first += self._by_token.first(FEW)
        names = dict.fromkeys([*first, *readers])
        accounts = [self.accounts[name] for name in names if name not in shunned and name in self.accounts]
        return [account for account in accounts if self.has_room(account, shape)]

    def least(self, count: int) -> list[DecodeAccount]:
        """Those of the smallest batches that take new requests, as they were when one was last chosen."""
        return [self.accounts[name] for _, name in self._by_batch.keys[:count] if name in self.accounts]

    def all(self, shape: RequestShape, shunned: Shunned) -> list[DecodeAccount]:
        """That have pages for it now."""
        accounts = [account for name, account in self.accounts.items() if name not in shunned]
        return [account for account in accounts if self.has_room(account, shape)]

    def with_pages(self, shape: RequestShape, pages: int, but: str, shunned: Shunned = NOBODY) -> DecodeAccount | None:
        """The best that has so many pages now, other than `but`."""
        self._rank()
        second: DecodeAccount | None = None
        for _, name in self._roomy(pages):
            account = self.accounts[name]
            if name == but or name in shunned or account.free_pages < pages or not self.fits(account, shape):
                continue
            if account.free_pages >= self._needed(account, shape):
                return account
            second = second or account  # it counts in larger pages
        if second is not None:
            return second
        for account in self._last_resorts(shape, shunned):
            if account.view.name != but and account.free_pages >= pages:
                return account
        return None

    def first_with_room(self, tokens: int, source: DecodeAccount) -> list[DecodeAccount]:
        """Of whom `with_pages` names one, if it names any, for a request at `source` that never has more tokens than
        that and shuns nobody."""
        self._rank()
        accounts: list[DecodeAccount] = []
        for _, name in self._by_batch.keys:
            account = self.accounts[name]
            if account is source or account.free_pages <= 0:
                continue
            accounts.append(account)
            page_size = min(account.view.page_size, source.view.page_size)
            if account.free_pages >= pages_for(tokens, page_size):
                break
        return accounts

    def _roomy(self, pages: int) -> list[tuple[int, str]]:
        """By batch, all that have so many pages free. When they are not few, others too."""
        self._rank_pages()
        count = len(self._by_pages) - self._by_pages.least(pages)
        if count == 0:
            return []
        if count > FEW or count == len(self._by_pages):
            return self._by_batch.keys
        return sorted([(self.accounts[name].batch, name) for _, name in self._by_pages.keys[-count:]])

    def _first(
        self, shape: RequestShape, keys: list[tuple[int, str]], share: float, shunned: Shunned
    ) -> DecodeAccount | None:
        """The first that has the pages, or may be promised them beyond `share` of all its own."""
        for _, name in keys:
            account = self.accounts[name]
            beyond = self._beyond(account) if share else 0
            if account.free_pages + beyond < self._needed(account, shape) or name in shunned:
                continue
            if self.fits(account, shape):
                return account
        return None

    def _first_beyond(self, shape: RequestShape, least: int, shunned: Shunned) -> DecodeAccount | None:
        """Nobody has the pages: one that runs nothing, or may be promised them."""
        best = self._first(shape, self._roomy(least - self._most_beyond), self._overcommit, shunned)
        for batch, name in self._by_batch.keys[self._by_batch.least(0) :]:
            if batch > 0:
                break
            if name not in shunned and self.fits(self.accounts[name], shape):
                return self.accounts[name] if best is None or (best.batch, best.view.name) > (0, name) else best
        return best

    def _last_resorts(self, shape: RequestShape, shunned: Shunned) -> list[DecodeAccount]:
        """Of the workers that are shunned those that could hold the request, the best first."""
        if not shunned:
            return []
        named = [self.accounts[name] for name, grade in shunned.items() if grade != BARRED and name in self.accounts]
        fitting = [account for account in named if self.fits(account, shape)]
        return sorted(
            fitting,
            key=lambda a: (shunned[a.view.name], a.free_pages < self._needed(a, shape), a.batch, a.view.name),
        )

    def _why_none(self, shape: RequestShape, shunned: Shunned, last_resorts: list[DecodeAccount]) -> str:
        """Of all that lack pages, the one that would have been asked last."""
        last = last_resorts[-1] if last_resorts else None
        if last is None:
            for _, name in reversed(self._by_batch.keys):
                if name not in shunned and self.fits(self.accounts[name], shape):
                    last = self.accounts[name]
                    break
        if last is None:
            return "no decode worker that takes new requests has so many pages"
        return f"{last.view.name}: {max(0, last.free_pages)} of {last.view.total_pages} pages free"

    def has_room(self, account: DecodeAccount, shape: RequestShape) -> bool:
        has_pages = account.batch == 0 or account.free_pages >= self._needed(account, shape)
        return has_pages and self.fits(account, shape)

    def _needed(self, account: DecodeAccount, shape: RequestShape) -> int:
        """Pages at first: for the prompt and the first token."""
        return pages_for(shape.held_len(shape.prompt_len + 1), account.view.page_size)

    def _beyond(self, account: DecodeAccount) -> int:
        return int(account.view.total_pages * self._overcommit)

    def fits(self, account: DecodeAccount, shape: RequestShape) -> bool:
        view = account.view
        pages = pages_for(shape.most_tokens, view.page_size)
        return not account.report.draining and pages <= view.total_pages

    def _rank(self) -> None:
        if not self._changed:
            return
        for name in self._changed:
            account = self.accounts.get(name)
            if account is None or account.report.draining:
                self._by_batch.drop(name)
                self._spacious.pop(name, None)
            else:
                self._by_batch.put(name, account.batch)
                put_or_drop(self._spacious, name, account.free_pages - 1 > account.batch)
            is_uneasy = account is not None and (account.report.draining or account.is_short or is_slow(account))
            put_or_drop(self._uneasy, name, is_uneasy)
            self._pages_changed[name] = self._token_changed[name] = None
        self._changed.clear()

    def _rank_pages(self) -> None:
        self._rank()
        self._rank_by(self._by_pages, self._pages_changed, lambda account: account.free_pages)

    def _rank_tokens(self) -> None:
        self._rank()
        self._rank_by(self._by_token, self._token_changed, _token_us)

    def _rank_by(self, ranking: Ranking, changed: dict[str, None], value_of: Callable[[DecodeAccount], int]) -> None:
        for name in changed:
            account = self.accounts.get(name)
            if account is None or account.report.draining:
                ranking.drop(name)
            else:
                ranking.put(name, value_of(account))
        changed.clear()

    def check_invariants(self) -> None:
        self._rank_pages()
        self._rank_tokens()
        for account in self.accounts.values():
            account.check_invariants()
        is_open = [account for account in self.accounts.values() if not account.report.draining]
        self._by_batch.check_invariants({account.view.name: account.batch for account in is_open})
        self._by_pages.check_invariants({account.view.name: account.free_pages for account in is_open})
        self._by_token.check_invariants({account.view.name: _token_us(account) for account in is_open})
        uneasy = {n for n, a in self.accounts.items() if a.report.draining or a.is_short or is_slow(a)}
        spacious = {account.view.name for account in is_open if account.free_pages - 1 > account.batch}
        assert self._spacious.keys() == spacious, "others have room"
        assert self._uneasy.keys() == uneasy, "requests may have to leave other workers"


def _token_us(account: DecodeAccount) -> int:
    return int(token_s(account) * 1e6)
