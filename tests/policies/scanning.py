"""ScanningPolicy is RouterPolicy with every choice made by looking at all workers: the meaning of the indexed one."""

from __future__ import annotations

from cluster.router.accounts import DecodeAccount, PrefillAccount, Report, RequestShape
from cluster.router.candidates.decode import DecodeCandidates
from cluster.router.candidates.prefill import PrefillCandidates
from cluster.router.health.shunned import BARRED, NOBODY, SOUND, Grade, Shunned
from cluster.router.options import RouterOptions
from cluster.router.policy import RouterPolicy
from cluster.router.workers import Workers
from engine.pages.pool import pages_for


class ScanningPrefillCandidates(PrefillCandidates):
    @property
    def is_open(self) -> bool:
        return any(not account.report.draining for account in self.accounts.values())

    def best(self, shape: RequestShape, shunned: Shunned = NOBODY) -> PrefillAccount | None:
        fitting = [
            p
            for p in self.accounts.values()
            if not p.report.draining
            and shunned.get(p.view.name) != BARRED
            and pages_for(shape.prompt_len, p.view.page_size) <= p.view.total_pages
        ]
        return min(
            fitting,
            key=lambda p: (shunned.get(p.view.name, SOUND), p.load - p.cached_len(shape), p.view.name),
            default=None,
        )


class ScanningDecodeCandidates(DecodeCandidates):
    @property
    def is_open(self) -> bool:
        return any(not account.report.draining for account in self.accounts.values())

    def take_report(self, account: DecodeAccount, report: Report) -> None:
        if report.made_s < account.report.made_s and not account.report.is_assumed:
            return
        ours = {**account.listed, **account.promised}
        account.report = report
        account.listed = {i: pages for i, pages in ours.items() if i in report.request_ids}
        account.promised = {i: pages for i, pages in ours.items() if i not in report.request_ids}
        account.promised_pages = sum(account.promised.values())
        account.ended = account.ended_pages = 0

    def best(self, shape: RequestShape, shunned: Shunned = NOBODY, first: str = "") -> DecodeAccount | str:
        reader = self.accounts.get(first)
        if reader in self._by_preference(shape, shunned) and first not in shunned:
            assert reader is not None
            if reader.batch == 0 or reader.free_pages >= self._needed(reader, shape):
                return reader
        why = "no decode worker that takes new requests has so many pages"
        for worker in self._by_preference(shape, shunned):
            overcommit = int(worker.view.total_pages * self._overcommit)
            if worker.batch == 0 or worker.free_pages + overcommit >= self._needed(worker, shape):
                return worker
            why = f"{worker.view.name}: {max(0, worker.free_pages)} of {worker.view.total_pages} pages free"
        return why

    def with_pages(self, shape: RequestShape, pages: int, but: str, shunned: Shunned = NOBODY) -> DecodeAccount | None:
        better = [d for d in self._by_preference(shape, shunned) if d.view.name != but and d.free_pages >= pages]
        return better[0] if better else None

    def _by_preference(self, shape: RequestShape, shunned: Shunned) -> list[DecodeAccount]:
        def preference(worker: DecodeAccount) -> tuple[Grade, bool, int, str]:
            has_none = worker.free_pages < self._needed(worker, shape)
            return (shunned.get(worker.view.name, SOUND), has_none, worker.batch, worker.view.name)

        fitting = [
            d
            for d in self.accounts.values()
            if not d.report.draining
            and shunned.get(d.view.name) != BARRED
            and pages_for(shape.prompt_len + shape.max_tokens, d.view.page_size) <= d.view.total_pages
        ]
        return sorted(fitting, key=preference)


class ScanningPolicy(RouterPolicy):
    def __init__(self, options: RouterOptions | None = None) -> None:
        super().__init__(options)
        decode = ScanningDecodeCandidates(self.options.overcommit)
        self._workers = Workers(self.options, ScanningPrefillCandidates(), decode)
