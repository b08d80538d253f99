"""Placing chooses the two workers that serve a request now, or says why none do. It looks and changes nothing: whoever
asked notes the choice (cluster/router/policy.py).

The decode worker is chosen after the prefill worker, because a pair may be unable to hand over: then another prefill
worker is taken, if there is one for which nothing stands against it. A worker that computes both phases keeps the
requests whose prompts it reads, as long as it has pages for them. Where there are such workers, and targets to keep,
both are chosen at once, by what is predicted (cluster/router/placing/predicting.py), or as Splitwise does (lending.py).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.router.accounts import DecodeAccount, Past, PrefillAccount, RequestShape, RoutedRequest
from cluster.router.candidates.decode import DecodeCandidates
from cluster.router.candidates.prefill import PrefillCandidates
from cluster.router.decisions import Foretold, Seen
from cluster.router.health.health import Health
from cluster.router.health.isolation import DECODE, PREFILL
from cluster.router.health.shunned import BARRED, BROKEN
from cluster.router.options import RouterOptions
from cluster.router.placing.handoff_times import HandoffTimes
from cluster.router.placing.lending import lend
from cluster.router.placing.predicting import Target, best_predicted, could_gain, is_better

MAX_TRIES = 4  # prefill workers that are looked at for one that can hand over

STAYS_AFTER_S = 0.5  # that a handoff has waited for pages


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    prefill: PrefillAccount
    decode: DecodeAccount
    words: str | Foretold = ""  # that say why, beside the figures

    def seen(self, shape: RequestShape) -> Seen:
        prefill, decode = self.prefill, self.decode
        return Seen(
            queued_tokens=prefill.queued_tokens,
            cached_len=prefill.cached_len(shape),
            prompt_len=shape.prompt_len,
            free_pages=decode.free_pages,
            total_pages=decode.view.total_pages,
            batch=decode.batch,
            words=self.words,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Unplaced:
    """`lacks_pages`: a smaller request may find a place where this one finds none."""

    reason: str
    lacks_pages: bool = False


class Placing:
    def __init__(
        self,
        prefill: PrefillCandidates,
        decode: DecodeCandidates,
        health: Health,
        times: HandoffTimes,
        options: RouterOptions,
    ) -> None:
        self._prefill = prefill
        self._decode = decode
        self._health = health
        self._handoff_times = times
        self.take_options(options)

    def take_options(self, options: RouterOptions) -> None:
        self._lends = options.placement == "splitwise"
        self._max_backlog_tokens = options.max_backlog_tokens
        self._target = Target(ttft_s=options.slo_ttft_ms / 1e3, tpot_s=options.slo_tpot_ms / 1e3)

    def target_of(self, shape: RequestShape) -> Target:
        """Its own, and the router's where it says nothing."""
        return Target(ttft_s=shape.slo_ttft_s or self._target.ttft_s, tpot_s=shape.slo_tpot_s or self._target.tpot_s)

    def why_never(self, shape: RequestShape, *, is_resent: bool = False) -> str:
        """Why no worker that is there could ever serve it, even alone; empty if one could. `is_resent`: its prompt
        counts the tokens of its answer so far."""
        if shape.pair is not None:
            return self._why_never_there(*shape.pair)
        most = _most_tokens(self._decode, shape.past)
        if self._decode.accounts and shape.most_tokens > most:
            beams = f" for {shape.num_beams} beams" if shape.num_beams else ""
            return (
                f"prompt and max_tokens{beams} together are {shape.most_tokens} tokens; "
                f"the largest decode worker holds {most}, so give fewer"
            )
        most = _most_tokens(self._prefill, shape.past)
        if self._prefill.accounts and shape.prompt_len > most:
            if is_resent:
                return (
                    f"prompt and answer so far are {shape.prompt_len} tokens, which must be read again; the largest "
                    f"prefill worker holds {most}, so give prefill workers more kv_memory"
                )
            return f"the prompt is {shape.prompt_len} tokens; the largest prefill worker holds {most}, so give fewer"
        return ""

    def why_unable(self, unable: frozenset[str], *, is_open: bool = False) -> tuple[str, str]:
        """Why all workers of a phase that are there cannot serve what these cannot, and of which; both empty if one
        may. `is_open`: of those that take new requests."""
        candidates: tuple[tuple[str, PrefillCandidates | DecodeCandidates], ...]
        candidates = ((PREFILL, self._prefill), (DECODE, self._decode)) if unable else ()
        for phase, known in candidates:
            names = set(known.open_names if is_open else known.accounts)
            if names <= unable:
                who = f"{', '.join(sorted(names))} cannot serve it, and " if names else ""
                return f"{who}no other {phase} worker is ready", phase
        return "", ""

    def _why_never_there(self, prefill: str, decode: str) -> str:
        for phase, name, accounts in (
            ("prefill", prefill, list(self._prefill.accounts)),
            ("decode", decode, list(self._decode.accounts)),
        ):
            if name not in accounts:
                which = f"of those that are ready give one of {', '.join(accounts)}" if accounts else "none is ready"
                return f"{phase}_worker is {name!r}; {which}"
        return ""

    def choose(self, request: RoutedRequest, now: float) -> Placed | Unplaced:
        shape, past = request.shape, request.past
        if shape.pair is not None:
            return self._named(shape, *shape.pair)
        named = self._lent(request, now) if self._lends else self._predicted(request, now)
        if named is not None:
            return named
        unheard = self._unheard_since(past.died_s) if past.deaths else []
        if why := self._waits_for_its_turn(past, unheard):
            return Unplaced(reason=why)
        if why := self.why_unable(past.unable, is_open=True)[0]:
            return Unplaced(reason=why)
        shunned = self._health.shunned(past, PREFILL, now)
        if unheard:
            shunned = {**shunned, **dict.fromkeys(unheard, BARRED)}
        untried = self._untried(request, now)
        first: Placed | None = None
        for _ in range(MAX_TRIES):
            prefill = self._prefill.best(shape, shunned)
            if prefill is None:
                return first or Unplaced(
                    reason="no prefill worker that takes new requests has so many pages", lacks_pages=True
                )
            prefill = self._prefill.own_instead(prefill, shape, shunned)
            name = prefill.view.name
            if first is not None and name in shunned:
                break  # something stands against all that are left
            if why := self._backlog(prefill, shape):  # of those that can hold it, the least loaded
                return Unplaced(reason=why, lacks_pages=shape.prompt_len > self._prefill.least_tokens)
            decode = self._decode.best(shape, self._health.shunned(past, DECODE, now, name), first=untried or name)
            if isinstance(decode, str):
                return first or Unplaced(reason=decode, lacks_pages=True)
            placed = Placed(prefill=prefill, decode=decode)
            if name in shunned or not self._health.is_broken_pair(name, decode.view.name, now):
                return placed
            first = first or placed
            shunned = {**shunned, name: (BROKEN, now)}
        assert first is not None
        return first

    def _named(self, shape: RequestShape, prefill: str, decode: str) -> Placed | Unplaced:
        """The pair that it is for, whatever stands against that; pages they must have."""
        reader, writer = self._prefill.accounts.get(prefill), self._decode.accounts.get(decode)
        if reader is None or not self._prefill.fits(reader, shape):
            return Unplaced(reason=f"{prefill} takes no new requests, or none so long")
        if writer is None or not self._decode.has_room(writer, shape):
            return Unplaced(reason=f"{decode} takes no new requests, or has no pages for it")
        return Placed(prefill=reader, decode=writer, words="asked for by name")

    def _predicted(self, request: RoutedRequest, now: float) -> Placed | None:
        """Where its targets are kept at the least cost to others. None where there is no target or no choice between
        kinds of workers, where something stands against a placement, or too little is known."""
        if not self._may_predict(request):
            return None
        shape, past, target = request.shape, request.past, self.target_of(request.shape)
        own, others = self._prefill.few(shape, self._health.shunned(past, PREFILL, now))
        readers = [account.view.name for account in own + others]
        best = best_predicted(
            shape,
            target,
            now - request.queued_s,
            [account for account in own if not self._backlog(account, shape)],
            [account for account in others if not self._backlog(account, shape)],
            self._decode.few(shape, self._health.shunned(past, DECODE, now), readers),
            lambda prefill, decode: self._health.is_broken_pair(prefill, decode, now),
            self._handoff_times,
            now,
        )
        if best is None:
            return None
        foretold = Foretold(
            ttft_s=best.read.takes_s, tpot_s=best.written.takes_s, slo_ttft_s=target.ttft_s, slo_tpot_s=target.tpot_s
        )
        return Placed(prefill=best.prefill, decode=best.decode, words=foretold)

    def _may_predict(self, request: RoutedRequest) -> bool:
        if not self._prefill.has_both:
            return False
        target, past = self.target_of(request.shape), request.past
        return bool(target.ttft_s or target.tpot_s) and not (past.avoid or past.deaths)

    def _untried(self, request: RoutedRequest, now: float) -> str:
        """One that decodes nothing, and whose steps nobody knows: nothing is predicted before they are."""
        if self._lends or not self._may_predict(request):
            return ""
        shunned = self._health.shunned(request.past, DECODE, now)
        least = [account for account in self._decode.few(request.shape, shunned, ()) if not account.batch]
        return next((account.view.name for account in least if account.report.costs is None), "")

    def _lent(self, request: RoutedRequest, now: float) -> Placed | None:
        """As Splitwise would. None where something stands against that."""
        shape, past = request.shape, request.past
        if past.avoid or past.deaths:
            return None
        prefills = self._prefill.all(shape, self._health.shunned(past, PREFILL, now))
        prefills = [account for account in prefills if not self._backlog(account, shape)]
        pair = lend(shape, prefills, self._decode.all(shape, self._health.shunned(past, DECODE, now)))
        if pair is None or self._health.is_broken_pair(pair[0].view.name, pair[1].view.name, now):
            return None
        return Placed(prefill=pair[0], decode=pair[1], words="by splitwise's rules")

    def is_better(self, shape: RequestShape, source: DecodeAccount, to: DecodeAccount) -> bool:
        """Whether it is written in less time there, and nobody late for it; where nobody has a target, nobody asks."""
        target = self.target_of(shape)
        has_targets = target.ttft_s or target.tpot_s or to.tpots_s
        return not has_targets or is_better(shape, target, source, to)

    def could_gain(self, shapes: Sequence[RequestShape], source: DecodeAccount, to: DecodeAccount) -> bool:
        """Whether `is_better` may be true of one of these, or of what they have grown to by now."""
        least_len, loosest_s, own = sys.maxsize, 0.0, self._target
        for shape in shapes:
            tpot_s = shape.slo_tpot_s or own.tpot_s
            if not (tpot_s or shape.slo_ttft_s or own.ttft_s or to.tpots_s):
                return True  # where nobody has a target, nobody asks
            least_len = min(least_len, shape.prompt_len)
            loosest_s = max(loosest_s, tpot_s or math.inf)
        return could_gain(source, to, least_len, loosest_s)

    def elsewhere(self, request: RoutedRequest, now: float) -> DecodeAccount | None:
        """Another decode worker that has pages for it now; not the one that has read it, if that decodes, too."""
        if request.shape.pair is not None:
            return None
        shunned = {**self._health.shunned(request.past, DECODE, now, request.prefill), request.prefill: BARRED}
        for name, until_s in (request.stays_away or {}).items():
            if now < until_s:
                shunned[name] = BARRED
        better = self._decode.with_pages(request.shape, request.pages, request.decode, shunned)
        if better is None or self._health.is_broken_pair(request.prefill, better.view.name, now):
            return None
        return better

    def where_read(self, request: RoutedRequest, now: float) -> DecodeAccount | None:
        """Its reader, if that decodes, too, and has read it: it has the pages. Once it has waited for others, which it
        may get in a moment: two that wait for each other's pages would wait for ever."""
        since_s = request.stalled_s
        has_waited = since_s is not None and now - since_s >= STAYS_AFTER_S
        return self.at_reader(request, now) if request.has_first_token and has_waited else None

    def at_reader(self, request: RoutedRequest, now: float) -> DecodeAccount | None:
        """Its reader, if that decodes, too, and may have it."""
        shape, reader = request.shape, self._decode.accounts.get(request.prefill)
        if reader is None or shape.pair is not None or shape.num_beams or not self._decode.fits(reader, shape):
            return None
        return None if request.prefill in self._health.shunned(request.past, DECODE, now) else reader

    def _unheard_since(self, died_s: float) -> list[str]:
        """Prefill workers that may have died in the same moment, of what ended the other: it would be blamed twice."""
        return [name for name, account in self._prefill.accounts.items() if account.report.made_s < died_s]

    def _waits_for_its_turn(self, past: Past, unheard: Sequence[str]) -> str:
        """Why. Of one that is tried at decode only the first step there waits for others (health/isolation.py)."""
        if not unheard and past.died_in != PREFILL:
            return ""
        barred = {*unheard, *(self._health.isolation.triers(PREFILL) if past.died_in == PREFILL else ())}
        if not barred or len(barred) < len(self._prefill.accounts):
            return ""
        return "a worker died while it computed it, and every other is trying such a request, or is not heard of since"

    def _backlog(self, prefill: PrefillAccount, shape: RequestShape) -> str:
        """Why it may not have the prompt yet."""
        queued = prefill.queued_tokens
        if queued and queued + shape.prompt_len - prefill.cached_len(shape) > self._max_backlog_tokens:
            return f"{prefill.view.name}: {queued} prompt tokens queued"
        return ""


def _most_tokens(candidates: PrefillCandidates | DecodeCandidates, past: Past) -> int:
    """That any of those can hold which may serve it."""
    if not past.unable:
        return candidates.most_tokens
    views = [account.view for name, account in candidates.accounts.items() if name not in past.unable]
    return max([view.total_pages * view.page_size for view in views], default=candidates.most_tokens)
