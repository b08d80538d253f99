"""What can become of a handoff, or of opening its pair, on the prefill side. Each says its reason in one sentence."""

from __future__ import annotations


class HandoffDenied(Exception):
    """The decode worker will not take the request, or no longer."""

    def __init__(self, reason: str, *, retryable: bool) -> None:
        super().__init__(reason)
        self.retryable = retryable


class HandoffLost(Exception):
    """The pair broke; its peer must be connected anew."""


class HandoffFailed(Exception):
    """The bytes did not arrive whole, however often they were sent. The pair still stands; the lease is over."""


class HandoffRefused(Exception):
    """The two workers do not fit together: one sentence with both values."""
