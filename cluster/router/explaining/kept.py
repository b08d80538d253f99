"""Kept is what a router remembers of requests that have ended: the last ones, and the slow ones, so many of each.

    a request ends -> Record -> last | slow -> spans, when somebody asks by the client's id

Slow is who failed or missed a target, its own or the router's; where there is no target, who was among the slowest of
late. A record holds no token of the request. It lies here in one piece: as so many objects, made in the midst of all
others, it would cost the router as much again in caches as it takes to make.
"""

from __future__ import annotations

import marshal
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from cluster.router.explaining.details import details_of, worded
from cluster.router.explaining.notes import MOST, Notes, Told
from cluster.router.explaining.spans import Span, tiles, with_details
from cluster.router.live.requests import LiveRequest
from cluster.router.live.timeline import Timeline
from worker.steps.recent import Recent

LATE = 512  # requests, of which the slowest are slow where nobody has a target
SLOWEST = 0.98  # of them are not
ENOUGH = 50  # before any is
PLAIN = 2  # the form of marshal that looks for nothing it has written before

State = Literal["running", "finished", "failed", "cancelled"]


class Record(NamedTuple):
    """One choice of a request."""

    request_id: str
    wire_id: str
    choice: int
    owner: str
    state: State
    reason: str
    timeline: Timeline
    notes: Notes
    end_s: float  # on the router's clock; of one that runs, now
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    attempts: int
    moves: int
    handoff: tuple[int, int, str, float] | None  # of its receipt: pages, bytes, transport, seconds exposed
    slo: tuple[float, float]
    is_slow: bool
    code: str  # failed: gRPC's
    num_choices: int  # of its call
    trace: Mapping[str, list[str]] | None  # whose part it is: W3C's headers

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.timeline.arrived_s

    @property
    def ttft_s(self) -> float:
        return self.timeline.ttft_s

    @property
    def tpot_s(self) -> float:
        count = self.output_tokens
        return (self.e2e_s - self.ttft_s) / (count - 1) if count > 1 and self.ttft_s else 0.0

    def tiles(self) -> list[Span]:
        """The spans, bare."""
        return tiles(self.timeline, self.notes, self.end_s)

    def spans(self, *, names_others: bool = True) -> list[Span]:
        """Up to the first token they sum to ttft_s, all to e2e_s."""
        bare = self.tiles()
        said = worded(bare, self.notes, names_others=names_others, owner=self.owner, handoff=self._handoff())
        return with_details(said, details_of(self.notes, self.timeline.arrived_s, self.e2e_s))

    def _handoff(self) -> str:
        if self.handoff is None:
            return ""
        pages, nbytes, transport, exposed_s = self.handoff
        through = f" through {transport}" if transport else ""
        return f"{pages} pages, {nbytes} bytes{through}, {exposed_s * 1e3:.1f} ms exposed"

    def why(self) -> str:
        """Where most of its time went, in a phrase."""
        if self.reason:
            return self.reason
        is_first = self.ttft_s > self.e2e_s / 2 or (self.slo[0] and self.ttft_s > self.slo[0])
        spans = self.tiles()
        parts = [span for span in spans if (span.end_s <= self.ttft_s) == bool(is_first)] or spans
        seconds: dict[tuple[str, str], float] = {}
        for span in parts:
            where = span.name, span.worker
            seconds[where] = seconds.get(where, 0.0) + span.seconds
        (name, worker), most_s = max(seconds.items(), key=lambda item: item[1])
        of = "to its first token" if is_first else "after it"
        place = f" at {worker}" if worker else ""
        whole_s = sum(seconds.values())
        return f"{name.replace('_', ' ')}{place}: {most_s * 1e3:.0f} of {whole_s * 1e3:.0f} ms {of}"


TIMELINE, NOTES = Record._fields.index("timeline"), Record._fields.index("notes")


def running(live: LiveRequest, now: float) -> Record:
    return Record._make(_values(live, now, "running", "", "", False))


def _values(live: LiveRequest, end_s: float, state: State, reason: str, code: str, is_slow: bool) -> list[Any]:
    """In the order of a Record."""
    told = live.receipt  # a part of a message that would stay with it
    return [
        live.call_id,
        live.wire_id,
        live.choice,
        live.owner,
        state,
        reason,
        live.timeline,
        live.notes,
        end_s,
        len(live.prompt_ids),
        live.cached_tokens,
        len(live.output_ids),
        live.attempt,
        live.num_moves,
        None if told is None else (told.pages, told.bytes, told.transport, told.exposed_s),
        live.slo,
        is_slow,
        code,
        live.num_choices,
        live.trace,
    ]


