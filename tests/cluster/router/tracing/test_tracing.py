"""Traces arrive at a collector as OpenTelemetry's variables say: under the client's trace, adding up, with failures."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span

from cluster.front.server import RouterServer, server_options
from cluster.router.tracing.asked import asked_exporters
from cluster.router.tracing.errors import TracingError
from kvrelay.client import AsyncClient
from tests.cluster.front.http.harness import http
from tests.cluster.harness import collect, request, serving
from tests.cluster.router.tracing.receiver import Receiver, receiving_grpc, receiving_http, values

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = ("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-01")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with receiving_grpc() as (receiver, endpoint):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        yield receiver


def named(name: str, **sampling: Any) -> Any:
    message = request(max_tokens=8, **sampling)
    message.request_id = name
    return message


def whole(receiver: Receiver) -> Span:
    """The one that there is: its parts cover it."""
    (span,) = receiver.requests()
    parts = receiver.children(span)
    assert (parts[0].start_time_unix_nano, parts[-1].end_time_unix_nano) == (
        span.start_time_unix_nano,
        span.end_time_unix_nano,
    )
    for before, after in itertools.pairwise(parts):
        assert before.end_time_unix_nano == after.start_time_unix_nano
    return span


async def test_a_request_is_a_span_under_its_clients_with_its_phases_in_it(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    async with serving(2, 2) as h:
        metadata = (PARENT, ("tracestate", "a=1,b=2"))
        responses = await collect(h.generate.Generate(named("mine"), metadata=metadata))
    span = whole(receiver)
    assert (span.trace_id.hex(), span.parent_span_id.hex(), span.trace_state) == (TRACE_ID, PARENT_ID, "a=1,b=2")
    assert (span.kind, span.status.code) == (Span.SPAN_KIND_SERVER, Status.STATUS_CODE_UNSET)
    told, timeline = values(span.attributes), responses[-1].timeline
    assert told["gen_ai.request.id"] == "mine"
    assert (told["gen_ai.usage.prompt_tokens"], told["gen_ai.usage.completion_tokens"]) == (3, 8)
    assert (told["gen_ai.request.n"], told["kvrelay.attempts"], told["kvrelay.state"]) == (1, 1, "finished")
    assert told["gen_ai.latency.e2e"] == pytest.approx(timeline.e2e_s, abs=1e-3)
    assert told["gen_ai.latency.time_to_first_token"] == pytest.approx(timeline.ttft_s, abs=1e-3)
    parts = receiver.children(span)
    assert {"route", "decode"} <= {part.name for part in parts}
    assert sum(part.end_time_unix_nano - part.start_time_unix_nano for part in parts) / 1e9 == pytest.approx(
        timeline.e2e_s, abs=1e-3
    )
    assert values(parts[-1].attributes)["kvrelay.worker"] == "decode-0"
    (resource,) = receiver.resources
    assert (resource["service.name"], resource["deployment.environment.name"]) == ("kvrelay", "test")
    assert resource["service.instance.id"] == "router-0"


async def test_what_its_client_sends_over_http_is_taken_too(receiver: Receiver) -> None:
    async with http() as client:
        body = {"prompt": [5, 6, 7], "max_tokens": 4}
        await client.raw.post("/v1/completions", json=body, headers=dict([PARENT]))
        await client.raw.post("/v1/completions", json=body, headers={"traceparent": "nonsense"})
    first, second = receiver.requests()
    assert (first.trace_id.hex(), first.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert second.trace_id != first.trace_id
    assert not second.parent_span_id


async def test_our_own_client_says_which_trace_it_is_in(receiver: Receiver) -> None:
    here = SpanContext(int(TRACE_ID, 16), int(PARENT_ID, 16), is_remote=False, trace_flags=TraceFlags(1))
    async with serving() as h, AsyncClient(f"127.0.0.1:{h.server.port}", token="") as client:
        with use_span(NonRecordingSpan(here)):
            await client.generate([5, 6, 7], max_tokens=4)
    assert whole(receiver).parent_span_id.hex() == PARENT_ID


async def test_each_choice_has_a_span_of_its_own_in_it(receiver: Receiver) -> None:
    async with serving() as h:
        await collect(h.generate.Generate(named("two", n=2)))
    (span,) = receiver.requests()
    choices = receiver.children(span)
    assert [choice.name for choice in choices] == ["choice 0", "choice 1"]
    assert all(receiver.children(choice)[-1].name == "decode" for choice in choices)
    told = values(span.attributes)
    assert (told["gen_ai.request.n"], told["gen_ai.usage.completion_tokens"]) == (2, 16)


async def test_a_failure_is_the_spans_status(receiver: Receiver) -> None:
    async with serving(options=server_options(port=0, max_attempts=1)) as h:
        h.prefill().fail_with = "out of sorts"
        with pytest.raises(grpc.aio.AioRpcError):
            await h.generate.GenerateOnce(named("bad"))
    span = whole(receiver)
    assert span.status.code == Status.STATUS_CODE_ERROR
    assert "out of sorts" in span.status.message
    assert values(span.attributes)["error.type"] == "UNAVAILABLE"


async def test_another_attempt_is_an_event_of_it(receiver: Receiver) -> None:
    async with serving() as h:
        h.prefill().fail_with = "out of sorts"
        await h.generate.GenerateOnce(named("again"))
    span = whole(receiver)
    assert (span.status.code, values(span.attributes)["kvrelay.attempts"]) == (Status.STATUS_CODE_UNSET, 2)
    (event,) = (event for event in span.events if event.name == "retry")
    assert values(event.attributes)["kvrelay.attempt"] == 2
    assert "out of sorts" in values(event.attributes)["kvrelay.words"]


async def test_what_is_not_sampled_does_not_leave(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    async with serving() as h:
        await collect(h.generate.Generate(named("unseen")))
        await collect(h.generate.Generate(named("seen"), metadata=(PARENT,)))
    assert [values(span.attributes)["gen_ai.request.id"] for span in receiver.requests()] == ["seen"]


async def test_by_http_with_headers_and_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=of-ours")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.instance.id=first")
    with receiving_http() as (receiver, endpoint):
        async with serving(options=server_options(port=0, otlp_traces_endpoint=f"{endpoint}/v1/traces")) as h:
            await collect(h.generate.Generate(named("mine")))
    assert whole(receiver)
    assert [(each["path"], each["api-key"]) for each in receiver.headers] == [("/v1/traces", "of-ours")]
    resource = receiver.resources[0]
    assert (resource["service.name"], resource["service.instance.id"]) == ("chat", "first")


async def test_without_explained_requests_there_are_traces_and_nothing_is_kept(receiver: Receiver) -> None:
    async with serving(options=server_options(port=0, explained_requests=0)) as h:
        await collect(h.generate.Generate(named("mine")))
        assert len(h.router.kept) == 0
    assert whole(receiver)


async def test_a_collector_that_is_gone_holds_no_router_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(options=server_options(port=0, otlp_traces_endpoint="http://127.0.0.1:1")) as h:
        await collect(h.generate.Generate(named("mine")))
        async with asyncio.timeout(10):  # gRPC's own patience is longer
            await h.server.stop()


OFF = """
import sys
from cluster.front.server import RouterServer, server_options
server = RouterServer(server_options(port=0))
assert server._tracing is None and server.router.kept._on_end is None
print(sorted(name for name in sys.modules if name.startswith("opentelemetry")))
"""


@pytest.mark.parametrize(
    "variables",
    [{}, {"OTEL_TRACES_EXPORTER": "none"}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1", "OTEL_SDK_DISABLED": "true"}],
)
def test_off_nothing_of_opentelemetry_is_imported(variables: dict[str, str]) -> None:
    ran = subprocess.run([sys.executable, "-c", OFF], env=os.environ | variables, capture_output=True, text=True)
    assert ran.stdout == "[]\n", ran.stderr


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        (
            {"OTEL_TRACES_EXPORTER": "zipkin"},
            "OTEL_TRACES_EXPORTER is 'zipkin', which no installed package has; give one of console, none, otlp",
        ),
        (
            {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"},
            "OTEL_EXPORTER_OTLP_PROTOCOL is 'http/json'; give one of grpc, http/protobuf",
        ),
    ],
)
def test_what_cannot_be_had_is_refused_in_a_sentence(variables: dict[str, str], sentence: str) -> None:
    with pytest.raises(TracingError) as refused:
        asked_exporters("", variables)
    assert str(refused.value).startswith(sentence)


def test_a_missing_package_is_named_with_its_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.router.tracing.asked.entry_points", lambda **_: [])
    with pytest.raises(TracingError) as refused:
        RouterServer(server_options(port=0, otlp_traces_endpoint="http://localhost:4317"))
    assert str(refused.value) == (
        "traces are asked for, and opentelemetry-exporter-otlp-proto-grpc is not installed; pip install 'kvrelay[otel]'"
    )
