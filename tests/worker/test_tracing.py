"""A request's trace at a worker: bounded, told once, and slow steps are those that took twice the usual."""

from __future__ import annotations

import pytest

from kv_transfer.prefill_side.trail import Gone, Trail
from kvrelay.v1 import worker_pb2 as pb
from worker.steps.recent import Recent
from worker.steps.slow import Took
from worker.tracing import MOST, RequestTrace

pytestmark = pytest.mark.unit


def took(begin_ns: int, ns: int, median_ns: int = 0) -> Took:
    return Took(begin_ns, begin_ns + ns, median_ns)


def told(trace: RequestTrace) -> list[pb.WorkerSpan]:
    message = trace.told()
    return [] if message is None else list(message.spans)


def test_what_was_told_is_not_told_again() -> None:
    trace = RequestTrace()
    trace.chunk(took(0, 5), tokens=64, requests=2)
    (chunk,) = told(trace)
    assert (chunk.kind, chunk.begin_ns, chunk.end_ns) == (pb.WORKER_SPAN_KIND_CHUNK, 0, 5)
    assert (chunk.tokens, chunk.requests) == (64, 2)
    assert trace.told() is None


def test_of_very_many_chunks_the_last_are_told_as_one() -> None:
    trace = RequestTrace()
    for number in range(MOST + 10):
        trace.chunk(took(number, 1), tokens=16, requests=1)
    chunks = told(trace)
    assert len(chunks) == MOST
    assert sum(chunk.tokens for chunk in chunks) == 16 * (MOST + 10)
    assert (chunks[-1].merged, chunks[-1].end_ns) == (10, MOST + 10)


def test_of_very_many_slow_steps_the_slowest_are_told() -> None:
    trace = RequestTrace()
    for number in range(2 * MOST):
        trace.slow_step(took(1000 * number, 100 + number, 40), answers=3, prompt_tokens=0)
    steps = told(trace)
    assert sorted(step.end_ns - step.begin_ns for step in steps) == list(range(100 + MOST, 100 + 2 * MOST))


def test_a_handoff_tells_how_far_it_came() -> None:
    trail = Trail(asked_ns=10, granted_ns=20, committed_ns=40, sent=[Gone(22, 30, range(4), 4096)])
    trace = RequestTrace()
    trace.handoff(trail, "decode-0")
    spans = {span.kind: span for span in told(trace)}
    assert spans.keys() == {pb.WORKER_SPAN_KIND_LEASE, pb.WORKER_SPAN_KIND_SEGMENT}, "no receipt came"
    segment = spans[pb.WORKER_SPAN_KIND_SEGMENT]
    assert (segment.layer_begin, segment.layer_end, segment.bytes, segment.peer) == (0, 4, 4096, "decode-0")


def test_a_step_is_slow_above_twice_the_median_once_that_is_known() -> None:
    assert took(0, 201, 100).is_slow
    assert not took(0, 200, 100).is_slow
    assert not took(0, 10**9).is_slow


def test_the_last_numbers_are_known_by_size() -> None:
    recent = Recent(4)
    assert recent.at(0.5) == 0.0
    for value in (9.0, 1.0, 2.0, 3.0, 4.0):
        recent.note(value)
    assert (len(recent), recent.at(0.0), recent.at(0.5), recent.at(1.0)) == (4, 1.0, 3.0, 4.0)
