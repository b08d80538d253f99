"""What a request is in OpenTelemetry: a span by vLLM's name and attributes, in it those that cover it without a gap
(explaining/spans.py), in them what workers told. What happened in a moment, attempts and moves, are its events.

    llm_request (SERVER) -> [choice 0, choice 1, ... of a call that has several] -> tokenise, ..., decode -> chunk, ...
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from opentelemetry.trace import Span as OtelSpan
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from cluster.router.explaining.kept import Record
from cluster.router.explaining.spans import Span

Attributes = Mapping[str, str | int | float]
QUEUES = ("router_queue", "prefill_queue")
W3C = TraceContextTextMapPropagator()


def send(tracer: Tracer, choices: Sequence[Record], zero_unix_s: float, model: str) -> None:
    """One call, all of whose choices have ended. `zero_unix_s`: when the records' clock was 0."""
    first = choices[0]
    began_ns = round((first.timeline.arrived_s + zero_unix_s) * 1e9)
    whole = tracer.start_span("llm_request", W3C.extract(first.trace or {}), kind=SpanKind.SERVER, start_time=began_ns)
    if whole.is_recording():
        whole.set_attributes(_attributes(choices, model))
        for record in sorted(choices, key=lambda each: each.choice):
            holder = whole if len(choices) == 1 else _begun(tracer, whole, f"choice {record.choice}", began_ns)
            _send_parts(tracer, holder, record.spans(names_others=False), began_ns)
            _tell_failure(holder, record)
            if holder is not whole:
                holder.end(_at(record.e2e_s, began_ns))
        _tell_failure(whole, next((each for each in choices if each.state == "failed"), first))
    whole.end(_at(max(record.e2e_s for record in choices), began_ns))


def _send_parts(tracer: Tracer, holder: OtelSpan, spans: Iterable[Span], began_ns: int) -> None:
    for span in spans:
        part = _begun(tracer, holder, span.name, _at(span.begin_s, began_ns), _told(span))
        _send_parts(tracer, part, (each for each in span.details if each.end_s > each.begin_s), began_ns)
        for each in span.details:
            if each.end_s <= each.begin_s:
                holder.add_event(each.name, _told(each), _at(each.begin_s, began_ns))
        part.end(_at(span.end_s, began_ns))


def _begun(
    tracer: Tracer, holder: OtelSpan, name: str, begin_ns: int, attributes: Attributes | None = None
) -> OtelSpan:
    return tracer.start_span(name, set_span_in_context(holder), attributes=attributes, start_time=begin_ns)


def _at(since_s: float, began_ns: int) -> int:
    return began_ns + round(since_s * 1e9)


def _told(span: Span) -> Attributes:
    told: dict[str, str | int] = {
        "kvrelay.worker": span.worker,
        "kvrelay.attempt": span.attempt,
        "kvrelay.words": span.words,
    }
    return {key: value for key, value in told.items() if value != ""}


def _attributes(choices: Sequence[Record], model: str) -> Attributes:
    first = min(choices, key=lambda each: each.choice)
    firsts_s = [record.ttft_s for record in choices if record.ttft_s]
    attributes: dict[str, str | int | float] = {
        "gen_ai.response.model": model,
        "gen_ai.request.id": first.request_id,
        "gen_ai.request.n": len(choices),
        "gen_ai.usage.num_sequences": len(choices),
        "gen_ai.usage.prompt_tokens": first.prompt_tokens,
        "gen_ai.usage.completion_tokens": sum(record.output_tokens for record in choices),
        "gen_ai.latency.time_in_queue": sum(span.seconds for span in first.tiles() if span.name in QUEUES),
        "gen_ai.latency.e2e": max(record.e2e_s for record in choices),
        "kvrelay.state": first.state,
        "kvrelay.attempts": max(record.attempts for record in choices),
        "kvrelay.moves": sum(record.moves for record in choices),
        "kvrelay.cached_tokens": first.cached_tokens,
    }
    if firsts_s:
        attributes["gen_ai.latency.time_to_first_token"] = min(firsts_s)
    if first.owner:
        attributes["kvrelay.client"] = first.owner
    return attributes


def _tell_failure(span: OtelSpan, record: Record) -> None:
    """A client that leaves is no failure of ours."""
    if record.state == "failed":
        span.set_attribute("error.type", record.code)
        span.set_status(Status(StatusCode.ERROR, record.reason))
