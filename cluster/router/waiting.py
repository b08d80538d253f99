"""WaitingQueue holds the requests that wait in the router: who goes next, how much may wait, when to come again.

    add -> first -> drop: assigned, or gone

It places nobody and reads no clock. First come first, but for those that are sent again, which go to the front.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator

from cluster.router.accounts import RequestShape

RATE_WINDOW = 64  # first tokens over which the rate of prefill is measured, for retry_after
MIN_RETRY_S, MAX_RETRY_S = 0.1, 30.0


class WaitingQueue:
    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._prompt_len: OrderedDict[str, int] = OrderedDict()  # by id, the next to go first
        self._tokens = 0
        self._rate: deque[tuple[float, int]] = deque(maxlen=RATE_WINDOW)  # (when, prompt tokens computed)

    def __len__(self) -> int:
        return len(self._prompt_len)

    def __iter__(self) -> Iterator[str]:
        return iter(self._prompt_len)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._prompt_len

    @property
    def tokens(self) -> int:
        """Of all prompts that wait."""
        return self._tokens

    @property
    def first(self) -> str:
        """The id of the next to go; empty if nobody waits."""
        return next(iter(self._prompt_len), "")

    def add(self, shape: RequestShape, *, is_resent: bool) -> None:
        self._prompt_len[shape.id] = shape.prompt_len
        self._prompt_len.move_to_end(shape.id, last=not is_resent)
        self._tokens += shape.prompt_len

    def drop(self, request_id: str) -> bool:
        """Whether it waited."""
        prompt_len = self._prompt_len.pop(request_id, None)
        if prompt_len is None:
            return False
        self._tokens -= prompt_len
        return True

    def why_full(self, shape: RequestShape) -> str:
        """Why the request may not wait; empty if it may. One of any length may wait alone."""
        if len(self._prompt_len) >= self._max_requests:
            return f"the router's queue is full: {len(self._prompt_len)} requests of {self._max_requests}"
        if self._prompt_len and self._tokens + shape.prompt_len > self._max_tokens:
            return f"the router's queue is full: {self._tokens} prompt tokens of {self._max_tokens}"
        return ""

    def on_computed(self, now: float, prompt_tokens: int) -> None:
        """A prefill worker has computed a prompt, somebody's."""
        self._rate.append((now, prompt_tokens))

    def retry_after_s(self) -> float:
        """How long the queue takes to empty at the rate at which prompts were computed lately; 1 s if unknown."""
        if len(self._rate) < 2 or self._rate[-1][0] <= self._rate[0][0]:
            return 1.0
        tokens_per_s = sum(tokens for _, tokens in self._rate) / (self._rate[-1][0] - self._rate[0][0])
        return min(max(self._tokens / max(tokens_per_s, 1.0), MIN_RETRY_S), MAX_RETRY_S)
