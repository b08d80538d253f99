"""A request's life inside the router: what was delivered, in which attempt it is, and the client's side of it.

LiveRequest is one choice. Every attempt has a wire id of its own, so that a message, a cancel or a reservation of an
earlier attempt can never be taken for one of this attempt. Tokens are delivered exactly once and in order, by their
index: one that is early waits for those before it (decode's second token may overtake prefill's first, which travels
on another stream), one that is late is dropped.

Submission is all choices of one call: the mailbox that the front reads. One wake-up brings all that has come, and those
of a busy router are further apart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import grpc

from cluster.router.accounts import FRESH, Past
from cluster.router.explaining.notes import Notes
from cluster.router.live.bundles import Bundles
from cluster.router.live.prompt_hashes import PromptHashes
from cluster.router.live.timeline import Timeline
from cluster.router.live.turns import Turns
from engine.types import FinishReason
from kvrelay.v1 import generate_pb2
from kvrelay.v1 import worker_pb2 as pb
from worker.convert import FINISH_REASON_FROM_PROTO

MAX_MOVED = 64  # receipts of moves that are kept of a request
MAX_AT_ONCE = 256  # tokens and log-probabilities that are made into messages in one go


class RequestFailed(Exception):
    """A request ends without an answer: the gRPC status and one sentence."""

    def __init__(self, code: grpc.StatusCode, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s


class NewRequest(NamedTuple):
    """A checked request: what the front hands to the router."""

    id: str  # the client's, or made by the front
    prompt_ids: Sequence[int]
    sampling: Sequence[generate_pb2.SamplingParams]  # all fields set; one for each choice
    arrived_s: float  # router's clock
    owner: str = ""  # the client whose it is; empty: not known
    weight: float = 1.0  # of the client's turns in line
    cache_salt: str = ""  # only requests with the same share cached prefixes
    adapter: pb.Adapter | None = None  # likewise
    kv_policy: generate_pb2.KvPolicy | None = None  # None: all of its KV is kept
    slo: tuple[float, float] = (0.0, 0.0)  # seconds that it wants to its first token, and for each after it; 0: any
    priority: int = 0  # lower goes first
    pair: tuple[str, str] | None = None  # the workers that it is for, prefill and decode; None: any
    deadline_s: float | None = None  # router's clock
    deadline_reason: str = "the request's deadline is over"
    queue_deadline_s: float | None = None  # router's clock; by then it must have been sent to a worker
    trace: Mapping[str, list[str]] | None = None  # whose part it is: W3C's headers


@dataclass(slots=True)
class ChoiceUpdate:
    """What has come for one choice. `details`: of the tokens that bring more than themselves. `finish` is set with its
    last."""

    choice: int
    ids: list[int]
    details: tuple[pb.TokenOutput, ...] = ()
    finish: FinishReason | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class LiveRequest:
    id: str
    call_id: str  # of the submission whose choice it is
    choice: int
    prompt_ids: Sequence[int]
    sampling: generate_pb2.SamplingParams
    hashes: PromptHashes  # shared with the other choices
    timeline: Timeline
    owner: str = ""  # the client whose it is; empty: not known
    weight: float = 1.0  # of its turns in line
    slo: tuple[float, float] = (0.0, 0.0)  # of the NewRequest
    priority: int = 0
    pair: tuple[str, str] | None = None
    num_choices: int = 1  # of its call
    adapter: pb.Adapter | None = None
    kv_policy: generate_pb2.KvPolicy | None = None
    heavy_pages: Sequence[int] = ()  # see RequestState; they come with the first token
    trace: Mapping[str, list[str]] | None = None
    notes: Notes = field(default_factory=Notes)
    attempt: int = 1
    past: Past = FRESH  # what earlier attempts have met
    output_ids: list[int] = field(default_factory=list)
    prefill: str = ""
    decode: str = ""
    has_first_token: bool = False  # in this attempt
    num_decoded: int = 0  # tokens of its decode worker in this attempt: counted where `past` knows a death
    is_handed_off: bool = False
    moving_to: str = ""  # another decode worker, which takes it while it is decoded
    has_moved: bool = False  # in this attempt
    has_passed: bool = False  # likewise, before it was read to its end
    num_moves: int = 0
    last_move: int = 0  # the number of the last that was asked for
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    receipt: generate_pb2.HandoffReceipt | None = None
    moved: list[generate_pb2.HandoffReceipt] = field(default_factory=list)  # one for each of its moves
    finish: FinishReason | None = None
    last_token_s: float = 0.0
    _computed_len: int = 0  # of the sequence, in earlier attempts, at most
    _early: dict[int, tuple[int, pb.TokenOutput | None]] = field(default_factory=dict)
    num_beams: int = field(init=False)  # 0: no beam search; asked for with its tokens: a message is slow to say so

    def __post_init__(self) -> None:
        self.num_beams = int(self.sampling.beam_search.num_beams)  # of a message that is not set: 0

    @property
    def wire_id(self) -> str:
        return self.id if self.attempt == 1 else f"{self.id}#{self.attempt}"

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def was_read(self) -> bool:
        """A worker has begun to read its prompt."""
        return self._computed_len > 0

    @property
    def tokens_left(self) -> int:
        return int(self.sampling.max_tokens) - len(self.output_ids)

    def take(self, index: int, token_id: int, details: pb.TokenOutput | None = None) -> ChoiceUpdate | None:
        """What this token lets out, in order: nothing if it is early or was delivered before. `details`: what else it
        brings. A search's output counts as all tokens of its hypotheses."""
        outputs = self.output_ids
        if index != len(outputs):
            if index > len(outputs):
                self._early[index] = token_id, details
            return None
        ready = ChoiceUpdate(self.choice, [token_id])
        if details is not None:
            self._take_details(ready, details)
            if details.hypotheses:
                outputs += [token_id for each in details.hypotheses for token_id in each.token_ids]
                return ready
        outputs.append(token_id)
        while self._early and (early := self._early.pop(len(outputs), None)) is not None:
            token_id, details = early
            outputs.append(token_id)
            ready.ids.append(token_id)
            if details is not None:
                self._take_details(ready, details)
        return ready

    def _take_details(self, ready: ChoiceUpdate, details: pb.TokenOutput) -> None:
        ready.details += (details,)
        ready.finish = FINISH_REASON_FROM_PROTO.get(details.finish_reason)
        if details.heavy_pages:
            self.heavy_pages = tuple(details.heavy_pages)
        self.drafted_tokens += details.drafted
        self.accepted_tokens += details.accepted

    def on_prefill_started(self, cached_tokens: int) -> None:
        """Count what is computed a second time: all that earlier attempts had, less what a cache still holds."""
        if self.attempt == 1:
            self.cached_tokens = cached_tokens
        self.recomputed_tokens += max(0, self._computed_len - cached_tokens)
        self._computed_len = len(self.prompt_ids) + len(self.output_ids)

    def on_moved(self, receipt: generate_pb2.HandoffReceipt) -> None:
        """Another worker has it, and says what it was handed."""
        self.num_moves += 1
        if len(self.moved) < MAX_MOVED:
            self.moved.append(receipt)

    @property
    def kind(self) -> str:
        """As in RequestShape."""
        asked = [] if self.adapter is None else [f"adapter {self.adapter.digest}"]
        return " ".join([*asked, "kv_policy"] if self.kv_policy is not None else asked)

    def begin_attempt(self, now: float, *, past: Past) -> None:
        """Send it again: the tokens delivered so far stay, all else begins anew."""
        if self._computed_len:
            self._computed_len = len(self.prompt_ids) + max(0, len(self.output_ids) - 1)
        self.attempt += 1
        self.past = past
        self.prefill = self.decode = self.moving_to = ""
        self.has_first_token = self.is_handed_off = self.has_moved = self.has_passed = False
        self.num_decoded = 0
        self.receipt = None
        self._early.clear()
        self.timeline.enter("route", now)

    def write(self, state: pb.RequestState, router_id: str, *, is_held: bool = False) -> None:
        """What a worker is told of it, into a message that is empty."""
        if self.output_ids:  # they came with the first
            self.sampling.ClearField("prompt_logprobs")
            state.output_ids.extend(self.output_ids)
        state.request_id = self.wire_id
        state.router_id = router_id
        state.prompt_ids.extend(self.prompt_ids)
        state.sampling.CopyFrom(self.sampling)
        state.attempt = self.attempt
        state.cache_salt = self.hashes.cache_salt
        if self.adapter is not None:
            state.adapter.CopyFrom(self.adapter)
        if self.kv_policy is not None:
            state.kv_policy.CopyFrom(self.kv_policy)
            state.heavy_pages.extend(self.heavy_pages)
        state.held = is_held
        state.priority = self.priority

    def timeline_to_proto(self) -> generate_pb2.Timeline:
        return generate_pb2.Timeline(
            phases=[{"name": name, "seconds": seconds} for name, seconds in self.timeline.phases().items()],
            ttft_s=self.timeline.ttft_s,
            tpot_s=self.timeline.tpot_s(len(self.output_ids)),
            e2e_s=self.timeline.e2e_s,
            prefill_worker=self.prefill,
            decode_worker=self.decode if self.is_handed_off else "",
            attempts=self.attempt,
            moves=self.num_moves,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
        )

    def receipt_to_proto(self) -> generate_pb2.HandoffReceipt | None:
        """The last attempt's, with what was recomputed over all of them; None if nothing moved and nothing was."""
        if self.receipt is None and not self.recomputed_tokens:
            return None
        receipt = generate_pb2.HandoffReceipt(checksums_ok=True)  # of nothing, where its last attempt ended at prefill
        if self.receipt is not None:
            receipt.CopyFrom(self.receipt)
        receipt.recomputed_tokens += self.recomputed_tokens
        return receipt


