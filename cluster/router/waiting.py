"""WaitingQueue holds the requests that wait in the router: who goes next, how much may wait, when to come again.

    add -> in_order -> take: assigned
                    -> drop: gone

It places nobody and reads no clock. The lowest priority goes first. Of one priority it is first come first among those
of one client, and clients take turns: the next is of the one with the least service, in tokens of prompts that left the
line and of answers (`charge`), each client's divided by its weight. One that comes back to the line begins no lower
than the least of those in it (VTC: Sheng et al., OSDI 2024), so that nobody saves turns up. While two clients have
prompts in line, what they get differs, so divided, by no more than one prompt and the answers that run of the one that
is ahead. Those that are sent again go before the others of their priority, first come first served, and those of which
a prefill worker may have died stand beside the others and wait for one that tries no other. A request for which there
are no pages may be passed by smaller ones, so many times.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Generic, TypeVar

from cluster.router.accounts import RequestShape
from cluster.router.shares import Shares

RATE_WINDOW = 64  # first tokens over which the rate of prefill is measured, for retry_after
MIN_RETRY_S, MAX_RETRY_S = 0.1, 30.0


MOST_OLDER = 8  # times as many places of lines, older ones among them, are kept as there are lines
FRONT = float("-inf")  # the turn of one that is sent again
Place = tuple[int, float, int]  # priority, turn and number of arrival: lower ones go first
Line = tuple[str, int, bool]  # owner, priority, and whether they are sent again


@dataclass(slots=True)
class Waiting:
    prompt_len: int
    owner: str
    priority: int
    weight: float
    arrival: int
    is_resent: bool
    is_tried: bool  # it waits to be tried alone, beside the line
    passed: int = 0  # times that a smaller one went before it

    @property
    def size(self) -> int:
        """Of prompts by halves: one of a lower number is smaller."""
        return self.prompt_len.bit_length()

    @property
    def line(self) -> Line:
        return self.owner, self.priority, self.is_resent


class WaitingQueue:
    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._waiting: dict[str, Waiting] = {}
        self._lines: dict[Line, OrderedDict[str, None]] = {}  # none of them empty: the next to go first
        self._by_size: dict[tuple[int, Line], OrderedDict[str, None]] = {}  # of those in line, by size, likewise
        self._served: dict[int, dict[str, float]] = {}  # by priority, while it has a line, and owner: see `charge`
        self._heads = _Heads(self._lines, self._place_of)
        self._heads_of_size: dict[int, _Heads[tuple[int, Line]]] = {}
        self._lines_of: Counter[int] = Counter()  # by priority
        self._tried: OrderedDict[str, None] = OrderedDict()  # beside the line
        self._first = ""  # in line; empty: to be looked up
        self._passers: list[str] | None = None  # see `_smaller`; None: likewise
        self._requests = Shares(max_requests)
        self._tokens = Shares(max_tokens)
        self._arrivals = 0
        # (when, prompt tokens computed) since somebody waits: without it workers may have been idle in between
        self._computed_s = array("d")  # when each of the last prompts was; no objects, which would outlive a flood
        self._computed_tokens = array("d")  # amid its memory, and hold on to that

    def set_limits(self, max_requests: int, max_tokens: int) -> None:
        """What waits beyond them goes on waiting."""
        self._requests.limit = max_requests
        self._tokens.limit = max_tokens

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[str]:
        yield from self._tried
        for line in self._lines.values():
            yield from line

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._waiting

    @property
    def tokens(self) -> int:
        """Of all prompts that wait."""
        return self._tokens.total

    # who goes next

    @property
    def first(self) -> str:
        """The id of the next in line; empty if nobody is."""
        if not self._first and self._lines:
            self._first = self._heads.first
        return self._first

    @property
    def next(self) -> str:
        """The id of who is asked first: of `in_order`. Somebody waits."""
        return next(iter(self._tried), "") or self.first

    def before(self, request_id: str, most: int) -> list[str]:
        """Of those that go before one that has just come so many: the first in line, the last of its own client's."""
        waiting = self._waiting[request_id]
        own = [] if waiting.is_tried else list(islice(reversed(self._lines[waiting.line]), 1, most))
        return [each for each in dict.fromkeys([self.first, *reversed(own)]) if each not in ("", request_id)]

    def is_behind(self, priority: int, *, is_resent: bool) -> bool:
        """Whether all in line would go after a new one of this priority, or one of it that is sent again."""
        if not (first := self.first):
            return True
        before = self._waiting[first]
        return (priority, not is_resent) < (before.priority, not before.is_resent)

    def in_order(self) -> Iterator[str]:
        """Who may go next: the first of those that are tried alone, then the first in line. Who goes on asking wants
        one that may pass the last: it is smaller."""
        if self._tried:
            yield next(iter(self._tried))
        if first := self.first:
            yield first
            if self._passers is None:
                self._passers = self._smaller(first)
            yield from self._passers

    def _smaller(self, request_id: str) -> list[str]:
        """Each smaller than all before it, whoever's they are: where pages lack for one, they do for all its size."""
        size = self._waiting[request_id].size
        smaller: list[str] = []
        for head in sorted(
            [first for heads in self._heads_of_size.values() if (first := heads.first)], key=self._place_of
        ):
            if self._waiting[head].size < size:
                size = self._waiting[head].size
                smaller.append(head)
        return smaller

    def _first_of(self, lines: Iterable[OrderedDict[str, None]]) -> str:
        return min([next(iter(line)) for line in lines], key=self._place_of, default="")

    def _place_of(self, request_id: str) -> Place:
        """Of the first of its line, and of all that are sent again; of the others what it were if they were first."""
        waiting = self._waiting[request_id]
        turn = FRONT if waiting.is_resent else self._served[waiting.priority][waiting.owner]
        return waiting.priority, turn, waiting.arrival

    def passed(self, request_id: str) -> int:
        """How often."""
        return self._waiting[request_id].passed

    def on_passed(self, request_id: str) -> None:
        self._waiting[request_id].passed += 1

    # who comes and goes

    def add(self, shape: RequestShape, *, is_resent: bool, is_tried: bool = False) -> None:
        """`is_tried`: it is to be tried alone."""
        if not self._waiting:
            self._computed_s, self._computed_tokens = array("d"), array("d")
        self._arrivals += 1
        waiting = Waiting(
            shape.prompt_len, shape.owner, shape.priority, shape.weight, self._arrivals, is_resent, is_tried
        )
        self._requests.take(shape.owner)
        self._tokens.take(shape.owner, shape.prompt_len)
        if is_tried:
            self._waiting[shape.id] = waiting
            self._tried[shape.id] = None
            return
        if waiting.line not in self._lines:
            self._lift(waiting)
            self._lines_of[waiting.priority] += 1
        self._waiting[shape.id] = waiting
        size = waiting.size, waiting.line
        for ids in (self._lines.setdefault(waiting.line, OrderedDict()), self._by_size.setdefault(size, OrderedDict())):
            ids[shape.id] = None
        self._on_head(waiting.line, waiting.size)
        if self._first and self._place_of(shape.id) < self._place_of(self._first):
            self._first = shape.id

    def _lift(self, waiting: Waiting) -> None:
        """Its owner comes to a line: to the least service of those who are there."""
        served = self._served.setdefault(waiting.priority, {})
        least = self._least(waiting.priority)
        served[waiting.owner] = max(served.get(waiting.owner, least), least)

    def _least(self, priority: int) -> float:
        served = self._served[priority]
        first = self._waiting.get(self.first)
        if first is not None and first.priority == priority and not first.is_resent:
            return served[first.owner]
        return min([served[owner] for owner, of, _ in self._lines if of == priority], default=0.0)

    def take(self, request_id: str) -> None:
        """It is assigned: that is service, but of one that is sent again, which had it."""
        waiting = self._waiting[request_id]
        self.drop(request_id)
        if not waiting.is_resent:
            self.charge(waiting.owner, waiting.priority, waiting.prompt_len / waiting.weight)

    def charge(self, owner: str, priority: int, service: float) -> None:
        """Of an owner, in tokens by its weight. What nobody waits for takes nothing from anyone, and is not counted."""
        served = self._served.get(priority)
        if served is None or owner not in served:
            return
        served[owner] += service
        line = owner, priority, False  # those that are sent again have no turn
        self._heads.note(line)
        for size, heads in self._heads_of_size.items():
            heads.note((size, line))
        self._passers = None
        if self._first and self._waiting[self._first].line == line:
            self._first = ""

    def drop(self, request_id: str) -> bool:
        """Whether it waited."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is None:
            return False
        self._requests.give(waiting.owner)
        self._tokens.give(waiting.owner, waiting.prompt_len)
        if waiting.is_tried:
            del self._tried[request_id]
        else:
            _take_out(self._lines, waiting.line, request_id)
            _take_out(self._by_size, (waiting.size, waiting.line), request_id)
            self._on_head(waiting.line, waiting.size)
            if request_id == self._first:
                self._first = ""
            if waiting.line not in self._lines:
                self._lines_of[waiting.priority] -= 1
                if not self._lines_of[waiting.priority]:
                    del self._served[waiting.priority], self._lines_of[waiting.priority]
        return True

    def _on_head(self, line: Line, size: int) -> None:
        """Another stands first in a line, or its turn is another."""
        self._passers = None
        self._heads.note(line)
        heads = self._heads_of_size.setdefault(size, _Heads(self._by_size, self._place_of))
        heads.note((size, line))

    # how much, how long

    def why_full(self, owner: str, prompt_len: int) -> str:
        """Why a request may not wait; empty if it may. One of any length may wait alone."""
        requests, tokens = self._requests, self._tokens
        if requests.total >= requests.limit:
            return f"the router's queue is full: {requests.total} requests of {requests.limit}"
        if self._waiting and tokens.total + prompt_len > tokens.limit:
            return f"the router's queue is full: {tokens.total} prompt tokens of {tokens.limit}"
        if not requests.has_share(owner):
            return f"{requests.of(owner)} of {requests.total} requests that wait are this client's: its share"
        if not tokens.has_share(owner):
            return f"{tokens.of(owner)} of {tokens.total} prompt tokens that wait are this client's: its share"
        return ""

    def on_computed(self, now: float, prompt_tokens: int) -> None:
        """A prefill worker has computed a prompt, somebody's."""
        self._computed_s.append(now)
        self._computed_tokens.append(prompt_tokens)
        if len(self._computed_s) > RATE_WINDOW:
            self._computed_s.pop(0)
            self._computed_tokens.pop(0)

    def retry_after_s(self) -> float:
        """How long the queue takes to empty at the rate at which prompts were computed lately; 1 s if unknown."""
        empty_s = self.empty_s()
        return 1.0 if empty_s is None else min(max(empty_s, MIN_RETRY_S), MAX_RETRY_S)

    def empty_s(self, last: str = "") -> float | None:
        """How long all prompts that wait take to be computed, or those up to the last one, at the rate of late; None:
        unknown."""
        if len(self._computed_s) < 2 or self._computed_s[-1] <= self._computed_s[0]:
            return None
        tokens_per_s = sum(self._computed_tokens) / (self._computed_s[-1] - self._computed_s[0])
        if not last:
            return self._tokens.total / max(tokens_per_s, 1.0)
        return self._before(last) / max(tokens_per_s, 1.0)

    def _before(self, last: str) -> int:
        """Tokens of prompts up to this one, if all go as they stand."""
        tried = sum(self._waiting[i].prompt_len for i in self._tried)
        if last in self._tried:
            return tried
        places = {i: place for line in self._lines.values() for i, place in self._places(line)}
        return tried + sum(self._waiting[i].prompt_len for i, place in places.items() if place <= places[last])

    def _places(self, line: Iterable[str]) -> Iterator[tuple[str, Place]]:
        """As they will be, once those before have gone."""
        service = 0.0
        for request_id in line:
            waiting = self._waiting[request_id]
            priority, turn, arrival = self._place_of(request_id)
            yield request_id, (priority, turn + service, arrival)
            if not waiting.is_resent:
                service += waiting.prompt_len / waiting.weight

    def check_invariants(self) -> None:
        """Assert that each stands where it belongs, the line in the order of its places."""
        beside = self._tried.keys()
        assert beside == {i for i, waiting in self._waiting.items() if waiting.is_tried}, "beside the line by mistake"
        in_line = {i for line in self._lines.values() for i in line}
        assert self._waiting.keys() == in_line | beside, "one who waits stands nowhere"
        assert self.first == self._first_of(self._lines.values()), "the first in line is another"
        assert self._passers is None or self._passers == self._smaller(self.first), "others may pass it"
        kept = {priority for _, priority, _ in self._lines}
        assert self._served.keys() == kept, "turns are kept of a line that is gone"
        for of, line in self._lines.items():
            assert of[0] in self._served[of[1]], f"nobody counts what {of} gets"
            assert line, f"the line of {of} is empty and still there"
            assert list(line) == sorted(line, key=self._place_of), f"the line of {of} is out of order"
        for (size, of), ids in self._by_size.items():
            same = [i for i in self._lines[of] if self._waiting[i].size == size]
            assert same, f"size {size} of {of} is empty and still there"
            assert list(ids) == same, f"size {size} of {of} is wrong"


