"""PairHealth keeps what a prefill worker has learned of its ways to decode workers: which fail, why, and when to try
again. It never reads a clock (its driver passes `now`, in seconds) and opens nothing: that is Peers' (peers.py).

    opened ---> broken: its handoffs fail ---> a receipt comes: healthy
       ^-----------------. (connected anew)
    not opened: unreachable ---> tried again after 0.1, 0.2, 0.4, ... 5 s ---> opened
    lost ----------------------> tried again at once; from the second time without a receipt as above

The two are counted apart, since the way to open a pair may be good (small messages pass) while nothing arrives over it.
What is told is what routers need to send requests past a pair; a trouble older than FORGET_S is over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

PeerKey = tuple[str, str]  # name and incarnation of a decode worker

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0
FORGET_S = 60.0
MAX_TROUBLES = 256  # each start of a decode worker is another peer


@dataclass(slots=True, kw_only=True)
class Trouble:
    reason: str  # why it failed last
    failed_s: float  # when
    unreachable: int = 0  # attempts to open the pair that failed since it was last open
    broken: int = 0  # handoffs, or pairs with all of theirs, that failed since the last receipt

    @property
    def failures(self) -> int:
        return self.unreachable + self.broken

    @property
    def delays(self) -> int:
        """Failures that make the next attempt come later: a pair that is lost once is opened again at once."""
        return max(self.unreachable, self.broken - 1)


class PairHealth:
    def __init__(self) -> None:
        self._troubles: dict[PeerKey, Trouble] = {}  # the one that failed last is last

    def on_unreachable(self, key: PeerKey, reason: str, now: float) -> None:
        self._note(key, reason, now).unreachable += 1

    def on_broken(self, key: PeerKey, reason: str, now: float) -> None:
        self._note(key, reason, now).broken += 1

    def on_open(self, key: PeerKey) -> None:
        trouble = self._troubles.get(key)
        if trouble is not None:
            trouble.unreachable = 0
            if not trouble.failures:
                del self._troubles[key]

    def on_receipt(self, key: PeerKey) -> None:
        self._troubles.pop(key, None)

    def why_not_now(self, key: PeerKey) -> str:
        """Why the pair is tried only now and then; empty if it is at once."""
        trouble = self._troubles.get(key)
        return trouble.reason if trouble is not None and trouble.delays else ""

    def backoff_s(self, key: PeerKey, now: float) -> float:
        """How long from now the pair is not to be tried."""
        trouble = self._troubles.get(key)
        if trouble is None or not trouble.delays:
            return 0.0
        backoff_s = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(trouble.delays - 1, 10))
        return max(0.0, trouble.failed_s + backoff_s - now)

    def troubles(self, now: float) -> Iterator[tuple[PeerKey, Trouble]]:
        """Those that are not over, the last to fail last."""
        for key, trouble in list(self._troubles.items()):
            if now - trouble.failed_s < FORGET_S:
                yield key, trouble
            else:
                del self._troubles[key]

    def _note(self, key: PeerKey, reason: str, now: float) -> Trouble:
        trouble = self._troubles.pop(key, None) or Trouble(reason=reason, failed_s=now)
        trouble.reason, trouble.failed_s = reason, now
        self._troubles[key] = trouble
        if len(self._troubles) > MAX_TROUBLES:
            del self._troubles[next(iter(self._troubles))]
        return trouble
