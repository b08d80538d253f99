"""Moves is decode_worker/moves.py on the virtual clock: a decode machine hands requests to another, and goes on
computing them meanwhile.

    begin --> [a step's end] --> pages there --> copied --> [a step's end] --> what came meanwhile --> it has left
                                      \\--> none, or the other is lost: it goes on here

It decides nothing of its own. What it leaves out: moves to one target take turns there, and send what has filled in
rounds; here one copy follows another on the link, and what came meanwhile goes at the end. And that a request stands
still for a second at most: over a link so slow that this matters, requests that move wait longer here than in life.
"""

from __future__ import annotations

from collections.abc import Callable

from decode_worker.batches import NEVER
from decode_worker.policy import DecodePolicy
from kv_transfer.lease import MOVE_ROOM_TOKENS
from placement.latency.base import LatencyModel
from placement.simulator.machines.attempt import Attempt, Decoder, Dispatcher, Link, Move, Mover


class Moves(Mover):
    """`touch`: the machine is about to change. `interrupt`: let the step under way be the last before on_step_end.
    `pause`: the request is computed no more, between two steps. `left`: it has gone, and so have its pages."""

    def __init__(
        self,
        router: Dispatcher,
        policy: DecodePolicy,
        latency: LatencyModel,
        *,
        touch: Callable[[], None],
        interrupt: Callable[[], None],
        pause: Callable[[Attempt], None],
        left: Callable[[Attempt], None],
    ) -> None:
        self.router = router
        self.policy = policy
        self.latency = latency
        self._touch = touch
        self._interrupt = interrupt
        self._pause = pause
        self._left = left
        self._asked: list[Move] = []
        self._moves: dict[str, Move] = {}  # under way
        self._egress = Link()

    def begin(self, attempt: Attempt, target: Decoder) -> None:
        self._asked.append(Move(self, attempt, target))
        self._interrupt()

    @property
    def is_idle(self) -> bool:
        return not self._moves

    @property
    def is_quiet(self) -> bool:
        """Nor is anything asked for."""
        return not (self._moves or self._asked)

    @property
    def most_steps(self) -> int:
        """Until one has grown by as much as it may; right after on_step_end."""
        if not self._moves:
            return NEVER
        return MOVE_ROOM_TOKENS - max([self._grown(m) for m in self._moves.values() if not m.is_still], default=-NEVER)

    def on_step_end(self) -> None:
        """Nothing is in flight."""
        asked, self._asked = self._asked, []
        for move in asked:
            self._reserve(move)
        for move in list(self._moves.values()):
            if not move.is_still and (move.is_copied or self._grown(move) >= MOVE_ROOM_TOKENS):
                self.policy.on_move_stops(move.attempt.id)
                move.is_still = True
                self._pause(move.attempt)
                if move.is_copied:
                    self._send_rest(move)

    def _grown(self, move: Move) -> int:
        return self.policy.computed_len_of(move.attempt.id) - move.reserved

    def _reserve(self, move: Move) -> None:
        router, request_id = self.router, move.attempt.id
        if request_id in self._moves or not self.policy.may_move(request_id):
            self._tell_failed(move)
            return
        move.reserved = self.policy.on_move(request_id, MOVE_ROOM_TOKENS)
        self._moves[request_id] = move
        router.clock.tell(move.target.make_room, move)

    def on_granted(self, grant: tuple[Move, int]) -> None:
        move, cached_tokens = grant
        if not move.is_over:
            self.router.clock.at(self._sent_s(move, max(0, move.reserved - cached_tokens)), self._on_copied, move)

    def _on_copied(self, move: Move) -> None:
        if move.is_over:
            return
        move.is_copied = True
        if move.is_still:
            self._send_rest(move)
        else:
            self._interrupt()

    def _send_rest(self, move: Move) -> None:
        move.more = self._grown(move)
        arrives_s = self._sent_s(move, move.more) + self.router.cluster.handoff_s + self.router.message_s
        self.router.clock.at(arrives_s, move.target.take, move)

    def _sent_s(self, move: Move, num_tokens: int) -> float:
        """When the links of both have passed so many tokens' KV."""
        wire_s = self.latency.transfer_s(num_tokens)
        now = self.router.clock.now
        self.router.ledger.busy_s["link"] += wire_s
        return max(self._egress.book(now, wire_s), move.target.ingress.book(now, wire_s))

    def on_receipt(self, move: Move) -> None:
        if not move.is_over:
            self._touch()
            self._close(move, has_left=True)
            self._left(move.attempt)

    def on_failed(self, move: Move) -> None:
        if move.is_over:
            return
        self.policy.on_move_failed(move.attempt.id)
        self._close(move, has_left=False)
        self._tell_failed(move)
        self._interrupt()

    def on_lost(self, name: str) -> None:
        """That worker."""
        lost = [move for move in self._asked if move.target.name == name]
        self._asked = [move for move in self._asked if move.target.name != name]
        for move in lost:
            self._tell_failed(move)
        for move in [move for move in self._moves.values() if move.target.name == name]:
            self.on_failed(move)

    def drop(self, attempt: Attempt) -> None:
        """It is over; the policy knows."""
        move = self._moves.get(attempt.id)
        if move is not None:
            self._close(move, has_left=False)
            self.router.clock.tell(move.target.cancel, attempt)

    def is_still(self, attempt: Attempt) -> bool:
        """It has ended here, and may run elsewhere by now."""
        move = self._moves.get(attempt.id)
        return move is not None and move.is_still

    def lose(self) -> None:
        """The machine dies now."""
        for move in self._moves.values():
            move.is_over = True

    def _close(self, move: Move, *, has_left: bool) -> None:
        move.is_over = True
        del self._moves[move.attempt.id]
        self.policy.on_move_closed(move.attempt.id, has_left=has_left)

    def _tell_failed(self, move: Move) -> None:
        self.router.clock.tell(self.router.on_move_failed, move.attempt)
