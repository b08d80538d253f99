"""Lines is where requests wait in a router: one line for all, and beside it one for each kind of requests that only
some workers can serve, so that nobody waits for workers that he can do without.

In each line goes who is next there (cluster/router/waiting.py); of several lines the one whose first has the lowest
number of priority, then whose first has waited longest. It places nobody and reads no clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cluster.router.accounts import RequestShape, RoutedRequest
from cluster.router.waiting import WaitingQueue


class Lines:
    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self.common = WaitingQueue(max_requests, max_tokens)
        self._limits = max_requests, max_tokens
        self._aside: dict[str, WaitingQueue] = {}  # by kind, none of them empty

    def set_limits(self, max_requests: int, max_tokens: int) -> None:
        """What waits beyond them goes on waiting."""
        self._limits = max_requests, max_tokens
        for line in self._all():
            line.set_limits(max_requests, max_tokens)

    def _all(self) -> list[WaitingQueue]:
        return [self.common, *self._aside.values()]

    def __len__(self) -> int:
        return len(self.common) + self.num_aside

    def __iter__(self) -> Iterator[str]:
        yield from self.common
        yield from self.aside()

    def __contains__(self, request_id: object) -> bool:
        return any(request_id in line for line in self._all())

    @property
    def num_aside(self) -> int:
        """Of these, in lines of their kind."""
        return sum([len(line) for line in self._aside.values()])

    @property
    def tokens(self) -> int:
        """Of all prompts that wait."""
        return sum([line.tokens for line in self._all()])

    def aside(self) -> Iterator[str]:
        for line in self._aside.values():
            yield from line

    def before(self, request_id: str, most: int) -> list[str]:
        """As of its line; none where it waits in none."""
        line = self._of(request_id)
        return line.before(request_id, most) if line is not None else []

    def in_turn(self, requests: Mapping[str, RoutedRequest]) -> list[WaitingQueue]:
        """In which somebody waits, the one whose turn it is first."""
        if not self._aside:
            return [self.common] if len(self.common) else []

        def turn_of(line: WaitingQueue) -> tuple[int, float]:
            first = requests[line.next]
            return first.shape.priority, first.queued_s

        return sorted([line for line in self._all() if len(line)], key=turn_of)

    def for_(self, shape: RequestShape) -> WaitingQueue | None:
        """The line in which it would wait; None: one that is not there."""
        return self._aside.get(shape.kind) if shape.past.unable else self.common

    def why_full(self, shape: RequestShape) -> str:
        """Why it may not wait; empty if it may."""
        if shape.past.unable and self.num_aside >= self._limits[0]:
            return f"{self.num_aside} requests wait for the workers that can serve them"
        line = self.for_(shape)
        return line.why_full(shape.owner, shape.prompt_len) if line is not None else ""

    def add(self, shape: RequestShape, *, is_resent: bool, is_tried: bool) -> None:
        line = self.for_(shape)
        if line is None:
            line = self._aside[shape.kind] = WaitingQueue(*self._limits)
        line.add(shape, is_resent=is_resent, is_tried=is_tried)

    def take(self, line: WaitingQueue, request_id: str) -> None:
        """It is assigned."""
        line.take(request_id)
        self._close_empty()

    def drop(self, request_id: str) -> bool:
        """Whether it waited."""
        line = self._of(request_id)
        if line is None:
            return False
        line.drop(request_id)
        self._close_empty()
        return True

    def stand_again(self, shape: RequestShape) -> bool:
        """It is not to be tried alone any more: it stands among those that are sent again. Whether it waits."""
        line = self._of(shape.id)
        if line is None:
            return False
        line.drop(shape.id)
        line.add(shape, is_resent=True)
        return True

    def charge(self, owner: str, priority: int, service: float) -> None:
        for line in self._all():
            line.charge(owner, priority, service)

    def _of(self, request_id: str) -> WaitingQueue | None:
        return next((line for line in self._all() if request_id in line), None)

    def _close_empty(self) -> None:
        if self._aside:
            self._aside = {kind: line for kind, line in self._aside.items() if len(line)}

    def check_invariants(self, requests: Mapping[str, RoutedRequest]) -> None:
        """Assert that each waits once, and that every sum is the sum of its parts."""
        assert all(len(line) for line in self._aside.values()), "a line is empty and still there"
        for line in self._all():
            assert line.tokens == sum(requests[i].shape.prompt_len for i in line)
            line.check_invariants()
        assert len(set(self)) == len(self), "one waits in two lines"
