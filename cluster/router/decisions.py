"""What RouterPolicy answers, each with its reason. Values only: the policy decides, whoever drives it carries them out.

a request comes    -> Assigned | Queued | Rejected | Unavailable
an attempt is over -> Resend | GiveUp
it should be elsewhere -> Move
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cluster.router.accounts import Past

Cause = Literal["", "step", "peer", "room", "request", "worker"]  # whose fault it is: worker.proto's FailureCause


@dataclass(frozen=True, slots=True, kw_only=True)
class Foretold:
    """Seconds to the first token and of each after it, and what of each is wanted (0: nothing)."""

    ttft_s: float
    tpot_s: float
    slo_ttft_s: float
    slo_tpot_s: float

    def __str__(self) -> str:
        said = []
        if self.slo_ttft_s:
            said.append(f"first token predicted in {self.ttft_s * 1e3:.0f} of {self.slo_ttft_s * 1e3:.0f} ms")
        if self.slo_tpot_s:
            said.append(f"each after it in {self.tpot_s * 1e3:.1f} of {self.slo_tpot_s * 1e3:.1f}")
        return ", ".join(said)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What was seen of the two workers when they were chosen. `words`: that say why, beside these figures."""

    queued_tokens: int
    cached_len: int
    prompt_len: int
    free_pages: int
    total_pages: int
    batch: int
    words: str | Foretold


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    request_id: str
    prefill: str
    decode: str
    seen: Seen
    is_held: bool = False  # at the decode worker, until RouterPolicy.next_turn names it

    @property
    def reason(self) -> str:
        """In words, for who asks."""
        seen = self.seen
        return (
            f"{self.prefill}: {seen.queued_tokens} prompt tokens queued, {seen.cached_len} of "
            f"{seen.prompt_len} cached; {self.decode}: {seen.free_pages} of {seen.total_pages} "
            f"pages free, batch {seen.batch}{'; ' if seen.words else ''}{seen.words}"
        )


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


Decision = Assigned | Queued | Rejected | Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class Resend:
    """Send the tokens so far again: `assign` them, under a new id, after `after_s`."""

    request_id: str
    after_s: float
    past: Past
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """`code`: the gRPC status that the client gets, by its name."""

    request_id: str
    reason: str
    code: str = "UNAVAILABLE"


Retry = Resend | GiveUp


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Have the worker that computes the request hand it to this one, which has so many pages for it. Where it is
    decoded it goes on meanwhile; a prompt is read on there."""

    request_id: str
    source: str
    to: str
    pages: int
    reason: str
