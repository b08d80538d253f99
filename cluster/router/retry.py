"""What becomes of a request whose attempt ended without its answer: sent again, after how long and past whom, or given
up. Arithmetic: RouterPolicy asks, and whoever drives the policy carries it out, live or simulated.

    failed    -> Resend at once -> failed -> Resend after 0.1 s, 0.4 s, ... -> failed `max_attempts` times: GiveUp
    unable    -> Resend at once, to others; each worker says it once, and no attempt is lost by it
    preempted -> Resend at once; it is no failure, however often it happens
    lost      -> Resend at once; it is no failure either. Where the worker may have died of the request, that is a
                 death: after the first it is tried alone, after the second given up for good; a second one counts
                 only where it is clear whose it is
"""

from __future__ import annotations

from dataclasses import replace

from cluster.router.accounts import Past, WorkerView
from cluster.router.decisions import GiveUp, Resend, Retry

BACKOFF_S = (0.0, 0.1, 0.4)  # after the first failure of a request, the second, every later one
MAX_DEATHS = 2  # of workers that computed a request; no third is asked
MAX_LOSSES = 32  # of workers that it was with, computed or not, or that had no room: nothing goes on for ever
ROOM_AFTER_S = 0.1  # so much longer each time, or all losses were spent while a worker that says nothing is waited for
MOST_ROOM_AFTER_S = 1.0
FORGIVEN_AFTER_TOKENS = 64  # made by one worker: it did not die of the request, nor will those to come


def retry_failed(request_id: str, past: Past, reason: str, avoid: frozenset[str], max_attempts: int) -> Retry:
    """Another attempt has failed, for this reason. `avoid`: whom from now on."""
    failures = past.failures + 1
    if failures >= max_attempts:
        return GiveUp(request_id=request_id, reason=f"given up after {failures} failed attempts; the last: {reason}")
    after_s = BACKOFF_S[min(failures, len(BACKOFF_S)) - 1]
    past = replace(past, avoid=past.avoid | avoid, failures=failures)
    return Resend(request_id=request_id, after_s=after_s, past=past, reason=reason)


def retry_past(request_id: str, past: Past, reason: str, worker: str) -> Resend:
    """That worker cannot serve it, and others may."""
    past = replace(past, unable=past.unable | {worker})
    return Resend(request_id=request_id, after_s=0.0, past=past, reason=reason)


def retry_for_room(request_id: str, past: Past, reason: str, avoid: frozenset[str]) -> Retry:
    """A worker had no pages for too long, is about to stop, or is suspect: nobody's fault, and there may be room
    elsewhere."""
    past = replace(past, avoid=avoid, losses=past.losses + 1)
    return _unless_lost_too_often(request_id, past, reason, min(past.losses * ROOM_AFTER_S, MOST_ROOM_AFTER_S))


def retry_preempted(request_id: str, past: Past, reason: str) -> Resend:
    """A decode worker has given its pages to others."""
    return Resend(request_id=request_id, after_s=0.0, past=replace(past, avoid=frozenset()), reason=reason)


def blamed(past: Past, died_in: str, *, is_tried: bool, tries_one: bool, num_doubted: int) -> tuple[Past, str]:
    """What of a worker's death counts for one that it computed: its past, and `died_in`, empty if nothing does.

    `is_tried`: it was tried there; `tries_one`: somebody was, whose fault it is then, and not that of others who had
    their trial before. Where several had, and nobody is tried, each is tried once more, for longer.
    """
    if not died_in or not past.deaths or is_tried or (num_doubted == 1 and not tries_one):
        return past, died_in
    return (past, "") if tries_one else (replace(past, deaths=(), is_retried=True), died_in)


def retry_lost(
    request_id: str, past: Past, reason: str, now: float, worker: WorkerView | None = None, died_in: str = ""
) -> Retry:
    """A worker is lost that it was with. `died_in`: the phase in which that may have died of it; empty: it cannot. Its
    successor would not tell whose fault it was: it may die of itself again."""
    past = replace(past, losses=past.losses + 1)
    if worker is not None and died_in:
        deaths, avoid = (*past.deaths, worker.life), past.avoid | {worker.name}
        past = replace(past, deaths=deaths, died_s=now, died_in=died_in, avoid=avoid)
    if len(past.deaths) >= MAX_DEATHS:
        names = ", ".join(each.partition("/")[0] for each in past.deaths)
        died = f"{len(past.deaths)} workers died while they computed it ({names}); do not send it again"
        return GiveUp(request_id=request_id, reason=f"{died}; the last: {reason}", code="FAILED_PRECONDITION")
    return _unless_lost_too_often(request_id, past, reason, 0.0)


def _unless_lost_too_often(request_id: str, past: Past, reason: str, after_s: float) -> Retry:
    if past.losses >= MAX_LOSSES:
        reason = f"given up after {past.losses} workers that were lost or had no room; the last: {reason}"
        return GiveUp(request_id=request_id, reason=reason)
    return Resend(request_id=request_id, after_s=after_s, past=past, reason=reason)
