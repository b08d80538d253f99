"""Searches carries out the beam searches of a DecodeRole: a chunk for each beam, and what follows from their rows.

    committed --> [first step: the prompt's last token] --> rows --> BeamSearch.step --> policy.on_fork --> next step
                                                                          \\--> over: one output with the n best

A search that is lost with its worker or its pages begins anew elsewhere, from the prompt, and finds the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from decode_worker.batches import DecodeEntry
from decode_worker.beams import BeamSearch
from decode_worker.policy import DecodePolicy
from decode_worker.reservations import HeldAnswer
from engine.types import Chunk, SampledToken, SampleSpec, TokenLogprob, banned_token_ids
from kvrelay.v1 import worker_pb2 as pb
from worker.convert import FINISH_REASON_TO_PROTO
from worker.role import RoleHost


@dataclass(slots=True)
class _Running:
    search: BeamSearch
    rows: list[tuple[TokenLogprob, ...]] = field(default_factory=list)  # of the step that ends, so far


class Searches:
    def __init__(self, host: RoleHost, policy: DecodePolicy) -> None:
        self._host = host
        self._policy = policy
        self._running: dict[str, _Running] = {}

    def chunk(self, request: HeldAnswer, entry: DecodeEntry) -> Chunk:
        """Of one beam; it says what may follow."""
        eos_token_ids, search = self._host.engine.info.eos_token_ids, self._of(request).search
        output_ids = search.live[entry.beam].token_ids
        spec = SampleSpec(
            params=request.params,
            position=entry.position + 1,
            prompt_ids=request.state.prompt_ids if request.params.has_penalties else (),
            output_ids=output_ids,
            banned_ids=banned_token_ids(request.params, output_ids, len(output_ids), eos_token_ids),
            num_candidates=search.num_candidates,
        )
        return Chunk(
            request_id=request.id,
            token_ids=(output_ids[-1] if output_ids else request.tokens[-1],),
            start=entry.position,
            block_table=entry.pages,
            sample=spec,
            adapter=request.adapter,
            rope_len=request.rope_len,
        )

    def on_beam(self, request: HeldAnswer, row: SampledToken) -> pb.TokenOutput | None:
        """What may follow a beam, in the order of the beams; with the last one the step is done. Returns the output of
        a search that is over then."""
        running = self._of(request)
        search = running.search
        running.rows.append(row.top_logprobs)
        if len(running.rows) < len(search.live):
            return None
        parents = search.step(running.rows)
        running.rows = []
        if not search.is_over:
            self._policy.on_fork(request.id, parents)
            return None
        return _output(request, search)

    def forget(self, request_id: str) -> None:
        self._running.pop(request_id, None)

    def _of(self, request: HeldAnswer) -> _Running:
        running = self._running.get(request.id)
        if running is None:
            search = BeamSearch(request.params, self._host.engine.info.eos_token_ids)
            running = self._running[request.id] = _Running(search)
        return running


def _output(request: HeldAnswer, search: BeamSearch) -> pb.TokenOutput:
    found = [
        pb.Hypothesis(token_ids=each.token_ids, finish_reason=FINISH_REASON_TO_PROTO[each.reason], score=each.score)
        for each in search.best
        if each.reason is not None
    ]
    return pb.TokenOutput(
        request_id=request.id,
        attempt=request.state.attempt,
        finish_reason=found[0].finish_reason,
        hypotheses=found,
    )