@dataclass(slots=True)
class _Filed:
    request_id: str
    wire_id: str
    arrived_s: float
    data: bytes
    told: tuple[Told, ...] = ()  # since it ended

    @classmethod
    def of(cls, live: LiveRequest, values: list[Any]) -> _Filed:
        """`values`: of its record, which are changed."""
        values[TIMELINE], values[NOTES] = live.timeline.state(), live.notes.state()
        return cls(live.call_id, live.wire_id, live.timeline.arrived_s, marshal.dumps(values, PLAIN))

    def record(self) -> Record:
        values = dict(zip(Record._fields, marshal.loads(self.data), strict=True))
        notes = Notes.of(values["notes"])
        for told in self.told:
            notes.tell(told)
        return Record(**values | {"timeline": Timeline.of(values["timeline"]), "notes": notes})


class Kept:
    def __init__(
        self,
        most: int,
        target_s: tuple[float, float] = (0.0, 0.0),
        on_end: Callable[[Record], None] | None = None,
    ) -> None:
        """`most`: of the last ones, and as many slow ones. `target_s`: TTFT and TPOT that requests without their own
        should have; 0: none. `on_end`: who else is told of each."""
        self.most = most
        self._on_end = on_end
        self._ttft_s, self._tpot_s = target_s
        self._last: deque[_Filed] = deque()
        self._slow: deque[_Filed] = deque()
        self._by_wire: dict[str, _Filed] = {}
        self._late = Recent(LATE), Recent(LATE)  # TTFT and TPOT

    def set_bounds(self, most: int, target_s: tuple[float, float]) -> None:
        """From now on; what is kept beyond them is forgotten."""
        self.most, (self._ttft_s, self._tpot_s) = most, target_s
        for line in (self._last, self._slow):
            while len(line) > most:
                self._forget(line.popleft())

    def __len__(self) -> int:
        return len(self._by_wire)

    def end(self, live: LiveRequest, state: State, reason: str = "", code: str = "") -> None:
        """A request has ended: its timeline is finished."""
        if not self.most and self._on_end is None:
            return
        end_s = live.timeline.arrived_s + live.timeline.e2e_s
        is_slow = state == "failed" or (state == "finished" and self._is_slow(live))
        values = _values(live, end_s, state, reason, code, is_slow)
        if self._on_end is not None:
            self._on_end(Record._make(values))
        if self.most:
            self._file(_Filed.of(live, values), self._slow if is_slow else self._last)

    def _is_slow(self, live: LiveRequest) -> bool:
        ttft_s, tpot_s = live.timeline.ttft_s, live.timeline.tpot_s(len(live.output_ids))
        target_ttft_s, target_tpot_s = live.slo[0] or self._ttft_s, live.slo[1] or self._tpot_s
        if target_ttft_s or target_tpot_s:
            return 0 < target_ttft_s < ttft_s or 0 < target_tpot_s < tpot_s
        ttfts, tpots = self._late
        slow = len(ttfts) >= ENOUGH and (ttft_s > ttfts.at(SLOWEST) or tpot_s > tpots.at(SLOWEST))
        ttfts.note(ttft_s)
        tpots.note(tpot_s)
        return slow

    def _file(self, filed: _Filed, line: deque[_Filed]) -> None:
        line.append(filed)
        self._by_wire[filed.wire_id] = filed
        if len(line) > self.most:
            self._forget(line.popleft())

    def _forget(self, filed: _Filed) -> None:
        del self._by_wire[filed.wire_id]

    def tell(self, wire_id: str, told: Told) -> None:
        """A worker tells of a request that has ended."""
        filed = self._by_wire.get(wire_id)
        if filed is not None and len(filed.told) < MOST:
            filed.told += (told,)

    def choices(self, request_id: str) -> list[Record]:
        """Of the newest call of that id; none: it is not kept."""
        found = [filed for filed in self._by_wire.values() if filed.request_id == request_id]
        newest_s = max([filed.arrived_s for filed in found], default=0.0)
        records = [filed.record() for filed in found if filed.arrived_s == newest_s]
        return sorted(records, key=lambda record: record.choice)

    def slow(self) -> Iterator[Record]:
        """The newest first."""
        return (filed.record() for filed in reversed(self._slow))
