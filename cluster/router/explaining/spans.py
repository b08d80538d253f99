"""Spans are where the time of one request went: a list that covers it without gap or overlap, with what went on in each
part beneath. They are made of what was noted meanwhile, when somebody asks (details.py has what lies beneath).

    tokenise -> route | router_queue -> prefill_queue -> prefill -> first_token -> handoff -> decode_queue -> decode
                  retry (another attempt) -> ...

Up to the first token they sum to TTFT, all of them to E2E, whatever came in which order from which clock: they are the
pieces of the Timeline, cut where the router knows more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cluster.router.explaining.notes import Notes
from cluster.router.live.timeline import Piece, Timeline

SINCE_FIRST_TOKEN = ("handoff", "decode_queue", "decode")  # phases of an attempt


@dataclass(frozen=True, slots=True)
class Span:
    """`begin_s`, `end_s`: since the request came. `worker`: where; empty: in the router. `details` may lie beside one
    another, and reach beyond it."""

    name: str
    begin_s: float
    end_s: float
    worker: str = ""
    attempt: int = 1
    words: str = ""
    details: tuple[Span, ...] = ()

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


def tiles(timeline: Timeline, notes: Notes, end_s: float) -> list[Span]:
    """Those at the top, bare. `end_s`: on the router's clock; of one that still runs, now."""
    pieces = [(piece.phase, piece) for piece in timeline.pieces_until(end_s)]
    pieces = [named for phase, piece in pieces for named in _routed(phase, piece, notes)]
    for handed in notes.handed:
        pieces = _handed(pieces, handed.at_s, handed.source, handed.to)
    if timeline.first_token_s is not None:
        pieces = _with_first_token(pieces, timeline.first_token_s)
    came_s = timeline.arrived_s
    spans = [Span(name, p.begin_s - came_s, p.end_s - came_s, p.worker, p.attempt) for name, p in pieces]
    return [span for span in spans if span.end_s > span.begin_s] or spans[:1]


Named = tuple[str, Piece]


def _routed(phase: str, piece: Piece, notes: Notes) -> list[Named]:
    """What the router does with it before it is sent."""
    if phase != "route":
        return [(phase, piece)]
    name = "router_queue" if notes.waited(piece.attempt) is not None else "route"
    if piece.attempt == 1:
        return _cut(("tokenise", piece), notes.submitted_s, name) if notes.submitted_s else [("tokenise", piece)]
    again_s = next((wait.at_s for wait in notes.waits if wait.attempt == piece.attempt), None)
    return [("retry", piece)] if again_s is None else _cut(("retry", piece), again_s, name)


def _cut(named: Named, at_s: float, rest: str) -> list[Named]:
    """In two at this time; whole where it lies outside."""
    name, piece = named
    at_s = min(max(at_s, piece.begin_s), piece.end_s)
    return [(name, piece._replace(end_s=at_s)), (rest, piece._replace(begin_s=at_s))]


def _handed(pieces: Sequence[Named], at_s: float, source: str, to: str) -> list[Named]:
    """From this time on another worker had it: until the attempt was over."""
    attempt = max((p.attempt for _, p in pieces if p.begin_s <= at_s), default=1)
    found: list[Named] = []
    for name, piece in pieces:
        if piece.attempt != attempt or piece.worker != source or piece.end_s <= at_s:
            found.append((name, piece))
            continue
        head, rest = _cut((name, piece), at_s, name)
        found += [head, (rest[0], rest[1]._replace(worker=to))]
    return found


def _with_first_token(pieces: Sequence[Named], at_s: float) -> list[Named]:
    """From its being computed to its delivery it is on its way, whatever else has begun by then."""
    parts = [part for named in pieces for part in _cut(named, at_s, named[0])]
    after = [part for part in parts if part[1].begin_s >= at_s and part[1].end_s > at_s]
    before = [part for part in parts if part[1].end_s <= at_s]
    attempt = max((piece.attempt for _, piece in before if piece.end_s > piece.begin_s), default=1)
    way = [piece for _, piece in before if piece.attempt == attempt and piece.phase in SINCE_FIRST_TOKEN]
    if not way:
        return before + after
    rest = [(name, piece) for name, piece in before if piece not in way]
    return [*rest, ("first_token", way[0]._replace(end_s=at_s)), *after]


def with_details(spans: Sequence[Span], details: Sequence[Span]) -> list[Span]:
    """Each detail beneath the last span that had begun with it, or before."""
    beneath: list[list[Span]] = [[] for _ in spans]
    for detail in sorted(details, key=lambda each: (each.begin_s, each.end_s)):
        at = max((i for i, span in enumerate(spans) if span.begin_s <= detail.begin_s), default=0)
        beneath[at].append(detail)
    return [replace(span, details=tuple(under)) for span, under in zip(spans, beneath, strict=True)]
