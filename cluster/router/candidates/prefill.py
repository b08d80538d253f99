"""PrefillCandidates say which prefill worker a prompt should go to, without looking at all of them.

What is best is said here once, over the accounts (cluster/router/accounts.py); the ranking only finds it. A worker
whose account changed is ranked anew when the next choice is made. The choice is exactly that of a scan over all
workers (tests/policies/scanning.py is that scan): ties break by the worker's name.

Every worker that looks better in the ranking than it turns out to be costs a look. So a prompt's prefix that few have
cached is looked up from the side of those few, and what many have is found soon by going through the ranking.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from cluster.router.accounts import PrefillAccount, Report, RequestShape, RoutedRequest
from cluster.router.candidates.ranking import Ranking, put_or_drop
from cluster.router.health.shunned import BARRED, NOBODY, SOUND, Grade, Shunned
from cluster.router.placing.predicting import OWN_COST
from engine.pages.pool import PageHash, pages_for

FEW = 16  # workers, looked at one by one


class PrefillCandidates:
    """The best is the one that would be done with a prompt first: least to compute, less what it has cached of it. Who
    reads nothing while it decodes is never before another."""

    def __init__(self) -> None:
        self.accounts: dict[str, PrefillAccount] = {}
        self.most_tokens = 0  # that any of them can hold
        self.least_tokens = 0  # that all of them can
        self._by_load = Ranking()  # those that take new requests
        self._both_by_load = Ranking()  # of these, who decode, too
        self._others: dict[str, None] = {}  # that other routers take first
        self._changed: dict[str, None] = {}
        self._holders: dict[PageHash, set[str]] = {}  # to whom a page was sent
        self._page_size = 1  # the largest

    def up(self, account: PrefillAccount) -> None:
        account.holders = self._holders
        self.accounts[account.view.name] = account
        self._note_workers(account.view.name)

    def lost(self, name: str) -> PrefillAccount | None:
        account = self.accounts.pop(name, None)
        if account is not None:
            account.forget_prefixes()
            self._note_workers(name)
        return account

    def _note_workers(self, changed: str) -> None:
        views = [account.view for account in self.accounts.values()]
        tokens = [view.total_pages * view.page_size for view in views]
        self.most_tokens, self.least_tokens = max(tokens, default=0), min(tokens, default=0)
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

    def note(self, name: str) -> None:
        """What the worker decodes has changed."""
        if name in self.accounts:
            self._changed[name] = None

    @property
    def open_names(self) -> list[str]:
        """Of the workers that take new requests."""
        return [name for name, account in self.accounts.items() if not account.report.draining]

    @property
    def is_open(self) -> bool:
        """Some worker takes new requests."""
        self._rank()
        return len(self._by_load) > 0

    def best(self, shape: RequestShape, shunned: Shunned = NOBODY) -> PrefillAccount | None:
        """None when no worker that takes new requests, or none that is not barred, could hold the prompt."""
        self._rank()
        best: PrefillAccount | None = None
        least = 0
        elsewhere_tokens, cachers = self._cachers(shape)
        for name in cachers:
            account = self.accounts[name]
            if name in shunned or not self.fits(account, shape):
                continue
            left = account.load - account.cached_len(shape)
            if best is None or (left, name) < (least, best.view.name):
                best, least = account, left
        for load, name in self._by_load.keys:
            if best is not None and (load - elsewhere_tokens, name) > (least, best.view.name):
                break  # nor could any after it be better
            account = self.accounts[name]
            if name in shunned or not self.fits(account, shape):
                continue
            left = load - account.cached_len(shape)
            if best is None or (left, name) < (least, best.view.name):
                best, least = account, left
        return best if best is not None else self._best_shunned(shape, shunned)

    def own_instead(self, best: PrefillAccount, shape: RequestShape, shunned: Shunned) -> PrefillAccount:
        """The least loaded that no other router takes first, where a prompt waits there for about as few tokens as with
        the best of all, as far as it is known here what others have sent to that."""
        if not best.report.is_others:
            return best
        for name in self._by_load.first(FEW, self._others):
            own = self.accounts[name]
            if name not in shunned and self.fits(own, shape):
                is_as_good = _tokens_to(own, shape) <= OWN_COST * _tokens_to(best, shape)
                return own if is_as_good else best
        return best

    @property
    def has_both(self) -> bool:
        """Some worker that takes new requests decodes, too."""
        self._rank()
        return len(self._both_by_load) > 0

    def few(self, shape: RequestShape, shunned: Shunned) -> tuple[list[PrefillAccount], list[PrefillAccount]]:
        """The least loaded of all, those of both phases, and those that may have much of the prompt cached; likewise
        of those that other routers take first."""
        self._rank()
        own = dict.fromkeys([*self._first_few(self._others), *sorted(self._cachers(shape)[1])])
        names = own | dict.fromkeys(self._first_few()) if self._others else own
        readers = self._readers([self.accounts[name] for name in names if name not in shunned], shape)
        if not self._others:
            return readers, []
        return [a for a in readers if a.view.name in own], [a for a in readers if a.view.name not in own]

    def _first_few(self, leave_out: Collection[str] = ()) -> list[str]:
        return self._by_load.first(FEW, leave_out) + self._both_by_load.first(FEW, leave_out)

    def least(self, count: int) -> list[PrefillAccount]:
        """The least loaded that take new requests, as they were when one was last chosen."""
        return [self.accounts[name] for _, name in self._by_load.keys[:count] if name in self.accounts]

    def all(self, shape: RequestShape, shunned: Shunned) -> list[PrefillAccount]:
        """That could hold the prompt."""
        return self._readers([account for name, account in self.accounts.items() if name not in shunned], shape)

    def _readers(self, accounts: Iterable[PrefillAccount], shape: RequestShape) -> list[PrefillAccount]:
        """Those that could hold the prompt; that read last only where there is no other."""
        fitting = [account for account in accounts if self.fits(account, shape)]
        return [account for account in fitting if not account.reads_last] or fitting

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

    def _best_shunned(self, shape: RequestShape, shunned: Shunned) -> PrefillAccount | None:
        best: PrefillAccount | None = None
        least: tuple[Grade, int, str] = (SOUND, 0, "")
        for name, grade in shunned.items():
            account = self.accounts.get(name)
            if account is None or grade == BARRED or not self.fits(account, shape):
                continue
            rank = (grade, account.load - account.cached_len(shape), name)
            if best is None or rank < least:
                best, least = account, rank
        return best

    def fits(self, account: PrefillAccount, shape: RequestShape) -> bool:
        view = account.view
        return not account.report.draining and pages_for(shape.prompt_len, view.page_size) <= view.total_pages

    def _rank(self) -> None:
        if not self._changed:
            return
        for name in self._changed:
            account = self.accounts.get(name)
            put_or_drop(self._others, name, account is not None and account.report.is_others)
            if account is None or account.report.draining:
                self._by_load.drop(name)
                self._both_by_load.drop(name)
                continue
            self._by_load.put(name, account.load)
            if account.beside is not None:
                self._both_by_load.put(name, account.load)
        self._changed.clear()

    def check_invariants(self) -> None:
        self._rank()
        accounts = self.accounts.values()
        for account in accounts:
            account.check_invariants()
        is_open = [a for a in accounts if not a.report.draining]
        self._by_load.check_invariants({a.view.name: a.load for a in is_open})
        self._both_by_load.check_invariants({a.view.name: a.load for a in is_open if a.beside is not None})
        assert self._others.keys() == {a.view.name for a in accounts if a.report.is_others}, "whose are they"
        holders: dict[PageHash, set[str]] = {}
        for account in accounts:
            for page_hash in account.prefixes:
                holders.setdefault(page_hash, set()).add(account.view.name)
        assert self._holders == holders, "the pages sent are not those that the workers' accounts remember"


def _tokens_to(account: PrefillAccount, shape: RequestShape) -> int:
    """The first token of a prompt."""
    return account.load + shape.prompt_len - account.cached_len(shape)
