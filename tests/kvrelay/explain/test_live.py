"""Which phase at which worker a tail is made of, what would bring it down, and how one request is drawn."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from kvrelay.client.types import EndedRequest, ExplainedRequest, Span
from kvrelay.explain.live import Tail, tail_of
from kvrelay.explain.waterfall import WIDTH, bar_of, waterfall
from kvrelay.explain.what_if import what_if
from tests.kvrelay.test_replanner import FakeCluster, ended

pytestmark = pytest.mark.unit


def load(count: int = 200, slow: int = 4) -> list[EndedRequest]:
    """The last few waited long for prefill-1, all others were quick at prefill-0."""
    quick = ended(0, prompt=800, output=11, rate=1.0, ttft_s=0.1)
    quick = replace(
        quick,
        before_first_s=(0.02, 0.0, 0.07, 0.01, 0.0, 0.0),
        after_first_s=(0.0, 0.0, 0.0, 0.02, 0.0, 0.08),
        prefill_worker="prefill-0",
        decode_worker="decode-0",
    )
    late = replace(quick, ttft_s=1.0, before_first_s=(0.1, 0.7, 0.2, 0.0, 0.0, 0.0), prefill_worker="prefill-1")
    return [quick] * (count - slow) + [late] * slow


def of(metric: str, quantile: float) -> Tail:
    tail = tail_of(load(), metric, quantile)
    assert isinstance(tail, Tail), tail
    return tail


def test_p99_is_made_of_what_the_slowest_waited_for() -> None:
    tail = of("ttft", 0.99)
    assert tail.shares[0][0] == ("prefill_queue", "prefill-1")
    assert tail.shares[0][1] == pytest.approx(0.7)
    assert tail.words(300) == (
        "your P99 TTFT of the last 5 minutes was 1000 ms, of 200 requests: 70% prefill queue at prefill-1, 20% prefill "
        "at prefill-1, 10% routing and the router's queue"
    )


def test_p50_is_made_of_all_of_them_and_tpot_of_what_came_after_the_first_token() -> None:
    assert of("ttft", 0.5).shares[0][0] == ("prefill", "prefill-0")
    shares = dict(of("tpot", 0.5).shares)
    assert shares["decode", "decode-0"] == pytest.approx(0.8)
    assert shares["handoff", "prefill-0"] + shares["handoff", "prefill-1"] == pytest.approx(0.2)


def test_of_too_few_requests_nothing_is_said_but_that() -> None:
    failed = [replace(each, failed=True) for each in load()]
    assert tail_of([*load(99), *failed], "ttft", 0.99) == "99 requests have ended that count for P99 TTFT; 100 must"


def test_one_more_worker_of_the_phase_that_is_waited_for_brings_it_down() -> None:
    cluster = FakeCluster()  # with prompts for two readers
    tails = [tail for metric in ("ttft", "tpot") for tail in [tail_of(cluster.requests, metric, 0.99)]]
    known = [tail for tail in tails if isinstance(tail, Tail)]
    told = what_if(cluster.status(), cluster.requests, known, 1)
    best = min(told.others, key=lambda other: other.tails_s["P99 TTFT"])
    assert best.change in ("one more prefill worker (prefill)", "decode-1 as a prefill worker")
    assert best.tails_s["P99 TTFT"] < told.present.tails_s["P99 TTFT"] / 2
    assert told.words(known[0]).startswith(f"{best.change} would bring it to ")
    assert "no one worker more or of another role" in told.words(known[1])
    far = replace(known[0], seconds=told.present.tails_s["P99 TTFT"] * 2)
    assert told.words(far).endswith("a direction and no figure")


def span(name: str, begin_s: float, end_s: float, *details: Span) -> Span:
    return Span(name=name, begin_s=begin_s, end_s=end_s, worker="w", attempt=1, words="why [so]", details=details)


def test_a_bar_has_its_place_in_the_whole_and_is_never_nothing() -> None:
    assert bar_of(span("a", 0.0, 1.0), 1.0, "#") == "#" * WIDTH
    assert bar_of(span("a", 0.5, 1.0), 1.0, "#") == " " * (WIDTH // 2) + "#" * (WIDTH // 2)
    assert bar_of(span("a", 1.0, 1.0), 1.0, "#") == " " * (WIDTH - 1) + "#"
    assert bar_of(span("a", 0.0, 0.0), 0.0, "#") == "#"


def test_the_waterfall_shows_each_part_its_details_and_the_reason_as_it_is() -> None:
    told = ExplainedRequest(
        request_id="mine",
        choice=0,
        state="finished",
        reason="",
        age_s=1.0,
        ttft_s=0.5,
        tpot_s=0.01,
        e2e_s=1.0,
        prompt_tokens=12,
        cached_tokens=4,
        output_tokens=3,
        attempts=2,
        moves=1,
        slow=True,
        why="prefill at w",
        spans=(span("prefill_queue", 0.0, 0.25), span("prefill", 0.25, 0.5, span("chunk", 0.3, 0.4))),
    )
    console = Console(file=io.StringIO(), width=160)
    console.print(waterfall(told))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "mine: finished, TTFT 500.0 ms, TPOT 10.00 ms, E2E 1000.0 ms, 12 tokens (4 cached)" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["prefill", "queue", "w", "0.00", "250.00", "█" * 8, "why", "[so]"] in lines
    assert ["chunk", "w", "300.00", "100.00", "░░░", "why", "[so]"] in lines
