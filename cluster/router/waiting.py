"""WaitingQueue holds the requests that wait in the router: who goes next, how much may wait, when to come again.

    add -> in_order -> drop: assigned, or gone

It places nobody and reads no clock. First come first, but for those that are sent again, which go to the front, and
those of which a worker may have died: they stand beside the others, by the phase in which it did, and wait for a worker
that tries no other. A request for which there are no pages may be passed by smaller ones, so many times.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from cluster.router.accounts import RequestShape

RATE_WINDOW = 64  # first tokens over which the rate of prefill is measured, for retry_after
MIN_RETRY_S, MAX_RETRY_S = 0.1, 30.0


@dataclass(slots=True)
class Waiting:
    prompt_len: int
    place: int  # in the line: lower ones go first
    tried_in: str  # the phase that it waits to be tried in alone; empty: it stands in line
    passed: int = 0  # times that a smaller one went before it

    @property
    def size(self) -> int:
        """Of prompts by halves: one of a lower number is smaller."""
        return self.prompt_len.bit_length()


class WaitingQueue:
    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._waiting: dict[str, Waiting] = {}
        self._line: OrderedDict[str, None] = OrderedDict()  # the next to go first
        self._by_size: dict[int, OrderedDict[str, None]] = {}  # of those in line, likewise
        self._tried: dict[str, OrderedDict[str, None]] = {}  # by phase, beside the line
        self._tokens = 0
        self._front = self._back = 0  # places
        # (when, prompt tokens computed) since somebody waits: without it workers may have been idle in between
        self._rate: deque[tuple[float, int]] = deque(maxlen=RATE_WINDOW)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[str]:
        for tried in self._tried.values():
            yield from tried
        yield from self._line

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._waiting

    @property
    def tokens(self) -> int:
        """Of all prompts that wait."""
        return self._tokens

    # who goes next

    @property
    def first(self) -> str:
        """The id of the next in line; empty if nobody is."""
        return next(iter(self._line), "")

    def in_order(self) -> Iterator[str]:
        """Who may go next: of those that are tried alone the first of each phase, then the first in line. Who goes on
        asking wants smaller ones than that, which may pass it."""
        yield from self._next_tried()
        if first := self.first:
            yield first
            yield from self._smaller(first)

    def _next_tried(self) -> list[str]:
        return [next(iter(tried)) for tried in self._tried.values() if tried]

    def _smaller(self, request_id: str) -> list[str]:
        """At most one of each size."""
        size = self._waiting[request_id].size
        heads = [next(iter(ids)) for of, ids in self._by_size.items() if of < size and ids]
        return sorted(heads, key=self._place_of)

    def _place_of(self, request_id: str) -> int:
        return self._waiting[request_id].place

    def passed(self, request_id: str) -> int:
        """How often."""
        return self._waiting[request_id].passed

    def on_passed(self, request_id: str) -> None:
        self._waiting[request_id].passed += 1

    # who comes and goes

    def add(self, shape: RequestShape, *, is_resent: bool, tried_in: str = "") -> None:
        """`tried_in`: the phase in which it is to be tried alone."""
        if not self._waiting:
            self._rate.clear()
        place = self._front - 1 if is_resent else self._back + 1
        self._front, self._back = min(self._front, place), max(self._back, place)
        waiting = Waiting(shape.prompt_len, place, tried_in)
        self._waiting[shape.id] = waiting
        self._tokens += shape.prompt_len
        for ids in self._places(waiting):
            ids[shape.id] = None
            ids.move_to_end(shape.id, last=not is_resent or bool(waiting.tried_in))

    def _places(self, waiting: Waiting) -> list[OrderedDict[str, None]]:
        if waiting.tried_in:
            return [self._tried.setdefault(waiting.tried_in, OrderedDict())]
        return [self._line, self._by_size.setdefault(waiting.size, OrderedDict())]

    def drop(self, request_id: str) -> bool:
        """Whether it waited."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is None:
            return False
        self._tokens -= waiting.prompt_len
        for ids in self._places(waiting):
            del ids[request_id]
        return True

    # how much, how long

    def why_full(self, shape: RequestShape) -> str:
        """Why the request may not wait; empty if it may. One of any length may wait alone."""
        if len(self._waiting) >= self._max_requests:
            return f"the router's queue is full: {len(self._waiting)} requests of {self._max_requests}"
        if self._waiting and self._tokens + shape.prompt_len > self._max_tokens:
            return f"the router's queue is full: {self._tokens} prompt tokens of {self._max_tokens}"
        return ""

    def on_computed(self, now: float, prompt_tokens: int) -> None:
        """A prefill worker has computed a prompt, somebody's."""
        self._rate.append((now, prompt_tokens))

    def retry_after_s(self) -> float:
        """How long the queue takes to empty at the rate at which prompts were computed lately; 1 s if unknown."""
        empty_s = self.empty_s()
        return 1.0 if empty_s is None else min(max(empty_s, MIN_RETRY_S), MAX_RETRY_S)

    def empty_s(self) -> float | None:
        """How long all prompts that wait take to be computed, at the rate of late; None: unknown."""
        if len(self._rate) < 2 or self._rate[-1][0] <= self._rate[0][0]:
            return None
        tokens_per_s = sum(tokens for _, tokens in self._rate) / (self._rate[-1][0] - self._rate[0][0])
        return self._tokens / max(tokens_per_s, 1.0)

    def check_invariants(self) -> None:
        """Assert that each stands where it belongs, the line in the order of its places."""
        beside = {i for tried in self._tried.values() for i in tried}
        assert beside == {i for i, waiting in self._waiting.items() if waiting.tried_in}, "beside the line by mistake"
        assert self._waiting.keys() == self._line.keys() | beside, "one who waits stands nowhere"
        assert list(self._line) == sorted(self._line, key=self._place_of), "the line is out of order"
        for size, ids in self._by_size.items():
            assert list(ids) == [i for i in self._line if self._waiting[i].size == size], f"size {size} is wrong"
