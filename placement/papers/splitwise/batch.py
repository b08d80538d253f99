"""A batch of Splitwise's machines: tasks, one phase of one request each, and the Selection of those that go next."""

from __future__ import annotations

from collections import deque

MAX_BATCH = 512
MAX_BATCH_TOKENS = 2048


class Task:
    """One phase of one request on one machine."""

    __slots__ = ("fin", "is_blocked", "is_prompt", "is_running", "left", "memory", "request", "since", "size")

    def __init__(self, request: int, *, is_prompt: bool, size: int, left: int, memory: int) -> None:
        self.request = request
        self.is_prompt = is_prompt
        self.size = size  # tokens it adds to a batch
        self.left = left  # decode steps to go, while it does not run
        self.memory = memory
        self.fin = 0  # the machine's round in which it ends, while it runs
        self.since = -1  # the machine's selections less those that passed it over; below 0: behind its prompt, none has
        self.is_running = False
        self.is_blocked = False


class Selection:
    """Tasks of the next batch, at most one of a request, and what they add up to."""

    __slots__ = ("capacity", "chosen", "memory", "requests", "tokens")

    def __init__(self, memory: int, capacity: int) -> None:
        self.chosen: dict[Task, None] = {}
        self.requests: set[int] = set()
        self.tokens = 0
        self.memory = memory
        self.capacity = capacity

    def fits(self, task: Task) -> bool:
        """A prompt that is longer than a batch goes alone."""
        if len(self.chosen) >= MAX_BATCH:
            return False
        return not self.chosen or self.tokens + task.size <= MAX_BATCH_TOKENS

    def has_room(self, task: Task) -> bool:
        return task.is_blocked or task.memory + self.memory <= self.capacity

    def take(self, task: Task) -> None:
        self.chosen[task] = None
        self.requests.add(task.request)
        self.tokens += task.size
        if not task.is_blocked:
            self.memory += task.memory

    def take_prompts(self, prompts: deque[Task]) -> None:
        for task in prompts:
            if not self.fits(task):
                break
            if task.request in self.requests:
                continue
            if not self.has_room(task):
                break
            self.take(task)

    def keep(self, decodes: dict[Task, None]) -> None:
        """Those whose memory is held already, a token each, as far as there is room."""
        room = min(MAX_BATCH - len(self.chosen), MAX_BATCH_TOKENS - self.tokens if self.chosen else MAX_BATCH_TOKENS)
        for task in decodes:
            if room <= 0:
                break
            if task.request not in self.requests:
                self.chosen[task] = None
                self.requests.add(task.request)
                self.tokens += 1
                room -= 1
