"""Moving says which running requests should leave their decode worker, why, and where each goes.

    leaving -> move -> on_moved: it belongs to the other worker
                    \\-> on_stays: it has not gone, and rests a while

They leave a worker that is about to stop; one that runs out of pages, where the last would soon be preempted and
computed again; and one that computes far more of them than another of its kind, or whose tokens take longer than one of
them wants. A move costs a copy and a page or two, so each request rests after one, and only what makes much of a
difference moves for balance, with targets only to where its tokens take less time and make nobody late: loads that take
turns do not make requests swing. A beam search stays, or begins anew elsewhere where its worker stops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from cluster.router.accounts import DecodeAccount, RequestShape, RoutedRequest
from cluster.router.candidates.decode import DecodeCandidates
from cluster.router.decisions import Move
from cluster.router.health.health import Health
from cluster.router.health.isolation import DECODE
from cluster.router.health.shunned import BARRED
from cluster.router.placing.predicting import is_slow, tightest_s, token_s
from engine.pages.pool import pages_for
from kv_transfer.lease import MOVE_ROOM_TOKENS

AT_ONCE = 4  # from one worker; all the others wait, being computed
REST_S = 5.0  # after a move, and after one that failed
RETRY_S = 0.5  # after one for which there were no pages
MIN_GAP = 4  # requests that one worker must have more than another, and half as many again


@dataclass(frozen=True, slots=True)
class Why:
    """Why requests should leave a worker."""

    kind: Literal["", "stops", "short", "more", "slow"] = ""  # empty: they should not
    gap: int = 0  # by how many the other must have fewer

    @property
    def is_for_balance(self) -> bool:
        return self.kind in ("more", "slow")


class Moving:
    def __init__(
        self,
        decode: DecodeCandidates,
        health: Health,
        is_better: Callable[[RequestShape, DecodeAccount, DecodeAccount], bool],
        could_gain: Callable[[Sequence[RequestShape], DecodeAccount, DecodeAccount], bool],
        *,
        may_balance: bool,
    ) -> None:
        """`is_better`: whether a request, at the first of two workers, would do better at the second; `could_gain`:
        likewise, whether one of several may, asked once for all."""
        self._decode = decode
        self._health = health
        self._is_better = is_better
        self._could_gain = could_gain
        self.may_balance = may_balance
        self._priority: int | None = None  # of all requests so far, unless they differed
        self._is_mixed = False

    def note_priority(self, priority: int) -> None:
        """A request of this one goes to some worker."""
        self._is_mixed = self._is_mixed or self._priority not in (None, priority)
        self._priority = priority

    def unsettled(self) -> list[str]:
        """The workers that requests may have to leave, found without looking at all: `leaving` names nobody at any
        other."""
        return self._decode.unsettled(MIN_GAP)

    def leaving(self, name: str, requests: Mapping[str, RoutedRequest], now: float) -> list[str]:
        """Of the requests at this worker those that may leave it now, if any should: the last by priority first (of a
        worker that is about to stop the first by priority), the youngest of those before the others. For balance a
        few: it can wait, and is asked for at each report of an overloaded worker."""
        account = self._decode.accounts.get(name)
        if account is None or not self._decode.may_shed(account) or not (why := self._why(account)).kind:
            return []
        ids: Iterable[str] = chain(reversed(account.promised), reversed(account.listed))
        if self._is_mixed:
            ids = sorted(ids, key=lambda i: requests[i].shape.priority, reverse=not account.report.draining)
        movable: list[str] = []
        for request_id in ids:
            if why.is_for_balance and len(movable) == AT_ONCE:
                break
            if _may_move(requests[request_id], name, now):
                movable.append(request_id)
        if why.is_for_balance and self._gains_nobody(account, why, [requests[each] for each in movable], now):
            return []
        return movable

    def _gains_nobody(self, source: DecodeAccount, why: Why, requests: Sequence[RoutedRequest], now: float) -> bool:
        """Whether `choose` would refuse all of these, because each worker that it may find for one would be no faster
        with one more, or late. Where most workers are busy that is so nearly always, and is asked at each arrival."""
        name, most_tokens = source.view.name, 0
        for request in requests:
            if request.refused_by or self._health.shunned(request.past, DECODE, now, name):
                return False
            most_tokens = max(most_tokens, request.shape.most_tokens)
        shapes = [request.shape for request in requests]
        for other in self._decode.first_with_room(most_tokens + MOVE_ROOM_TOKENS, source):
            has_fewer = not why.gap or source.batch - other.batch >= why.gap
            if has_fewer and self._could_gain(shapes, source, other):
                return False
        return True

    def _why(self, account: DecodeAccount) -> Why:
        if account.report.draining:
            return Why("stops")
        if account.is_short:
            return Why("short")
        if not self.may_balance:
            return Why()
        batch = account.batch
        least, gap = self._decode.least_batch(account.view.role), max(MIN_GAP, batch // 2)
        if batch - least >= gap:
            return Why("more", gap)
        return Why("slow") if is_slow(account) else Why()

    def _words(self, why: Why, account: DecodeAccount) -> str:
        name, batch = account.view.name, account.batch
        if why.kind == "stops":
            return f"{name} is stopping"
        if why.kind == "short":
            return f"{name} has {max(0, account.free_pages)} pages left for {batch} requests"
        if why.kind == "more":
            return f"{name} computes {batch} requests, another {self._decode.least_batch(account.view.role)}"
        return f"each token at {name} takes {token_s(account) * 1e3:.1f} of {tightest_s(account) * 1e3:.1f} ms"

    def choose(self, request: RoutedRequest, num_tokens: int, now: float) -> tuple[DecodeAccount, Move] | None:
        """Who has pages for it now, `num_tokens` long; None: nobody, or it may stay."""
        source, shape = self._decode.accounts[request.decode], request.shape
        most = AT_ONCE if source.report.draining else 1
        if source.num_leaving >= most or not _may_move(request, request.decode, now):
            return None
        left = max(1, shape.max_tokens - max(0, num_tokens - shape.prompt_len))
        pages = pages_for(shape.held_len(num_tokens) + min(MOVE_ROOM_TOKENS, left), source.view.page_size)
        if pages > self._decode.most_free_pages or not (why := self._why(source)).kind:
            return None
        shape = shape.grown(num_tokens, left)
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
        reason = self._words(why, source)
        return found, Move(request_id=shape.id, source=request.decode, to=found.view.name, pages=pages, reason=reason)


def _may_move(request: RoutedRequest, name: str, now: float) -> bool:
    """It runs there, is not on its way already, rests no more, and nobody suspects it."""
    stays = request.moving_to or request.is_held or request.shape.num_beams
    runs = request.decode == name and request.is_handed_off and not stays
    return runs and now >= request.rests_until_s and not (request.past.deaths or request.past.died_in)
