"""Passing hands prompts that are not read to their end to other workers, which read the rest and decode.

    begin --> its chunk in flight ends --> pages there, for all of it --> what is computed of it, commit --> passed
                          \\__________________________\\-- anything fails: it is read on here

Most of it has gone already where the prompt goes to the worker that would have decoded it. What the commit leaves open
is computed there as of a prompt that had been there from its beginning.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from engine.pages.pool import pages_for
from kv_transfer.prefill_side.errors import HandoffDenied
from kv_transfer.prefill_side.handoff import Handoff
from kvrelay.v1 import worker_pb2 as pb
from kvrelay.v1.generate_pb2 import HandoffReceipt
from prefill_worker.handoffs import Handoffs, HeldPrompt
from prefill_worker.policy import PrefillPolicy
from worker.peers.peers import Undelivered
from worker.role import RoleHost

STILL_S = 1.0  # that a prompt is not read while it waits for pages elsewhere


class Passing:
    def __init__(
        self,
        host: RoleHost,
        policy: PrefillPolicy,
        handoffs: Handoffs,
        *,
        on_passed: Callable[[HeldPrompt], None],
        on_doubt: Callable[[HeldPrompt, Undelivered], None],
    ) -> None:
        """`on_passed`: it is read elsewhere now. `on_doubt`: perhaps; it is not read here any more."""
        self._host = host
        self._policy = policy
        self._handoffs = handoffs
        self._on_passed = on_passed
        self._on_doubt = on_doubt
        self._still: dict[str, asyncio.Event] = {}  # nothing of it is computed; by request

    def begin(self, request: HeldPrompt, to: pb.WorkerAddress, number: int) -> None:
        """`number`: of the Move that asks for it."""
        if request.is_cancelled:
            return
        name, is_gathered = self._host.options.name, request.params.prompt_logprobs is not None
        if is_gathered or request.state.HasField("kv_policy") or request.adapter is not None:
            why = f"{name} gathers what is wanted of its prompt, or has loaded its adapter for it"
            self._tell_failed(request, Undelivered(why, pb.FAILURE_CAUSE_REQUEST, to.name), number)
            return
        if not self._policy.may_pass(request.id):
            why = f"{name} has nothing of it left to read"
            self._tell_failed(request, Undelivered(why, pb.FAILURE_CAUSE_ROOM, to.name), number)
            return
        request.is_passing = True
        self._policy.on_passing(request.id)
        self._still[request.id] = asyncio.Event()
        self._handoffs.spawn(self._run(request, to, number))
        self.on_step()

    def on_step(self) -> None:
        """Some chunks are computed."""
        for request_id, still in self._still.items():
            if self._policy.stands_still(request_id):
                still.set()

    async def _run(self, request: HeldPrompt, to: pb.WorkerAddress, number: int) -> None:
        try:
            await self._still[request.id].wait()
            receipt, num_read = await self._hand_over(request, to)
        except Exception as error:
            if not request.is_cancelled:  # else who cancelled it lets go of it
                await self._on_failed(request, to, number, error)
        else:
            if not request.is_cancelled:
                self._tell_passed(request, to, receipt, num_read)
        finally:
            request.is_passing = False
            del self._still[request.id]
            self._host.streams.flush()
            self._host.wake()

    async def _hand_over(self, request: HeldPrompt, to: pb.WorkerAddress) -> tuple[HandoffReceipt, int]:
        if request.is_cancelled:
            raise HandoffDenied("cancelled", retryable=False)
        handoff = request.handoff
        if handoff is None or request.decode != to:
            handoff = await self._handoffs.open_elsewhere(request, to)
        await self._granted(request, handoff, to.name)
        num_read = self._policy.computed_len_of(request.id)
        begin, end = request.sent_pages, pages_for(num_read, self._host.pool.page_size)
        if begin < end:
            handoff.pages_ready(begin, list(self._policy.pages_of(request.id)[begin:end]))
        num_unread = len(request.tokens) - num_read
        computed_ns = time.monotonic_ns()
        return await handoff.commit(num_tokens=num_read, computed_ns=computed_ns, unread_tokens=num_unread), num_read

    async def _granted(self, request: HeldPrompt, handoff: Handoff, name: str) -> None:
        """It waits for no pages, or not long: it would better be read."""
        try:
            async with asyncio.timeout(0.0 if request.is_stalled else STILL_S):
                await handoff.granted()
        except TimeoutError:
            raise HandoffDenied(f"{name} has no pages for it now", retryable=True) from None

    def _tell_passed(self, request: HeldPrompt, to: pb.WorkerAddress, receipt: HandoffReceipt, num_read: int) -> None:
        self._host.counters["prompts_passed"] += 1
        self._handoffs.peers.on_receipt(to, receipt)
        moved = pb.EVENT_KIND_MOVED
        request.link.event(
            request.state,
            moved,
            receipt=receipt,
            decode_worker=to.name,
            cached_tokens=num_read,
            trace=request.told(),
        )
        self._on_passed(request)

    async def _on_failed(self, request: HeldPrompt, to: pb.WorkerAddress, number: int, error: Exception) -> None:
        undelivered = self._handoffs.peers.undelivered(request.id, to, error)
        handoff = request.handoff
        if handoff is not None and handoff.is_in_doubt:
            self._on_doubt(request, undelivered)
            return
        if handoff is not None and handoff.is_over:  # the next one, at its end, brings all of it
            await self._handoffs.abort(request, undelivered.reason)
        if request.is_cancelled:
            return
        self._policy.on_passing_failed(request.id)
        self._tell_failed(request, undelivered, number)

    def _tell_failed(self, request: HeldPrompt, why: Undelivered, number: int) -> None:
        self._host.counters["moves_failed"] += 1
        request.link.event(
            request.state,
            pb.EVENT_KIND_MOVE_FAILED,
            reason=why.reason,
            cause=why.cause,
            peer=why.peer,
            move=number,
            decode_worker=request.decode.name,
        )
        self._host.streams.flush()
