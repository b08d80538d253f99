"""MixedRole reads prompts and writes answers in the same steps: a PrefillRole and a DecodeRole over one page pool.

    router --submit--> PrefillRole --first token--> it stays: DecodeRole.adopt --> tokens to the router
                                          \\--> it leaves: handed off, as by any prefill worker
    prefill workers --reserve, segments, commit--> DecodeRole, as of any decode worker
                                                        \\--> not read to its end: PrefillRole reads on

What each does for its requests is its own; here a step is put together and taken apart.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from decode_worker.batches import DecodeBatch
from decode_worker.driver import DecodeRole
from decode_worker.reservations import UnreadPrompt
from engine.types import SampledToken, Step
from kvrelay.v1 import worker_pb2 as pb
from kvrelay.v1 import worker_pb2_grpc
from mixed_worker.policy import MixedPolicy
from prefill_worker.driver import PrefillRole, PreparedBatch
from prefill_worker.handoffs import HeldPrompt
from worker.peers.peers import Peers
from worker.requests import HeldRequest
from worker.role import RoleHost
from worker.streams.router_link import RouterLink


@dataclass(frozen=True, slots=True)
class MixedBatch:
    decode: DecodeBatch | None
    prefill: PreparedBatch | None


class MixedRole:
    def __init__(self, host: RoleHost) -> None:
        self._host = host
        stages = host.engine.num_stages
        self.policy = MixedPolicy(host.pool, host.options.policy, name=host.options.name, num_stages=stages)
        peers = Peers(host)
        self._decode = DecodeRole(host, self.policy.decode, peers)
        self._prefill = PrefillRole(host, lambda *_: self.policy.prefill, beside=self._decode, peers=peers)
        self._decode.reservations.on_unread = self._read_on
        prompts: Any = self._prefill.requests
        answers: Any = self._decode.requests
        self.requests: Mapping[str, HeldRequest] = ChainMap(prompts, answers)

    @property
    def max_batch(self) -> int:
        return self._decode.max_batch

    @property
    def receiver(self) -> worker_pb2_grpc.HandoffServicer:
        return self._decode.receiver

    # What routers send

    def on_submit(self, link: RouterLink, submit: pb.Submit) -> None:
        self._prefill.on_submit(link, submit)

    def on_move(self, move: pb.Move) -> None:
        if move.unread:
            self._prefill.on_move(move)
        else:
            self._decode.on_move(move)

    def on_begin(self, request_id: str) -> None:
        self._decode.on_begin(request_id)

    def on_cancel(self, cancel: pb.Cancel) -> None:
        if cancel.request_id in self._prefill.requests:
            self._prefill.on_cancel(cancel)
        else:
            self._decode.on_cancel(cancel)

    def on_reassign(self, reassign: pb.Reassign) -> None:
        self._prefill.on_reassign(reassign)

    def report(self) -> pb.WorkerReport:
        """What waits and runs is decode's, prompts that have begun counted; the tokens that wait are prompts'."""
        report = self._decode.report()
        report.waiting_tokens = self.policy.prefill.waiting_tokens
        return report

    def check_invariants(self) -> None:
        self._prefill.check_invariants()
        self._decode.check_invariants()

    async def stop_serving(self) -> None:
        await self._decode.stop_serving()

    async def close(self) -> None:
        await self._prefill.handoffs.settle()
        await self._decode.close()

    # Steps

    @property
    def waits_for_tokens(self) -> bool:
        return self._decode.waits_for_tokens or self._prefill.waits_for_tokens

    def next_batch(self) -> MixedBatch | None:
        self._decode.reservations.grant_queued()  # a prompt may have left its pages
        decode = self._decode.next_batch()
        rows = sum(1 + entry.drafted for entry in decode.entries) if decode else 0
        prefill = self._prefill.next_batch(self.policy.prompt_tokens(rows))
        return MixedBatch(decode, prefill) if decode or prefill else None

    def step_of(self, batch: MixedBatch) -> Step:
        answers = self._decode.step_of(batch.decode) if batch.decode else Step(chunks=())
        if batch.prefill is None:
            return answers
        prompts = self._prefill.step_of(batch.prefill)
        return replace(prompts, chunks=[*answers.chunks, *prompts.chunks], copies=answers.copies)

    def _read_on(self, unread: UnreadPrompt) -> None:
        """A prompt has come that another worker has read in part."""
        answer, streams = unread.request, self._host.streams
        link = streams.link(answer.state.router_id)
        assert link is not None, f"{answer.id} is of a router that is lost"
        prompt = HeldPrompt(
            state=answer.state,
            link=link,
            params=answer.params,
            tokens=answer.tokens,
            decode=self._host.address,
            weights=answer.weights,
            rope=answer.rope,
        )
        self._prefill.take_over(prompt, unread.pages, unread.hashes, unread.computed_len, num_read=unread.num_read)
        moved, name, num_read = pb.EVENT_KIND_MOVED, self._host.options.name, unread.computed_len
        link.event(answer.state, moved, receipt=unread.receipt, decode_worker=name, cached_tokens=num_read)
        streams.flush()

    def on_step(self, batch: MixedBatch, tokens: Sequence[SampledToken]) -> None:
        prompts = {chunk.request_id for chunk in batch.prefill.plan.chunks} if batch.prefill else set()
        if batch.decode:
            answers = [token for token in tokens if token.request_id not in prompts]
            self._decode.on_step(batch.decode, answers, batch.prefill.plan.num_tokens if batch.prefill else 0)
        if batch.prefill:
            self._prefill.on_step(batch.prefill, [token for token in tokens if token.request_id in prompts])
