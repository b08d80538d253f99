"""Asking where a request's time went: what is told adds up, whatever was lost, and is for its owner alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
import pytest

from cluster.front.server import server_options
from kvrelay.v1 import cluster_pb2, cluster_pb2_grpc, generate_pb2
from tests.cluster.front.http.harness import http
from tests.cluster.harness import Harness, collect, request, serving

PHASES = ["tokenise", "route", "prefill_queue", "prefill", "first_token", "handoff", "decode_queue", "decode"]
"""In their order; a model of a worker may pass one in no time at all, and then it is not told."""
TOKENS = "anna:token-of-anna-01\nbert:token-of-bert-01\noperator:token-of-oper-01"


def named(name: str, ids: Sequence[int] = (5, 6, 7), max_tokens: int = 8) -> generate_pb2.GenerateRequest:
    message = request(ids, max_tokens=max_tokens)
    message.request_id = name
    return message


async def explained(h: Harness, name: str, token: str = "") -> cluster_pb2.ExplainedRequest:
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    asked = cluster_pb2.ExplainRequest(request_id=name)
    answer = await cluster_pb2_grpc.ClusterStub(h.channel).Explain(asked, metadata=metadata)
    assert len(answer.choices) == 1
    choice: cluster_pb2.ExplainedRequest = answer.choices[0]
    return choice


def check_sums(told: cluster_pb2.ExplainedRequest, timeline: generate_pb2.Timeline) -> None:
    """To what the client's own timeline says."""
    spans = told.spans
    assert sum(span.end_s - span.begin_s for span in spans) == pytest.approx(timeline.e2e_s, abs=1e-3)
    first = [span for span in spans if span.end_s <= told.ttft_s + 1e-9]
    assert sum(span.end_s - span.begin_s for span in first) == pytest.approx(timeline.ttft_s, abs=1e-3)


async def test_a_request_is_explained_from_the_routing_to_the_last_token() -> None:
    async with serving(2, 2) as h:
        responses = await collect(h.generate.Generate(named("mine")))
        told = await explained(h, "mine")
        check_sums(told, responses[-1].timeline)
        assert (told.state, told.prompt_tokens, told.output_tokens, told.attempts) == ("finished", 3, 8, 1)
        names = [span.name for span in told.spans]
        assert (names[0], names[1], names[-1]) == ("tokenise", "route", "decode")
        assert names == [name for name in PHASES if name in names]
        route = next(span for span in told.spans if span.name == "route")
        assert route.words.startswith("prefill-0: 0 prompt tokens queued")
        assert "weighed beside: prefill-1: 0 prompt tokens queued" in route.words
        assert "decode-1: 256 of 256 pages free, batch 0" in route.words


async def test_one_whose_decode_worker_was_killed_shows_both_attempts() -> None:
    async with serving(1, 2, options=server_options(port=0, dead_after_s=0.5)) as h:
        for decode in (h.decode(0), h.decode(1)):
            decode.max_steps = 2
        call = asyncio.create_task(collect(h.generate.Generate(named("killed", max_tokens=12))))
        await h.until(lambda: h.decode(0).steps == 2)
        await h.decode(0).kill()
        h.decode(1).resume()
        responses = await call
        told = await explained(h, "killed")
        check_sums(told, responses[-1].timeline)
        assert told.attempts == 2
        retry = next(span for span in told.spans if span.name == "retry")
        assert "decode-0 is lost" in retry.words
        assert [s.worker for s in told.spans if s.name == "decode"] == ["decode-0", "decode-1"]


async def test_one_that_runs_is_explained_up_to_now_and_one_that_waits_says_behind_whom() -> None:
    async with serving(options=server_options(port=0, max_backlog_tokens=4)) as h:
        h.prefill().is_holding = True
        calls = []
        for count, name in enumerate(("a", "b", "c"), 1):
            calls.append(asyncio.create_task(collect(h.generate.Generate(named(name)))))
            await h.until(lambda count=count: h.router.num_live == count)  # type: ignore[misc]
        running = await explained(h, "c")
        assert running.state == "running"
        assert sum(s.end_s - s.begin_s for s in running.spans) == pytest.approx(running.e2e_s)
        assert running.spans[-1].name == "router_queue"
        assert running.spans[-1].words == "behind 1 request (b) of 3 tokens: 1 requests wait before it"
        h.prefill().release()
        await asyncio.gather(*calls)


async def test_a_request_that_failed_is_among_the_slow_ones_with_its_reason() -> None:
    async with serving(options=server_options(port=0, max_attempts=1)) as h:
        h.prefill().fail_with = "out of sorts"
        with pytest.raises(grpc.aio.AioRpcError):
            await h.generate.GenerateOnce(named("bad"))
        await h.generate.GenerateOnce(named("good"))
        answer = await cluster_pb2_grpc.ClusterStub(h.channel).ListSlow(cluster_pb2.ListSlowRequest())
        (told,) = answer.requests
        assert (told.request_id, told.state, told.slow, len(told.spans)) == ("bad", "failed", True, 0)
        assert "out of sorts" in told.why


async def test_each_sees_its_own_and_an_operator_all() -> None:
    async with serving(options=server_options(port=0, auth=True, tokens=TOKENS)) as h:
        enter = (("authorization", "Bearer token-of-anna-01"),)
        await h.generate.GenerateOnce(named("annas"), metadata=enter)
        for token in ("token-of-anna-01", "token-of-oper-01"):
            assert (await explained(h, "annas", token)).request_id == "annas"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await explained(h, "annas", "token-of-bert-01")
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        assert "keeps the last 1000 requests and as many slow ones (explained_requests), and has 1" in str(
            refused.value.details()
        )


async def test_it_is_told_over_http_too() -> None:
    async with http(slo_ttft_ms=1e-6) as client:
        await client.post("/v1/completions", prompt=[5, 6, 7], max_tokens=4, request_id="by/http")
        answer = await client.raw.get("/v1/requests/by/http")
        (choice,) = answer.json()["choices"]
        assert sum(s["end_s"] - s["begin_s"] for s in choice["spans"]) == pytest.approx(choice["e2e_s"])
        slow = (await client.raw.get("/v1/requests?last=5")).json()["requests"]
        assert [(each["request_id"], each["slow"], each["spans"]) for each in slow] == [("by/http", True, [])]
        gone = await client.raw.get("/v1/requests/nothing")
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "not_found")