Key = TypeVar("Key", Line, tuple[int, Line])


class _Heads(Generic[Key]):
    """Which of several lines has the first that goes before the firsts of the others. Each line is noted whenever
    another stands first in it, or its place has changed."""

    def __init__(self, lines: Mapping[Key, OrderedDict[str, None]], place_of: Callable[[str], Place]) -> None:
        self._lines: Mapping[Key, OrderedDict[str, None]] = lines
        self._place_of = place_of
        self._heap: list[tuple[Place, Key]] = []  # of what was noted, the newest of each line and older ones

    def note(self, key: Key) -> None:
        if key not in self._lines:
            return
        heappush(self._heap, (self._place(key), key))
        if len(self._heap) > MOST_OLDER * (len(self._lines) + MOST_OLDER):
            self._heap = [(self._place(key), key) for key in {key for _, key in self._heap} if key in self._lines]
            heapify(self._heap)

    @property
    def first(self) -> str:
        """Empty where all lines are."""
        while self._heap:
            place, key = self._heap[0]
            if key in self._lines and self._place(key) == place:
                return self._head(key)
            heappop(self._heap)
        return ""

    def _head(self, key: Key) -> str:
        return next(iter(self._lines[key]))

    def _place(self, key: Key) -> Place:
        return self._place_of(self._head(key))


def _take_out(groups: dict[Key, OrderedDict[str, None]], key: Key, request_id: str) -> None:
    ids = groups[key]
    del ids[request_id]
    if not ids:
        del groups[key]
