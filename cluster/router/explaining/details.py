"""Details are what lies beneath the spans of a request: what its workers told, and what happened, in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from cluster.router.explaining.notes import Notes, Routed, Told, Weighed
from cluster.router.explaining.spans import Span
from kvrelay.v1 import worker_pb2 as pb

NAMES = {
    pb.WORKER_SPAN_KIND_CHUNK: "chunk",
    pb.WORKER_SPAN_KIND_LEASE: "lease",
    pb.WORKER_SPAN_KIND_SEGMENT: "segment",
    pb.WORKER_SPAN_KIND_COMMIT: "commit",
    pb.WORKER_SPAN_KIND_FIRST_STEP: "first_step",
    pb.WORKER_SPAN_KIND_SLOW_STEP: "slow_step",
}


def details_of(notes: Notes, came_s: float, e2e_s: float) -> list[Span]:
    """All, in no order; none begins before the request or ends after it, whatever the clocks say."""
    found = [span for told in notes.told for span in _told(told, came_s)]
    found += [
        Span(event.name, event.at_s - came_s, event.at_s - came_s, event.worker, event.attempt, event.words)
        for event in notes.events
    ]
    return [_within(span, e2e_s) for span in found]


def _within(span: Span, e2e_s: float) -> Span:
    begin_s = min(max(span.begin_s, 0.0), e2e_s)
    return replace(span, begin_s=begin_s, end_s=min(max(span.end_s, begin_s), e2e_s))


def _told(told: Told, came_s: float) -> Iterator[Span]:
    for part in pb.Trace.FromString(told.trace).spans:
        begin_s, end_s = ((ns - told.offset_ns) / 1e9 - came_s for ns in (part.begin_ns, part.end_ns))
        yield Span(NAMES.get(part.kind, "other"), begin_s, end_s, told.worker, told.attempt, _words(part))


def _words(part: pb.WorkerSpan) -> str:
    more = f", and {part.merged} more" if part.merged else ""
    match part.kind:
        case pb.WORKER_SPAN_KIND_CHUNK:
            others = f" in a step with {_many(part.requests - 1, 'other')}" if part.requests > 1 else ""
            return f"{_many(part.tokens, 'token')}{others}{more}"
        case pb.WORKER_SPAN_KIND_SEGMENT:
            layers = f"layers {part.layer_begin} to {part.layer_end - 1}"
            return f"{layers} to {part.peer}, {_size(part.bytes)}{more}"
        case pb.WORKER_SPAN_KIND_LEASE:
            return f"pages of {part.peer}, from asking to having them"
        case pb.WORKER_SPAN_KIND_COMMIT:
            return f"until the receipt of {part.peer}"
    shared = [f"shared by {_many(part.requests, 'answer')}"] if part.requests else []
    shared += [f"with {_many(part.tokens, 'prompt token')} in it"] if part.tokens else []
    if part.kind == pb.WORKER_SPAN_KIND_SLOW_STEP:
        times = (part.end_ns - part.begin_ns) / max(1, part.median_ns)
        shared.insert(0, f"{times:.1f} times the median of {part.median_ns / 1e6:.1f} ms")
    return ", ".join(shared)


def _many(count: int, of: str) -> str:
    return f"{count} {of}{'' if count == 1 else 's'}"


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 1e6 else f"{nbytes / 1e3:.1f} kB"


# The spans at the top


def worded(spans: Iterable[Span], notes: Notes, *, names_others: bool, owner: str, handoff: str) -> list[Span]:
    """With what is known of each. `names_others`: whether requests of other clients are named. `handoff`: what is said
    of that."""
    return [replace(span, words=_of(span, notes, names_others, owner, handoff)) for span in spans]


def _of(span: Span, notes: Notes, names_others: bool, owner: str, handoff: str) -> str:
    routed = next((each for each in notes.routed if each.attempt == span.attempt), None)
    waited = notes.waited(span.attempt)
    match span.name:
        case "route" if routed is not None:
            return _choice(routed)
        case "router_queue" if waited is not None:
            named = _named(waited.behind, waited.ahead, names_others, owner)
            many = f"{_many(waited.ahead, 'request')}{named} of {waited.tokens_ahead} tokens"
            behind = f"behind {many}: {waited.reason}"
            return f"{behind}; then {_choice(routed)}" if routed is not None else behind
        case "retry":
            return next((e.words for e in notes.events if (e.name, e.attempt) == ("retry", span.attempt)), "")
        case "prefill_queue" if routed is not None:
            return _behind(routed, names_others, owner)
        case "prefill":
            return _computed(notes, span)
        case "handoff":
            return handoff
        case "decode":
            return _decoded(notes, span)
    return ""


def _choice(routed: Routed) -> str:
    others = "; ".join(_weighed(each) for each in routed.others)
    return f"{routed.reason}{f'; weighed beside: {others}' if others else ''}"


def _weighed(each: Weighed) -> str:
    if each.phase == "prefill":
        said = f"{each.name}: {each.queued_tokens} prompt tokens queued, {each.cached_tokens} cached"
        return f"{said}, {each.takes_s * 1e3:.0f} ms to a first token" if each.takes_s else said
    said = f"{each.name}: {each.free_pages} of {each.total_pages} pages free, batch {each.batch}"
    return f"{said}, {each.takes_s * 1e3:.1f} ms a token" if each.takes_s else said


def _behind(routed: Routed, names_others: bool, owner: str) -> str:
    if not routed.num_behind and not routed.behind_tokens:
        return "behind nobody"
    named = _named(routed.behind, routed.num_behind, names_others, owner)
    return f"behind {_many(routed.num_behind, 'request')}{named} and {routed.behind_tokens} prompt tokens in all"


def _named(behind: Sequence[tuple[str, str]], of_all: int, names_others: bool, owner: str) -> str:
    shown = [name for name, of in behind if names_others or of == owner]
    return f" ({', '.join(shown)}{', ...' if len(shown) < of_all else ''})" if shown else ""


def _computed(notes: Notes, span: Span) -> str:
    parts = list(_parts(notes, span, {pb.WORKER_SPAN_KIND_CHUNK}))
    if not parts:
        return ""
    return f"{_many(sum(part.tokens for part in parts), 'token')} in {_many(_count(parts), 'chunk')}"


def _decoded(notes: Notes, span: Span) -> str:
    slow = list(_parts(notes, span, {pb.WORKER_SPAN_KIND_SLOW_STEP}))
    took_s = sum(part.end_ns - part.begin_ns for part in slow) / 1e9
    return f"{_many(len(slow), 'slow step')} of {took_s * 1e3:.0f} ms in all" if slow else ""


def _count(parts: Sequence[pb.WorkerSpan]) -> int:
    return len(parts) + sum(part.merged for part in parts)


def _parts(notes: Notes, span: Span, kinds: set[pb.WorkerSpanKind]) -> Iterator[pb.WorkerSpan]:
    for told in notes.told:
        if (told.worker, told.attempt) == (span.worker, span.attempt):
            yield from (part for part in pb.Trace.FromString(told.trace).spans if part.kind in kinds)
