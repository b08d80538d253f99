"""Where a request's time went: spans cover it exactly, whatever was marked in which order, lost or moved."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.router.explaining.details import details_of, worded
from cluster.router.explaining.notes import Notes, Routed, Told, Wait, Weighed
from cluster.router.explaining.spans import Span, tiles, with_details
from cluster.router.live.timeline import PHASES, Timeline
from kvrelay.v1 import worker_pb2 as pb

pytestmark = pytest.mark.unit


def lived(first_token_s: float = 4.5, finished_s: float = 9.0) -> tuple[Timeline, Notes]:
    """It came at 0 and passed through every phase."""
    timeline, notes = Timeline(0.0), Notes()
    notes.submitted_s = 0.5
    where = ("prefill-0", "prefill-0", "prefill-0", "decode-0", "decode-0")
    for phase, at_s, worker in zip(PHASES[1:], (1.0, 2.0, 4.0, 5.0, 6.0), where, strict=True):
        timeline.enter(phase, at_s, worker)
    timeline.first_token(first_token_s)
    timeline.finish(finished_s)
    return timeline, notes


def bare(spans: list[Span]) -> list[tuple[str, str, float, float]]:
    return [(span.name, span.worker, span.begin_s, span.end_s) for span in spans]


def test_an_undisturbed_request_passes_through_all_of_them_once() -> None:
    assert bare(tiles(*lived(), 9.0)) == [
        ("tokenise", "", 0.0, 0.5),
        ("route", "", 0.5, 1.0),
        ("prefill_queue", "prefill-0", 1.0, 2.0),
        ("prefill", "prefill-0", 2.0, 4.0),
        ("first_token", "prefill-0", 4.0, 4.5),
        ("handoff", "prefill-0", 4.5, 5.0),
        ("decode_queue", "decode-0", 5.0, 6.0),
        ("decode", "decode-0", 6.0, 9.0),
    ]


def test_a_first_token_that_is_overtaken_by_decode_is_on_its_way_until_it_is_out() -> None:
    assert bare(tiles(*lived(first_token_s=7.0), 9.0))[-3:] == [
        ("prefill", "prefill-0", 2.0, 4.0),
        ("first_token", "prefill-0", 4.0, 7.0),
        ("decode", "decode-0", 7.0, 9.0),
    ]


def test_a_move_parts_its_decode_time_between_the_workers() -> None:
    timeline, notes = lived()
    notes.hand(7.0, "decode-0", "decode-1")
    notes.hand(8.0, "decode-1", "decode-0")
    assert bare(tiles(timeline, notes, 9.0))[-3:] == [
        ("decode", "decode-0", 6.0, 7.0),
        ("decode", "decode-1", 7.0, 8.0),
        ("decode", "decode-0", 8.0, 9.0),
    ]


def test_a_second_attempt_begins_with_the_wait_for_it_and_says_why() -> None:
    timeline, notes = lived(finished_s=20.0)
    timeline.enter("route", 10.0)
    notes.event(10.0, 2, "retry", words="decode-0 is lost")
    notes.wait(Wait(11.0, 2, 3, 300, "prefill-0: 900 prompt tokens queued", [("a", "anna"), ("b", "bert")]))
    timeline.enter("prefill_queue", 12.0, "prefill-1")
    timeline = again(timeline, 20.0)
    spans = worded(tiles(timeline, notes, 20.0), notes, names_others=True, owner="", handoff="")
    assert bare(spans)[-3:] == [
        ("retry", "", 10.0, 11.0),
        ("router_queue", "", 11.0, 12.0),
        ("prefill_queue", "prefill-1", 12.0, 20.0),
    ]
    assert spans[-3].words == "decode-0 is lost"
    assert spans[-2].words == "behind 3 requests (a, b, ...) of 300 tokens: prefill-0: 900 prompt tokens queued"


def again(timeline: Timeline, finished_s: float) -> Timeline:
    timeline.finished_s = finished_s
    return timeline


def routed(behind: list[tuple[str, str]]) -> Routed:
    others = [Weighed("prefill-1", "prefill", 0.25, queued_tokens=900), Weighed("decode-1", "decode", 0.0, batch=3)]
    return Routed(1.0, 1, "prefill-0", "decode-0", "prefill-0: 12 prompt tokens queued", others, 5, behind, 812)


def test_the_words_say_who_was_weighed_and_what_it_stood_behind() -> None:
    timeline, notes = lived()
    notes.route(routed([("a", "anna"), ("b", "bert")]))
    said = worded(tiles(timeline, notes, 9.0), notes, names_others=True, owner="", handoff="")
    told = {span.name: span.words for span in said}
    assert told["route"] == (
        "prefill-0: 12 prompt tokens queued; weighed beside: prefill-1: 900 prompt tokens queued, 0 cached, 250 ms to "
        "a first token; decode-1: 0 of 0 pages free, batch 3"
    )
    assert told["prefill_queue"] == "behind 5 requests (a, b, ...) and 812 prompt tokens in all"
    anna = worded(tiles(timeline, notes, 9.0), notes, names_others=False, owner="anna", handoff="")
    assert anna[2].words == "behind 5 requests (a, ...) and 812 prompt tokens in all"


def test_what_workers_tell_lies_beneath_the_part_in_which_it_began() -> None:
    timeline, notes = lived()
    s = 1_000_000_000
    chunk = pb.WorkerSpan(kind=pb.WORKER_SPAN_KIND_CHUNK, begin_ns=102 * s, end_ns=103 * s, tokens=512, requests=3)
    slow = pb.WorkerSpan(
        kind=pb.WORKER_SPAN_KIND_SLOW_STEP, begin_ns=107 * s, end_ns=140 * s, requests=8, tokens=64, median_ns=3 * s
    )
    notes.tell(Told("prefill-0", 1, 100 * s, pb.Trace(spans=[chunk]).SerializeToString()))
    notes.tell(Told("decode-0", 1, 100 * s, pb.Trace(spans=[slow]).SerializeToString()))
    said = worded(tiles(timeline, notes, 9.0), notes, names_others=True, owner="", handoff="")
    spans = {span.name: span for span in with_details(said, details_of(notes, 0.0, 9.0))}
    assert spans["prefill"].details == (Span("chunk", 2.0, 3.0, "prefill-0", 1, "512 tokens in a step with 2 others"),)
    assert spans["prefill"].words == "512 tokens in 1 chunk"
    (step,) = spans["decode"].details
    assert (step.begin_s, step.end_s) == (7.0, 9.0), "no detail outlives the request"
    of = "11.0 times the median of 3000.0 ms"
    assert step.words == f"{of}, shared by 8 answers, with 64 prompt tokens in it"


WORKERS = st.sampled_from(("prefill-0", "decode-0", "decode-1"))
MARKS = st.tuples(
    st.sampled_from((*PHASES, "hand", "wait")),
    st.floats(0, 100),
    WORKERS,
)


@given(marks=st.lists(MARKS, max_size=30), first_s=st.none() | st.floats(0, 100), end_s=st.floats(0, 120))
def test_they_always_cover_the_whole_and_up_to_the_first_token_the_ttft(
    marks: list[tuple[str, float, str]], first_s: float | None, end_s: float
) -> None:
    timeline, notes = Timeline(5.0), Notes()
    notes.submitted_s = 6.0
    attempt, last = 1, "decode-0"
    for kind, at_s, worker in marks:
        if kind == "hand":
            notes.hand(at_s, last, worker)
            last = worker
        elif kind == "wait":
            notes.wait(Wait(at_s, attempt, 1, 1, ""))
        else:
            timeline.enter(kind, at_s, worker)
            attempt += kind == "route"
    if first_s is not None:
        timeline.first_token(first_s)
    timeline.finish(end_s)
    spans = tiles(timeline, notes, timeline.arrived_s + timeline.e2e_s)
    assert spans[0].begin_s == 0.0
    assert all(one.end_s == two.begin_s for one, two in pairwise(spans))
    assert all(span.end_s >= span.begin_s for span in spans)
    assert sum(span.seconds for span in spans) == pytest.approx(timeline.e2e_s, abs=1e-9)
    if first_s is not None:
        first = sum(span.seconds for span in spans if span.end_s <= timeline.ttft_s)
        assert first == pytest.approx(timeline.ttft_s, abs=1e-9)
        before, after = timeline.halves()
        assert sum(before) == pytest.approx(timeline.ttft_s, abs=1e-9)
        assert sum(before) + sum(after) == pytest.approx(timeline.e2e_s, abs=1e-9)
