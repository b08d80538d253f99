"""What becomes of a request whose attempt ended without its answer: sent again, after how long and past whom, or given
up. Arithmetic: RouterPolicy asks, and whoever drives the policy carries it out, live or simulated.

    failed    -> Resend at once -> failed -> Resend after 0.1 s, 0.4 s, ... -> failed `max_attempts` times: GiveUp
    preempted -> Resend at once; it is no failure, however often it happens
"""

from __future__ import annotations

from cluster.router.accounts import RequestShape
from cluster.router.decisions import GiveUp, Resend, Retry

BACKOFF_S = (0.0, 0.1, 0.4)  # after the first failure of a request, the second, every later one


def retry_failed(shape: RequestShape, reason: str, avoid: frozenset[str], max_attempts: int) -> Retry:
    """Another attempt has failed, for this reason."""
    failures = shape.failures + 1
    if failures >= max_attempts:
        return GiveUp(request_id=shape.id, reason=f"given up after {failures} failed attempts; the last: {reason}")
    after_s = BACKOFF_S[min(failures, len(BACKOFF_S)) - 1]
    return Resend(request_id=shape.id, after_s=after_s, avoid=avoid, failures=failures, reason=reason)


def retry_preempted(shape: RequestShape, reason: str) -> Resend:
    """A decode worker has given its pages to others."""
    return Resend(request_id=shape.id, after_s=0.0, avoid=frozenset(), failures=shape.failures, reason=reason)