class Submission:
    """All choices of one call. The router puts, the front takes; one reader."""

    def __init__(self, id: str, choices: Sequence[LiveRequest], turns: Turns, bundles: Bundles | None = None) -> None:
        self.id = id
        self.choices = choices
        self.timers: list[asyncio.TimerHandle] = []  # cancelled with the end
        self.error: RequestFailed | None = None
        self.num_running = len(choices)
        self._tokens_at_once = max(1, MAX_AT_ONCE // (1 + choices[0].sampling.logprobs))
        self._turns = turns
        self._bundles = bundles or Bundles()
        self.on_unread: Callable[[Submission, str], None] = _nobody  # it ends, for its tokens are not read
        self._has_begun = False  # its first tokens were taken
        self._is_keeping = False  # tokens that come do not wake the reader
        self._updates: list[ChoiceUpdate] = []
        self._num_tokens = 0  # of them
        self._waiter: asyncio.Future[None] | None = None

    @classmethod
    def of(
        cls, request: NewRequest, router_id: str, serial: int, turns: Turns, bundles: Bundles | None = None
    ) -> Submission:
        """The choices of a request, each with an id that is unique in the cluster and never used again.

        `serial` is the router's own: a client may use its id again while messages about the last use are on their way.
        """
        many = len(request.sampling) > 1
        prefix = f"{router_id}/{serial}/{request.id}"
        digest = request.adapter.digest if request.adapter is not None else ""
        hashes = PromptHashes(request.prompt_ids, request.cache_salt, digest)
        choices = [
            LiveRequest(
                id=f"{prefix}-{i}" if many else prefix,
                call_id=request.id,
                choice=i,
                prompt_ids=request.prompt_ids,
                sampling=sampling,
                hashes=hashes,
                timeline=Timeline(request.arrived_s),
                owner=request.owner,
                weight=request.weight,
                slo=request.slo,
                priority=request.priority,
                kv_policy=request.kv_policy,
                pair=request.pair,
                num_choices=len(request.sampling),
                adapter=request.adapter,
                trace=request.trace,
            )
            for i, sampling in enumerate(request.sampling)
        ]
        return cls(request.id, choices, turns, bundles)

    @property
    def is_over(self) -> bool:
        return self.num_running == 0 or self.error is not None

    @property
    def _has_end(self) -> bool:
        return self.is_over or any(update.finish is not None for update in self._updates)

    def put(self, update: ChoiceUpdate) -> None:
        last = self._updates[-1] if self._updates else None
        if last is not None and last.choice == update.choice and len(last.ids) < self._tokens_at_once // 2:
            last.ids += update.ids
            last.details += update.details
            last.finish = update.finish
        else:
            self._updates.append(update)
        self._num_tokens += len(update.ids)
        if not self._is_keeping or update.finish is not None or self._num_tokens >= self._tokens_at_once // 2:
            self._wake()

    def fail(self, error: RequestFailed) -> None:
        self.error = error
        self._wake()

    def drop_updates(self, error: RequestFailed) -> None:
        """Nobody reads them: the reader gets the error at once."""
        self._updates.clear()
        self._num_tokens = 0
        self.fail(error)

    async def updates(self) -> list[ChoiceUpdate]:
        """What has come since the last call, at most so much that the loop is not held up by it, waiting for something;
        empty when every choice has ended.

        Raises RequestFailed, after what came before the failure was taken.
        """
        is_kept = self._has_begun and not self._has_end and self._num_tokens < self._tokens_at_once // 2
        if is_kept and (keep_s := self._bundles.keep_s(self.choices[0].slo[1])):
            await self._keep(keep_s)
        elif self._updates:
            await self._turns.wait(self.choices[0].owner)
        while not self._updates:
            if self.error is not None:
                raise self.error
            if self.num_running == 0:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._has_begun = True
        return self.take()

    def take(self) -> list[ChoiceUpdate]:
        """Of what has come the first, as much as is made into messages in one go."""
        if self._num_tokens <= self._tokens_at_once:
            updates, self._updates, self._num_tokens = self._updates, [], 0
            return updates
        count = num_tokens = 0
        while num_tokens < self._tokens_at_once:
            num_tokens += len(self._updates[count].ids)
            count += 1
        updates = self._updates[:count]
        del self._updates[:count]
        self._num_tokens -= num_tokens
        return updates

    async def _keep(self, seconds: float) -> None:
        """Let tokens gather for so long, or until they are many, a choice ends or the call fails."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(seconds, self._wake)
        self._waiter, self._is_keeping = loop.create_future(), True
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._is_keeping = False

    def _wake(self) -> None:
        if self._waiter is not None:
            self._turns.wake(self.choices[0].owner, self._waiter)
            self._waiter = None


def _nobody(submission: Submission, why: str) -> None:
    pass
