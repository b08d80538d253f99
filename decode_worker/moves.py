"""Moves hand requests that this worker decodes to other decode workers, while they are decoded on.

    begin --> [a pair, pages there] --> full pages go, and those that have filled meanwhile --> its steps end
                    \\                             \\                                                  |
                     \\-----------------------------\\-- anything fails: it goes on here <-- last page, commit --> left

The receiver reserves room for the tokens that come meanwhile, and waits for none: where there are no pages now, nothing
moves. Between the last step here and the first one there only the open page and the commit are on their way. Copying
while the source goes on is what live migration of virtual machines does; for requests: Llumnix (Sun et al., OSDI 2024).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from decode_worker.policy import DecodePolicy
from decode_worker.reservations import HeldAnswer
from engine.pages.pool import pages_for
from kv_transfer.lease import MOVE_ROOM_TOKENS
from kv_transfer.prefill_side.errors import HandoffDenied
from kv_transfer.prefill_side.handoff import Handoff
from kv_transfer.prefill_side.pair import PrefillPair
from kvrelay.v1 import worker_pb2 as pb
from kvrelay.v1.generate_pb2 import HandoffReceipt
from worker.peers.peers import Peers, Undelivered
from worker.role import RoleHost

log = logging.getLogger(__name__)

MAX_ROUNDS = 4  # of full pages, before its steps end: what has filled since the last round is little
STILL_S = 1.0  # that a request stands still for its move: then it goes on here, and a receipt that comes is too late


@dataclass(slots=True, kw_only=True, eq=False)
class _Move:
    request: HeldAnswer
    target: pb.WorkerAddress
    number: int
    work: asyncio.Task[HandoffReceipt] | None = None  # ends at once when the request does
    handoff: Handoff | None = None
    is_open: bool = False  # the policy knows of it
    is_copied: bool = False  # now, within its bound
    sent_pages: int = 0
    still: asyncio.Event = field(default_factory=asyncio.Event)  # nothing of it is computed here
    bound: asyncio.Timeout = field(default_factory=partial(asyncio.timeout, None))


class Moves:
    def __init__(
        self,
        host: RoleHost,
        policy: DecodePolicy,
        requests: Mapping[str, HeldAnswer],
        peers: Peers,
        *,
        on_left: Callable[[HeldAnswer], None],
        on_pages: Callable[[], None],
    ) -> None:
        """`on_left`: the request runs elsewhere now, and its pages are free. `on_pages`: there may be others."""
        self._host = host
        self._policy = policy
        self._requests = requests
        self._peers = peers
        self._on_left = on_left
        self._on_pages = on_pages
        self._turns: dict[str, asyncio.Lock] = {}  # by target: moves there share a link, and the last pages are short
        self._moves: dict[str, _Move] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, wanted: pb.Move) -> None:
        request_id, target = wanted.request_id, wanted.decode
        request = self._requests.get(request_id)
        if request is None:
            return  # its end is on its way to the router
        move = _Move(request=request, target=target, number=wanted.number)
        if request_id in self._moves or not self._policy.may_move(request_id):
            why = f"{self._host.options.name} has nothing of it to move now"
            self._tell_failed(move, Undelivered(why, pb.FAILURE_CAUSE_ROOM, target.name))
            return
        self._moves[request_id] = move
        loop = asyncio.get_running_loop()
        move.work = loop.create_task(self._hand_over(move))
        task = loop.create_task(self._run(move, move.work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def drop(self, request_id: str) -> None:
        """The request is over: nothing more of it is sent. It may have more tokens than were reserved for."""
        if (move := self._moves.pop(request_id, None)) is not None and move.work is not None:
            move.work.cancel()

    def on_step(self) -> None:
        for move in self._moves.values():
            self._note_still(move)

    def _note_still(self, move: _Move) -> None:
        if move.is_copied and not move.still.is_set() and self._policy.stands_still(move.request.id):
            move.still.set()
            move.bound.reschedule(asyncio.get_running_loop().time() + STILL_S)

    async def settle(self) -> None:
        """Until none is under way; whose requests are over."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, move: _Move, work: asyncio.Task[HandoffReceipt]) -> None:
        await asyncio.wait({work})
        error = asyncio.CancelledError() if work.cancelled() else work.exception()
        if error is not None and move.is_open:
            self._policy.on_move_failed(move.request.id)
            self._host.wake()
        try:
            if error is not None and move.handoff is not None:
                await move.handoff.abort(str(error) or "the request is over")
        finally:
            if move.is_open:  # nobody reads its pages any more
                self._policy.on_move_closed(move.request.id, has_left=error is None)
            if self._moves.get(move.request.id) is move:
                del self._moves[move.request.id]
                if error is None:
                    self._leave(move, work.result())
                else:
                    self._stay(move, error)
            self._on_pages()
            self._host.wake()

    async def _hand_over(self, move: _Move) -> HandoffReceipt:
        pair = await self._peers.pair(move.target)
        async with self._turns.setdefault(move.target.name, asyncio.Lock()), move.bound:
            move.is_copied = True
            try:
                return await self._copy(move, pair)
            finally:
                move.is_copied = False

    async def _copy(self, move: _Move, pair: PrefillPair) -> HandoffReceipt:
        request, policy = move.request, self._policy
        dropped = request.num_dropped * self._host.pool.page_size  # no more of them go while it moves
        reserved = policy.on_move(request.id, MOVE_ROOM_TOKENS) + dropped
        move.is_open = True
        state = _state(request, reserved, dropped, move.number)
        handoff = move.handoff = pair.reserve(state, room_tokens=MOVE_ROOM_TOKENS, on_stalled=log.warning)
        await handoff.granted()
        for _ in range(MAX_ROUNDS):
            if not self._send(move, handoff, policy.computed_len_of(request.id) // self._host.pool.page_size):
                break
            await handoff.moved()
        policy.on_move_stops(request.id)
        self._note_still(move)
        await move.still.wait()
        computed_ns, tokens = time.monotonic_ns(), request.tokens
        num_tokens = len(tokens) - 1 - dropped
        self._send(move, handoff, pages_for(num_tokens, self._host.pool.page_size))
        receipt = await handoff.commit(
            token_id=tokens[-1],
            num_tokens=num_tokens,
            computed_ns=computed_ns,
            more_token_ids=tokens[reserved:-1],
        )
        receipt.dropped_pages = request.num_dropped
        return receipt

    def _send(self, move: _Move, handoff: Handoff, end: int) -> int:
        """The pages before `end` that have not gone yet; how many there were."""
        begin, move.sent_pages = move.sent_pages, max(end, move.sent_pages)
        pages = list(self._policy.pages_of(move.request.id)[begin:end])
        handoff.pages_ready(begin, pages)
        return len(pages)

    def _leave(self, move: _Move, receipt: HandoffReceipt) -> None:
        self._host.counters["moves_done"] += 1
        self._peers.on_receipt(move.target, receipt)
        moved, name, trace = pb.EVENT_KIND_MOVED, move.target.name, move.request.trace
        if move.handoff is not None:
            trace.handoff(move.handoff.trail, name)
        told = trace.told()
        self._host.streams.event(move.request.state, moved, receipt=receipt, decode_worker=name, trace=told)
        self._on_left(move.request)
        self._host.streams.flush()

    def _stay(self, move: _Move, error: BaseException) -> None:
        self._host.counters["moves_failed"] += 1
        if isinstance(error, TimeoutError):
            error = HandoffDenied(
                f"it stood still for {STILL_S:g} s, and {move.target.name} did not have it", retryable=True
            )
        undelivered = self._peers.undelivered(move.request.id, move.target, error)
        if move.handoff is not None and move.handoff.is_in_doubt:
            undelivered = replace(undelivered, cause=pb.FAILURE_CAUSE_PEER)
        self._tell_failed(move, undelivered)

    def _tell_failed(self, move: _Move, why: Undelivered) -> None:
        failed = pb.EVENT_KIND_MOVE_FAILED
        state, number = move.request.state, move.number
        self._host.streams.event(state, failed, reason=why.reason, cause=why.cause, peer=why.peer, move=number)
        self._host.streams.flush()


def _state(request: HeldAnswer, num_tokens: int, dropped_tokens: int, move: int) -> pb.RequestState:
    """Of the first so many tokens, which have their KV, but for those that were dropped."""
    state = pb.RequestState()
    state.CopyFrom(request.state)
    state.held, state.move, state.dropped_tokens = False, move, dropped_tokens
    del state.output_ids[:]
    state.output_ids.extend(request.tokens[request.prompt_len : num_tokens])
    return state
