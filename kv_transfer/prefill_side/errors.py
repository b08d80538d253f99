"""What can become of a handoff, or of opening its pair, on the prefill side. Each says its reason in one sentence."""

from __future__ import annotations

from kvrelay.v1 import worker_pb2


class HandoffError(Exception):
    """`cause`: whose fault it is; unless it is REQUEST, another attempt or another decode worker may do better."""

    cause = worker_pb2.FAILURE_CAUSE_PEER


class HandoffDenied(HandoffError):
    """The decode worker will not take the request, or had no pages for it in time."""

    def __init__(self, reason: str, *, retryable: bool, unable: bool = False) -> None:
        super().__init__(reason)
        denied = worker_pb2.FAILURE_CAUSE_WORKER if unable else worker_pb2.FAILURE_CAUSE_REQUEST
        self.cause = worker_pb2.FAILURE_CAUSE_ROOM if retryable else denied


class HandoffEnded(HandoffDenied):
    """The decode worker has taken its pages back."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, retryable=True)
        self.cause = worker_pb2.FAILURE_CAUSE_PEER


class HandoffLost(HandoffError):
    """The pair broke, or cannot be opened; its peer must be connected anew."""


class HandoffUntried(HandoffLost):
    """The pair cannot be opened at once, and was not tried for this handoff: that is no attempt."""

    cause = worker_pb2.FAILURE_CAUSE_ROOM


class HandoffFailed(HandoffError):
    """The bytes did not arrive whole, however often they were sent. The pair still stands; the lease is over."""


class HandoffRefused(HandoffError):
    """The two workers do not fit together: one sentence with both values. Another pair may."""
