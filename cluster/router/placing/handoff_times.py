"""HandoffTimes knows what KV takes from worker to worker, by the receipts of handoffs, and what is on its way.

A handoff takes its turn on two links, its prefill worker's and its decode worker's, and leaves while its prompt is
read: only what the reading does not hide makes its answer late. Where a link falls behind, others are late for it, too.
What stands before it at its prefill worker is read and leaves before it. Of what other prefill workers send to the same
decode worker only that does which is read by now: the rest leaves no faster than it is read.
So a prompt that could stay where it is read does so when links are slow or full (predicting.py).

Each router counts its own requests only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import exp2, isfinite

from cluster.router.accounts import RoutedRequest

LEARNT_FROM = 128  # tokens at least: what fewer take says little of how fast a link is
STEP = 2.0  # by which what is known changes at most, at a receipt: one that was held up is soon forgotten
HALVED_IN_S = 30.0  # without receipts: who is avoided is tried again
MAX_PAIRS = 65_536  # that are remembered


@dataclass(slots=True)
class Load:
    """On its way, by one worker's link."""

    tokens: int = 0
    requests: int = 0

    def add(self, tokens: int, requests: int) -> None:
        self.tokens += tokens
        self.requests += requests


EMPTY = Load()


@dataclass(frozen=True, slots=True)
class Known:
    """What a token took, and when that was heard last."""

    token_s: float
    heard_s: float

    def at(self, now: float) -> float:
        return self.token_s * exp2(min(0.0, self.heard_s - now) / HALVED_IN_S)


@dataclass(frozen=True, slots=True)
class Wait:
    """`exposed_s`: how long after its first token a request's KV is there; `cost_s`: by how much it and others are
    later for it."""

    exposed_s: float
    cost_s: float


NO_WAIT = Wait(0.0, 0.0)


class HandoffTimes:
    def __init__(self) -> None:
        self._known: dict[tuple[str, str], Known] = {}  # of a pair, and of a worker with all that it sends to: ""
        self._out: dict[str, Load] = {}  # by prefill worker
        self._in: dict[str, Load] = {}  # by decode worker

    def note(self, prefill: str, decode: str, tokens: int, taken_s: float, now: float) -> None:
        """A handoff of so many tokens took so long, by its receipt."""
        if tokens < LEARNT_FROM or taken_s <= 0:
            return
        for pair in ((prefill, decode), (prefill, "")):
            known, took_s = self._known.pop(pair, None), taken_s / tokens
            if known is not None:
                took_s = min(max(took_s, known.token_s / STEP), known.token_s * STEP)
            self._known[pair] = Known(took_s, now)
        while len(self._known) > MAX_PAIRS:
            del self._known[next(iter(self._known))]

    def token_s(self, prefill: str, decode: str, now: float) -> float:
        """What the KV of a token takes; 0 where nothing is known."""
        known = self._known.get((prefill, decode)) or self._known.get((prefill, ""))
        return 0.0 if known is None else known.at(now)

    def begin(self, request: RoutedRequest) -> None:
        """It will be handed over, unless it stays."""
        if request.prefill == request.decode:
            return
        request.link = (request.prefill, request.decode)
        self._count(self._out, request.prefill, request, 1)
        if request.has_first_token:
            self.on_read(request)

    def on_read(self, request: RoutedRequest) -> None:
        """All of it is on its way."""
        if request.link is not None:
            self._count(self._in, request.link[1], request, 1)
            request.is_on_link = True

    def end(self, request: RoutedRequest) -> None:
        """It is there, or over."""
        if request.link is None:
            return
        self._count(self._out, request.link[0], request, -1)
        if request.is_on_link:
            self._count(self._in, request.link[1], request, -1)
        request.link, request.is_on_link = None, False

    def _count(self, loads: dict[str, Load], name: str, request: RoutedRequest, sign: int) -> None:
        load = loads.setdefault(name, Load())
        load.add(sign * request.shape.kv_len, sign)
        if not load.requests:
            del loads[name]

    def wait(self, prefill: str, decode: str, tokens: int, now: float, *, read_in_s: float, own_s: float) -> Wait:
        """Of so many tokens, which are read in so many seconds from now, in the last `own_s` of them."""
        token_s = self.token_s(prefill, decode, now)
        if not token_s or not isfinite(read_in_s):
            return NO_WAIT
        out, into = self._out.get(prefill, EMPTY), self._in.get(decode, EMPTY)
        free_in_s = token_s * max(out.tokens, into.tokens)
        may_leave_s = read_in_s - own_s
        exposed_s = max(0.0, max(free_in_s, may_leave_s) + token_s * tokens - read_in_s)
        if free_in_s <= may_leave_s:
            return Wait(exposed_s, exposed_s)
        return Wait(exposed_s, exposed_s + token_s * tokens * (out.requests + into.requests))

    def forget(self, name: str) -> None:
        """The worker is lost: the next of its name may stand elsewhere."""
        for pair in [pair for pair in self._known if name in pair]:
            del self._known[pair]

    def check_invariants(self, requests: Iterable[RoutedRequest]) -> None:
        requests = list(requests)
        for end, loads in enumerate((self._out, self._in)):
            found: dict[str, Load] = {}
            for request in requests:
                if request.link is not None and (end == 0 or request.is_on_link):
                    found.setdefault(request.link[end], Load()).add(request.shape.kv_len, 1)
            assert loads == found, f"{loads} is counted on its way, and {found} is"
