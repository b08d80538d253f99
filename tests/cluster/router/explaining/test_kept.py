"""What a router remembers of requests that have ended: the last and the slow, by the client's id, so many of each."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.router.explaining.kept import ENOUGH, Kept
from cluster.router.explaining.notes import Told
from cluster.router.live.prompt_hashes import PromptHashes
from cluster.router.live.requests import LiveRequest
from cluster.router.live.timeline import Timeline
from kvrelay.v1 import generate_pb2
from kvrelay.v1 import worker_pb2 as pb

pytestmark = pytest.mark.unit


def ended(name: str, *, at_s: float = 0.0, ttft_s: float = 1.0, **settings: Any) -> LiveRequest:
    hashes = PromptHashes([1, 2, 3], "")
    sampling = generate_pb2.SamplingParams(max_tokens=4)
    live = LiveRequest(
        id=f"r/{at_s}/{name}",
        call_id=name,
        choice=0,
        prompt_ids=[1, 2, 3],
        sampling=sampling,
        hashes=hashes,
        timeline=Timeline(at_s),
        **settings,
    )
    live.output_ids += [5, 6, 7]
    live.timeline.first_token(at_s + ttft_s)
    live.timeline.finish(at_s + ttft_s + 0.5)
    return live


def names(kept: Kept) -> list[str]:
    return [record.request_id for record in kept.slow()]


def test_the_last_ones_are_kept_and_of_an_id_that_is_used_again_the_newest() -> None:
    kept = Kept(3)
    for at_s, name in enumerate(("a", "b", "b", "c")):
        kept.end(ended(name, at_s=at_s), "finished")
    assert kept.choices("a") == []
    assert [record.timeline.arrived_s for record in kept.choices("b")] == [2]
    kept.end(ended("d", at_s=9), "finished")
    assert [record.timeline.arrived_s for record in kept.choices("b")] == [2], "the older one was dropped"
    assert len(kept) == 3
    for at_s in range(10, 13):
        kept.end(ended("e", at_s=at_s), "finished")
    assert kept.choices("b") == kept.choices("d") == []


def test_who_missed_a_target_or_failed_outlives_the_others() -> None:
    kept = Kept(2, (0.9, 0.0))
    kept.end(ended("late"), "finished")
    kept.end(ended("own", slo=(2.0, 0.0)), "finished")
    kept.end(ended("failed", ttft_s=0.1), "failed", "decode-0 is lost")
    kept.end(ended("left"), "cancelled", "the client went away")
    for at_s in range(5):
        kept.end(ended("quick", at_s=at_s, ttft_s=0.1), "finished")
    assert names(kept) == ["failed", "late"]
    assert kept.choices("late")[0].is_slow
    assert kept.choices("own") == kept.choices("left") == []


def test_without_a_target_the_slowest_of_late_are_slow() -> None:
    kept = Kept(100)
    for at_s in range(ENOUGH):
        kept.end(ended("usual", at_s=at_s, ttft_s=1.0 + at_s / 1000), "finished")
    kept.end(ended("slow", at_s=99, ttft_s=1.5), "finished")
    kept.end(ended("usual", at_s=100, ttft_s=1.0), "finished")
    assert names(kept) == ["slow"]


def test_a_worker_may_tell_of_one_that_has_ended() -> None:
    kept = Kept(2)
    kept.end(ended("a"), "finished")
    commit = pb.WorkerSpan(kind=pb.WORKER_SPAN_KIND_COMMIT, begin_ns=10**9, end_ns=10**9, peer="decode-0")
    kept.tell("r/0.0/a", Told("prefill-0", 1, 0, pb.Trace(spans=[commit]).SerializeToString()))
    kept.tell("r/0.0/b", Told("prefill-0", 1, 0, b""))
    (record,) = kept.choices("a")
    assert [detail.name for span in record.spans() for detail in span.details] == ["commit"]


def test_none_are_kept_where_none_shall_be() -> None:
    kept = Kept(0)
    kept.end(ended("a"), "failed", "why")
    assert (len(kept), kept.choices("a")) == (0, [])


def test_the_phrase_names_what_took_most() -> None:
    live = ended("a")
    live.timeline._halves = None
    live.timeline.enter("prefill_queue", 0.2, "prefill-1")
    kept = Kept(1)
    kept.end(live, "finished")
    assert kept.choices("a")[0].why() == "prefill queue at prefill-1: 800 of 1000 ms to its first token"
