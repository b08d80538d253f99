"""Passing says which prompts should leave the worker that reads them, and who reads on.

    leaving -> choose -> on_passed: the other worker reads, and decodes
                    \\-> on_passing_failed: it is read on here, and rests a while

They leave a worker that is about to stop: however long they are, and however many wait there, it is soon empty. Only
one that reads beside what it decodes can take them, for the rest is read in the pages where they are decoded;
preferably the one that would have decoded them, which has most of the KV by then. Where there is none, they are read to
their end. What is read for a decode worker that stops, and not begun, is soon another's (unsent).
"""

from __future__ import annotations

from collections.abc import Mapping

from cluster.router.accounts import DecodeAccount, RoutedRequest
from cluster.router.candidates.decode import DecodeCandidates
from cluster.router.candidates.prefill import PrefillCandidates
from cluster.router.health.health import Health
from cluster.router.health.isolation import DECODE
from cluster.router.health.shunned import BARRED


class Passing:
    def __init__(self, prefill: PrefillCandidates, decode: DecodeCandidates, health: Health) -> None:
        self._prefill = prefill
        self._decode = decode
        self._health = health

    def leaving(self, name: str, now: float) -> list[str]:
        """Of the prompts that were sent to this worker those that may leave it now, if it stops, as they came."""
        account = self._prefill.accounts.get(name)
        if account is None or not account.report.draining or not self._prefill.has_both:
            return []
        return [request_id for request_id, request in account.waiting.items() if _may_pass(request, now)]

    def unsent(self, name: str, requests: Mapping[str, RoutedRequest]) -> list[str]:
        """Of the prompts that others read for this decode worker those that may be another's, if it stops."""
        account = self._decode.accounts.get(name)
        if account is None or not account.report.draining:
            return []
        promised = (requests[request_id] for request_id in account.promised)
        return [each.shape.id for each in promised if each.prefill != name and _may_be_renamed(each)]

    def choose(self, request: RoutedRequest, now: float) -> DecodeAccount | None:
        """Who has pages for it now; None: nobody."""
        if not _may_pass(request, now):
            return None
        readers = {name for name, account in self._prefill.accounts.items() if not account.reads_last}
        shunned = self._health.shunned(request.past, DECODE, now, request.prefill)
        shunned = {**shunned, **dict.fromkeys(self._decode.accounts.keys() - readers, BARRED)}
        present = self._decode.accounts.get(request.decode)
        if present is not None and present.view.name not in (request.prefill, *shunned) and not present.report.draining:
            return present
        found = self._decode.with_pages(request.shape, request.pages, request.prefill, shunned)
        return None if found is None or found.view.name in shunned else found


def _may_pass(request: RoutedRequest, now: float) -> bool:
    """It is read, is not on its way already, rests no more, and nobody suspects it."""
    return _is_read(request) and not request.keeps_reader and now >= request.rests_until_s


def _may_be_renamed(request: RoutedRequest) -> bool:
    """Likewise, and it was not just now."""
    return _is_read(request) and not (request.renamed_from or request.moving_to)


def _is_read(request: RoutedRequest) -> bool:
    is_read = request.seq is not None and not (request.has_first_token or request.is_handed_off)
    is_suspect = request.is_held or request.past.deaths or request.past.died_in
    return is_read and not (request.is_passing or is_suspect)
