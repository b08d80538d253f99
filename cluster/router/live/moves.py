"""LiveMoves carries out the moves that RouterPolicy decides: a running request goes to another decode worker, and its
tokens go on.

    a report -> policy.leaving, move -> Move to its decode worker -> MOVED, or READY there: it belongs to that one
                                                                 \\-> MOVE_FAILED: it goes on where it was

For a while both may run it, where a receipt was lost. Both compute the same tokens, which are delivered once by their
index; whichever the router does not count on is cancelled when it speaks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from cluster.router.decisions import Cause, Retry
from cluster.router.links.links import WorkerLinks
from cluster.router.live.requests import LiveRequest
from cluster.router.monitoring.metrics import RouterMetrics
from cluster.router.policy import RouterPolicy

log = logging.getLogger(__name__)


class LiveMoves:
    def __init__(
        self,
        policy: RouterPolicy,
        links: WorkerLinks,
        metrics: RouterMetrics,
        get: Callable[[str], LiveRequest | None],
        clock: Callable[[], float],
    ) -> None:
        """`get`: the request of this wire id, if it is under way."""
        self._policy = policy
        self._links = links
        self._metrics = metrics
        self._get = get
        self._clock = clock

    def on_report(self, worker: str) -> None:
        """It has told what it holds: requests may have to leave it."""
        now = self._clock()
        for wire_id in self._policy.leaving(worker, now):
            live = self._get(wire_id)
            move = None if live is None else self._policy.move(wire_id, live.num_tokens, now)
            if live is None or move is None:
                continue
            log.info("%s moves from %s to %s: %s", wire_id, live.decode, move.to, move.reason)
            live.moving_to = move.to
            self._links[live.decode].move(wire_id, self._links[move.to].address)

    def on_moved(self, live: LiveRequest, source: str, to: str) -> Retry | None:
        """That worker has it, as it says itself or `source` does. Returns what becomes of it if it is lost by now."""
        if live.decode != source and source != to:  # it has said so before
            self._policy.on_left(live.wire_id, source)
            return None
        self._metrics.counts["moved"] += 1
        live.decode, live.moving_to = to, ""
        live.has_moved = True
        live.num_moves += 1
        return self._policy.on_moved(live.wire_id, to, self._clock(), has_left=source != to)

    def on_failed(self, live: LiveRequest, source: str, target: str, reason: str, cause: Cause) -> None:
        """The worker goes on with it."""
        if source != live.decode:  # and so does the other one, whose receipt was lost
            self._policy.on_left(live.wire_id, source)
            self._links.cancel(source, live.wire_id, "it runs elsewhere")
            return
        if cause == "peer":
            self._links.cancel(target, live.wire_id, "it has not moved")
        if target != live.moving_to:
            return  # of a move that was given up when its target was lost
        live.moving_to = ""
        self._metrics.counts["moves_failed"] += 1
        log.info("%s stays at %s: %s", live.wire_id, source, reason)
        self._policy.on_move_failed(live.wire_id, self._clock(), cause)
