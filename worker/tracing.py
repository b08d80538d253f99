"""RequestTrace is where one request's time went at a worker: gathered while it is there, told with an event that goes
anyway. Nothing is done for a token; what is kept is bounded.
"""

from __future__ import annotations

from typing import Any

from kv_transfer.prefill_side.trail import Trail
from kvrelay.v1 import worker_pb2 as pb
from worker.steps.slow import Took

MOST = 32  # chunks; and slow steps


class RequestTrace:
    __slots__ = ("_chunks", "_first", "_slow", "_trails")

    def __init__(self) -> None:
        self._chunks: list[dict[str, Any]] = []
        self._trails: list[pb.WorkerSpan] = []
        self._first: tuple[Took, int, int] | None = None
        self._slow: list[tuple[Took, int, int]] = []

    def chunk(self, took: Took, tokens: int, requests: int) -> None:
        """Some of its prompt was computed, in a step with so many others'."""
        if len(self._chunks) < MOST:
            self._chunks.append(
                {"begin_ns": took.begin_ns, "end_ns": took.end_ns, "tokens": tokens, "requests": requests}
            )
            return
        last = self._chunks[-1]
        last |= {"end_ns": took.end_ns, "tokens": last["tokens"] + tokens, "merged": last.get("merged", 0) + 1}

    def first_step(self, took: Took, answers: int, prompt_tokens: int) -> None:
        self._first = took, answers, prompt_tokens

    def slow_step(self, took: Took, answers: int, prompt_tokens: int) -> None:
        """Of very many, the slowest are kept."""
        self._slow.append((took, answers, prompt_tokens))
        if len(self._slow) > MOST:
            self._slow.remove(min(self._slow, key=lambda step: step[0].end_ns - step[0].begin_ns))

    def handoff(self, trail: Trail, peer: str) -> None:
        """It was handed over, or was not, and will not be."""
        if len(self._trails) > 4 * MOST:
            return
        self._trails.extend(_handoff_spans(trail, peer))

    def told(self) -> pb.Trace | None:
        """All since the last time; None: nothing."""
        spans = [pb.WorkerSpan(kind=pb.WORKER_SPAN_KIND_CHUNK, **chunk) for chunk in self._chunks] + self._trails
        if self._first is not None:
            spans.append(_step_span(pb.WORKER_SPAN_KIND_FIRST_STEP, *self._first))
        spans += [_step_span(pb.WORKER_SPAN_KIND_SLOW_STEP, *step) for step in self._slow]
        self._chunks, self._trails, self._first, self._slow = [], [], None, []
        return pb.Trace(spans=spans) if spans else None


def _step_span(kind: pb.WorkerSpanKind, took: Took, answers: int, prompt_tokens: int) -> pb.WorkerSpan:
    return pb.WorkerSpan(
        kind=kind,
        begin_ns=took.begin_ns,
        end_ns=took.end_ns,
        requests=answers,
        tokens=prompt_tokens,
        median_ns=took.median_ns,
    )


def _handoff_spans(trail: Trail, peer: str) -> list[pb.WorkerSpan]:
    spans = [
        pb.WorkerSpan(
            kind=pb.WORKER_SPAN_KIND_SEGMENT,
            begin_ns=gone.begin_ns,
            end_ns=gone.end_ns,
            layer_begin=gone.layers.start,
            layer_end=gone.layers.stop,
            bytes=gone.nbytes,
            merged=gone.merged,
            peer=peer,
        )
        for gone in trail.sent
    ]
    for kind, begin_ns, end_ns in (
        (pb.WORKER_SPAN_KIND_LEASE, trail.asked_ns, trail.granted_ns),
        (pb.WORKER_SPAN_KIND_COMMIT, trail.committed_ns, trail.answered_ns),
    ):
        if begin_ns and end_ns:
            spans.append(pb.WorkerSpan(kind=kind, begin_ns=begin_ns, end_ns=end_ns, peer=peer))
    return spans
