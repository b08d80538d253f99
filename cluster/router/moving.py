"""Moving says which running requests should leave their decode worker, why, and where each goes.

    leaving -> move -> on_moved: it belongs to the other worker
                    \\-> on_stays: it has not gone, and rests a while

They leave a worker that is about to stop; one that runs out of pages, where the last would soon be preempted and
computed again; and one that computes far more of them than another of its kind, or whose tokens take longer than one of
them wants. A move costs a copy and a page or two, so each request rests after one, and only what makes much of a
difference moves for balance, with targets only to where its tokens take less time and make nobody late: loads that take
turns do not make requests swing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from cluster.router.accounts import DecodeAccount, RequestShape, RoutedRequest
from cluster.router.candidates.decode import DecodeCandidates
from cluster.router.decisions import Move
from cluster.router.health.health import Health
from cluster.router.health.isolation import DECODE
from cluster.router.health.shunned import BARRED
from cluster.router.predicting import token_s
from engine.pages.pool import pages_for
from kv_transfer.lease import MOVE_ROOM_TOKENS

AT_ONCE = 4  # from one worker; all the others wait, being computed
REST_S = 5.0  # after a move, and after one that failed
RETRY_S = 0.5  # after one for which there were no pages
MIN_GAP = 4  # requests that one worker must have more than another, and half as many again


@dataclass(frozen=True, slots=True)
class Why:
    """Why requests should leave a worker; empty: they should not."""

    reason: str = ""
    gap: int = 0  # by how many the other must have fewer
    is_for_balance: bool = False


class Moving:
    def __init__(
        self,
        decode: DecodeCandidates,
        health: Health,
        is_better: Callable[[RequestShape, DecodeAccount, DecodeAccount], bool],
        *,
        may_balance: bool,
    ) -> None:
        """`is_better`: whether a request, at the first of two workers, would do better at the second."""
        self._decode = decode
        self._health = health
        self._is_better = is_better
        self._may_balance = may_balance

    def leaving(self, name: str, requests: Mapping[str, RoutedRequest], now: float) -> list[str]:
        """Of the requests at this worker those that may leave it now, if any should: the last by priority first (of a
        worker that is about to stop the first by priority), the youngest of those before the others. For balance a
        few: it can wait, and is asked for at each report of an overloaded worker."""
        account = self._decode.accounts.get(name)
        if account is None or len(self._decode.accounts) < 2 or not (why := self._why(account)).reason:
            return []
        here = [requests[i] for i in reversed((*account.listed, *account.promised))]
        here.sort(key=_priority, reverse=not account.report.draining)
        movable = [request.shape.id for request in here if _may_move(request, name, now)]
        return movable[:AT_ONCE] if why.is_for_balance else movable

    def _why(self, account: DecodeAccount) -> Why:
        name, batch = account.view.name, account.batch
        if account.report.draining:
            return Why(f"{name} is stopping")
        if batch > 1 and account.free_pages < batch:
            return Why(f"{name} has {max(0, account.free_pages)} pages left for {batch} requests")
        if not self._may_balance:
            return Why()
        least, gap = self._decode.least_batch(account.view.role), max(MIN_GAP, batch // 2)
        if batch - least >= gap:
            return Why(f"{name} computes {batch} requests, another {least}", gap, is_for_balance=True)
        takes_s, wanted_s = token_s(account), account.tightest_s
        if batch > 1 and takes_s > wanted_s:  # one alone is nowhere faster
            reason = f"each token at {name} takes {takes_s * 1e3:.1f} of {wanted_s * 1e3:.1f} ms"
            return Why(reason, is_for_balance=True)
        return Why()

    def choose(self, request: RoutedRequest, num_tokens: int, now: float) -> tuple[DecodeAccount, Move] | None:
        """Who has pages for it now, `num_tokens` long; None: nobody, or it may stay."""
        source = self._decode.accounts[request.decode]
        why = self._why(source)
        most = AT_ONCE if source.report.draining else 1
        if not why.reason or source.num_leaving >= most or not _may_move(request, request.decode, now):
            return None
        shape = request.shape
        grown = max(0, num_tokens - shape.prompt_len)
        shape = replace(shape, prompt_len=num_tokens, max_tokens=max(1, shape.max_tokens - grown))
        pages = pages_for(num_tokens + min(MOVE_ROOM_TOKENS, shape.max_tokens), source.view.page_size)
        shunned = self._health.shunned(request.past, DECODE, now, request.decode)
        shunned = {**shunned, **dict.fromkeys(request.refused_by, BARRED)}
        found = self._decode.with_pages(shape, pages, request.decode, shunned)
        if found is None or found.view.name in shunned:
            return None
        if why.gap and source.batch - found.batch < why.gap:
            return None
        if why.is_for_balance and not self._is_better(shape, source, found):
            return None
        if not source.report.draining and found.free_pages - pages <= found.batch:
            return None  # it would be short of pages itself
        return found, Move(
            request_id=shape.id, source=request.decode, to=found.view.name, pages=pages, reason=why.reason
        )


def _priority(request: RoutedRequest) -> int:
    return request.shape.priority


def _may_move(request: RoutedRequest, name: str, now: float) -> bool:
    """It runs there, is not on its way already, rests no more, and nobody suspects it."""
    runs = request.decode == name and request.is_handed_off and not (request.moving_to or request.is_held)
    return runs and now >= request.rests_until_s and not (request.past.deaths or request.past.died_in)
