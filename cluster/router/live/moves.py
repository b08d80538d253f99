"""LiveMoves carries out the moves that RouterPolicy decides: a running request goes to another decode worker, and its
tokens go on; a prompt to another worker that reads the rest of it.

    a report -> policy.leaving, move -> Move to its decode worker -> MOVED, or READY there: it belongs to that one
                policy.unread, pass_on -> to its prefill worker   \\-> MOVE_FAILED: it goes on where it was

For a while both may run it, where a receipt was lost. Both compute the same tokens, which are delivered once by their
index; whichever the router does not count on is cancelled when it speaks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from cluster.router.decisions import Cause, Move, Retry
from cluster.router.links.links import WorkerLinks
from cluster.router.live.requests import LiveRequest
from cluster.router.monitoring.metrics import RouterMetrics
from cluster.router.policy import RouterPolicy
from kvrelay.v1 import worker_pb2 as pb
from kvrelay.v1.generate_pb2 import HandoffReceipt

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
            live.moving_to = move.to
            self._ask(live, move, unread=False)
        for wire_id in self._policy.unread(worker, now):
            live = self._get(wire_id)
            move = None if live is None else self._policy.pass_on(wire_id, now)
            if live is None or move is None:
                continue
            live.decode = move.to
            self._ask(live, move, unread=True)

    def _ask(self, live: LiveRequest, move: Move, *, unread: bool) -> None:
        live.last_move += 1
        log.info("%s moves from %s to %s: %s", move.request_id, move.source, move.to, move.reason)
        live.notes.event(self._clock(), live.attempt, "move", move.source, f"to {move.to}: {move.reason}")
        what = f"moves a {'prompt' if unread else 'request'} from {move.source} to {move.to}"
        self._metrics.chronicle.note("router", what, move.reason, self._clock())
        to = self._links[move.to].address
        self._links[move.source].move(move.request_id, to, live.last_move, unread=unread)

    def on_passed(self, live: LiveRequest, source: str, to: str, event: pb.RequestEvent, at_s: float) -> Retry | None:
        """Likewise of a prompt, which that worker reads on."""
        if live.prefill == to or source not in (live.prefill, to):  # it has said so before, and may have passed it on
            return None
        self._metrics.counts["moved"] += 1
        live.notes.hand(at_s, live.prefill, to)
        live.prefill, live.has_passed = to, True
        live.on_moved(event.receipt)
        if event.HasField("receipt"):
            live.receipt = event.receipt
        return self._policy.on_passed(live.wire_id, to, event.cached_tokens, self._clock())

    def on_passing_failed(self, live: LiveRequest, source: str, event: pb.RequestEvent, cause: Cause) -> None:
        """The worker reads on, for whom it says."""
        self._metrics.counts["moves_failed"] += 1
        log.info("%s stays at %s: %s", live.wire_id, source, event.reason)
        live.decode = self._policy.on_passing_failed(live.wire_id, event.decode_worker, self._clock(), cause)

    def on_moved(self, live: LiveRequest, source: str, to: str, receipt: HandoffReceipt, at_s: float) -> Retry | None:
        """That worker has it since `at_s`, as it says itself or `source` does. Returns what becomes of it if it is lost
        by now."""
        if live.decode != source and source != to:  # it has said so before
            self._policy.on_left(live.wire_id, source)
            return None
        self._metrics.counts["moved"] += 1
        live.notes.hand(at_s, live.decode, to)
        live.decode, live.moving_to = to, ""
        live.has_moved = True
        live.on_moved(receipt)
        return self._policy.on_moved(live.wire_id, to, self._clock(), has_left=source != to)

    def on_failed(self, live: LiveRequest, source: str, event: pb.RequestEvent, cause: Cause) -> None:
        """The worker goes on with it."""
        target, reason = event.peer, event.reason
        if source != live.decode:  # and so does the other one, whose receipt was lost
            self._policy.on_left(live.wire_id, source)
            self._links.cancel(source, live.wire_id, "it runs elsewhere", live.last_move)
            return
        if cause == "peer":
            self._links.cancel(target, live.wire_id, "it has not moved", event.move)
        if target != live.moving_to or event.move != live.last_move:
            return  # of a move that was given up when its target was lost
        live.moving_to = ""
        self._metrics.counts["moves_failed"] += 1
        log.info("%s stays at %s: %s", live.wire_id, source, reason)
        live.notes.event(self._clock(), live.attempt, "move_failed", source, f"to {target}: {reason}")
        self._policy.on_move_failed(live.wire_id, self._clock(), cause)
