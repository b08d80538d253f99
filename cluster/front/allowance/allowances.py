"""Allowances decides whether a caller may begin a request, by its account (options.py). It knows callers by name,
counts, and reads no clock: its caller passes `now`, in seconds.

Requests and tokens of a minute are buckets: full at first, they hold a minute's worth and fill at that rate. Tokens may
be owed: by an answer that was charged when it ended, or a prompt longer than the bucket is deep. Each of N routers
gives an Nth part, of calls at once rounded up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from cluster.front.allowance.options import NO_LIMITS, OTHERS, Account

ENDS_S = 1.0  # after which one that has too many calls may try again


@dataclass(frozen=True, slots=True)
class Refused:
    reason: str
    retry_after_s: float


@dataclass(slots=True)
class Bucket:
    """Of one name: what is gone from it. How deep it is changes with the account."""

    spent: float = 0.0
    at_s: float = 0.0

    def flow(self, now: float, per_minute: float) -> None:
        self.spent = max(0.0, self.spent - (now - self.at_s) * per_minute / 60)
        self.at_s = now


class Standing(NamedTuple):
    """What one limit allows now."""

    limit: float
    remaining: float
    per_minute: float

    @property
    def reset_s(self) -> float:
        """Until all of it is there again."""
        return self.wait_s(self.limit)

    def wait_s(self, amount: float) -> float:
        """Until so much is there, or all that there can be; 0: it is."""
        lacking = min(amount, self.limit) - self.remaining
        return max(0.0, lacking * 60 / self.per_minute)


class Allowances:
    def __init__(self, accounts: Mapping[str, Account], num_routers: int = 1) -> None:
        self.accounts = accounts
        self._num_routers = num_routers
        self._running: dict[str, int] = {}  # by name, none of them 0
        self._requests: dict[str, Bucket] = {}  # by name
        self._tokens: dict[str, Bucket] = {}

    def of(self, name: str) -> Account:
        return self.accounts.get(name) or self.accounts.get(OTHERS, NO_LIMITS)

    def begin(self, name: str, num_choices: int, now: float) -> Refused | None:
        """Takes a request of so many choices, which `end` gives back; or says why not, and takes nothing."""
        account = self.of(name)
        if refused := self._why_not(account, name, num_choices, now):
            return refused
        if account.requests_per_minute is not None:
            self._requests[name].spent += 1
        self._running[name] = self._running.get(name, 0) + num_choices
        return None

    def end(self, name: str, num_choices: int) -> None:
        left = self._running[name] - num_choices
        assert left >= 0, f"{name!r} ends more than it began"
        self._running[name] = left
        if not left:
            del self._running[name]

    def take_prompt(self, name: str, num_tokens: int, now: float) -> Refused | None:
        """Charges a prompt; or says why not, and charges nothing."""
        tokens = self.tokens(name, now)
        if tokens is None:
            return None
        if wait_s := tokens.wait_s(num_tokens):
            return Refused(f"{_left('tokens_per_minute', name, tokens)}, and the prompt has {num_tokens}", wait_s)
        self._tokens[name].spent += num_tokens
        return None

    def take_answer(self, name: str, num_tokens: int, now: float) -> None:
        if self.tokens(name, now) is not None:
            self._tokens[name].spent += num_tokens

    def requests(self, name: str, now: float) -> Standing | None:
        """None: there is no limit."""
        return self._standing(self._requests, name, self.of(name).requests_per_minute, now)

    def tokens(self, name: str, now: float) -> Standing | None:
        return self._standing(self._tokens, name, self.of(name).tokens_per_minute, now)

    def _standing(self, buckets: dict[str, Bucket], name: str, limit: int | None, now: float) -> Standing | None:
        if limit is None:
            return None
        share = limit / self._num_routers
        if (bucket := buckets.get(name)) is None:
            bucket = buckets[name] = Bucket(at_s=now)
        bucket.flow(now, share)
        depth = max(1.0, share)
        return Standing(depth, depth - bucket.spent, share)

    def _why_not(self, account: Account, name: str, num_choices: int, now: float) -> Refused | None:
        requests = self._standing(self._requests, name, account.requests_per_minute, now)
        tokens = self._standing(self._tokens, name, account.tokens_per_minute, now)
        running, most = self._running.get(name, 0), account.max_concurrent
        if most is not None and running + num_choices > (here := -(-most // self._num_routers)):
            why = f"max_concurrent of {name!r} is {here} at this router, {running} run, and {num_choices} more"
            return Refused(f"{why} were asked for", ENDS_S)
        if requests is not None and (wait_s := requests.wait_s(1)):
            return Refused(_left("requests_per_minute", name, requests), wait_s)
        if tokens is not None and (wait_s := tokens.wait_s(1)):
            return Refused(_left("tokens_per_minute", name, tokens), wait_s)
        return None


def _left(limit: str, name: str, standing: Standing) -> str:
    remaining = max(0, int(standing.remaining))
    return f"{limit} of {name!r} is {standing.limit:g} at this router, of which {remaining} are left"
