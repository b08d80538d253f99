"""What RouterPolicy answers, each with its reason. Values only: the policy decides, whoever drives it carries them out.

a request comes    -> Assigned | Queued | Rejected | Unavailable
an attempt is over -> Resend | GiveUp
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    request_id: str
    prefill: str
    decode: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    reason: str
    retry_after_s: float | None  # None: it can never be served


@dataclass(frozen=True, slots=True, kw_only=True)
class Unavailable:
    reason: str
    wait_s: float = 0.0  # how long a worker of that role may be waited for


Decision = Assigned | Queued | Rejected | Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class Resend:
    """Send the tokens so far again: `assign` them, under a new id, after `after_s`."""

    request_id: str
    after_s: float
    avoid: frozenset[str]  # workers that failed it
    failures: int  # attempts that have failed so far
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    request_id: str
    reason: str


Retry = Resend | GiveUp
