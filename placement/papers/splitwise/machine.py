"""Machine is one machine of Splitwise's simulator: its queue, its memory, the batch that it runs, preemption.

It does what placement/papers/splitwise/rules.py says of a machine. Which requests it gets is decided by the pools.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Protocol

from placement.latency.base import DecodeLine
from placement.papers.splitwise.batch import MAX_BATCH, MAX_BATCH_TOKENS, Selection, Task
from placement.simulator.clock import VirtualClock

MAX_PREEMPTIONS = 4


class SplitwiseTimes(Protocol):
    """What these rules ask of a machine; Splitwise's table has it as it is. Decode knows no context: both arguments of
    decode_line, and the last two of mixed_s, are the number of requests."""

    @property
    def kv_capacity_bytes(self) -> int: ...

    @property
    def kv_bytes_per_token(self) -> int: ...

    @property
    def link_bytes_per_s(self) -> float: ...

    def decode_line(self, batch_size: int, context_tokens: int) -> DecodeLine: ...

    def mixed_s(self, chunks: Sequence[tuple[int, int]], batch_size: int, context_tokens: int) -> float: ...


class Pools:
    """What machines share, and whom they tell."""

    def __init__(self, num_requests: int) -> None:
        self.clock = VirtualClock()
        self.finish = [float("nan")] * num_requests
        self.memory = [0] * num_requests  # bytes the request holds, wherever it is
        self.preemptions = 0

    def on_empty(self, machine: Machine) -> None:
        raise NotImplementedError

    def on_prompt_done(self, task: Task, machine: Machine) -> None:
        raise NotImplementedError


class Machine:
    """One machine and its queue; a batch runs until its prompts are done or the next of its decodes ends."""

    __slots__ = (
        "batch",
        "batch_tokens",
        "blocked",
        "busy_s",
        "capacity",
        "duration",
        "end_s",
        "ends",
        "is_lent",
        "is_pausing",
        "iterations",
        "latency",
        "memory",
        "pending",
        "pending_prompts",
        "pool",
        "pools",
        "promised_memory",
        "promised_tokens",
        "prompts_in_batch",
        "requests",
        "rounds",
        "selections",
        "tasks",
        "version",
    )

    def __init__(self, pools: Pools, latency: SplitwiseTimes, pool: list[Machine]) -> None:
        self.pools = pools
        self.latency = latency
        self.pool = pool  # where it belongs
        self.is_lent = False
        self.memory = 0
        self.capacity = latency.kv_capacity_bytes
        self.promised_memory = 0
        self.promised_tokens = 0
        self.pending: list[Task] = []  # by (times passed over, arrival) when they came
        self.pending_prompts: deque[Task] = deque()
        self.blocked: dict[Task, None] = {}
        self.requests: list[int] = []  # all that have a task here, by arrival
        self.tasks: dict[int, list[Task]] = {}
        self.batch: dict[Task, None] = {}  # decodes
        self.prompts_in_batch: list[Task] = []
        self.batch_tokens = 0
        self.ends: list[tuple[int, int, Task]] = []
        self.rounds = 0
        self.is_pausing = False
        self.duration = 0.0  # of one iteration
        self.iterations = 0
        self.end_s = 0.0
        self.version = 0
        self.selections = 0  # after which somebody was left waiting
        self.busy_s = 0.0

    @property
    def num_batch(self) -> int:
        return len(self.batch) + len(self.prompts_in_batch)

    def arrive(self, task: Task) -> None:
        if task.request in self.tasks:
            self.tasks[task.request].append(task)
        else:
            self.tasks[task.request] = [task]
            task.since = self.selections
            insort(self.requests, task.request)
        self._queue(task)
        if not self.num_batch:
            if self.memory + task.memory <= self.capacity:
                self.start()
        elif self.num_batch < MAX_BATCH and self.batch_tokens + task.size <= MAX_BATCH_TOKENS:
            self.pause()
        elif task.is_prompt and len(self.prompts_in_batch) < self.num_batch:
            prompt_tokens = self.batch_tokens - len(self.batch)
            if prompt_tokens + task.size <= MAX_BATCH_TOKENS:
                self.pause()

    def _queue(self, task: Task) -> None:
        self.pending.insert(self._place_of(task), task)
        if task.is_prompt:
            self.pending_prompts.append(task)

    def _place_of(self, task: Task) -> int:
        """Behind those passed over as often or less; of these, behind those that came before."""
        passed_over, pending = self._passed_over(task), self.pending
        low, high = 0, len(pending)
        while low < high:
            middle = (low + high) // 2
            other = pending[middle]
            times = 0 if other.since < 0 else self.selections - other.since
            if times < passed_over or (times == passed_over and other.request <= task.request):
                low = middle + 1
            else:
                high = middle
        return low

    def _passed_over(self, task: Task) -> int:
        """How often it was not chosen while it was the first of its request's tasks here."""
        return 0 if task.since < 0 else self.selections - task.since

    def on_sent(self) -> None:
        """A prompt's KV has left: its memory may let others start."""
        if not self.pending:
            return
        if not self.num_batch:
            if self.memory + self.pending[0].memory <= self.capacity:
                self.start()
        elif self.num_batch < MAX_BATCH and self.batch_tokens < MAX_BATCH_TOKENS:
            self.pause()

    def pause(self) -> None:
        """Somebody waits: the decode step under way is the run's last."""
        if self.is_pausing or self.prompts_in_batch:
            return
        self.is_pausing = True
        now = self.pools.clock.now
        elapsed = now - (self.end_s - self.duration * self.iterations)
        self.iterations = int(elapsed // self.duration) + 1
        self._schedule(now + (self.duration * self.iterations - elapsed))

    def _schedule(self, end_s: float) -> None:
        self.end_s = end_s
        self.version += 1
        self.pools.clock.at(end_s, self._on_end, self.version)

    def start(self) -> None:
        """Select the next batch and run it, decodes until the next of them ends."""
        self._select()
        if not self.num_batch:
            if not self.requests:
                self.pools.on_empty(self)
            return
        count = len(self.batch)
        if self.prompts_in_batch:
            tokens = sum(task.size for task in self.prompts_in_batch)
            self.duration = self.latency.mixed_s([(tokens, 0)], count, count)
            self.iterations = 1
        else:
            self.duration = self.latency.decode_line(count, count).step_s
            self.iterations = self._next_end() - self.rounds
        self._schedule(self.pools.clock.now + self.duration * self.iterations)

    def _next_end(self) -> int:
        while True:
            fin, _, task = self.ends[0]
            if task.is_running and task.fin == fin:
                return fin
            heappop(self.ends)

    def _on_end(self, version: int) -> None:
        if version != self.version:
            return
        self.is_pausing = False
        self.rounds += self.iterations
        self.busy_s += self.duration * self.iterations
        while self.ends and self.ends[0][0] <= self.rounds:
            fin, _, task = heappop(self.ends)
            if task.is_running and task.fin == fin:
                self._end_decode(task)
        prompts, self.prompts_in_batch = self.prompts_in_batch, []
        for task in prompts:
            self._forget(task)
            self.pools.on_prompt_done(task, self)
        self.start()

    def _end_decode(self, task: Task) -> None:
        task.is_running = False
        del self.batch[task]
        self._forget(task)
        self.promised_tokens -= 1
        self.release(task.request)
        self.pools.finish[task.request] = self.pools.clock.now

    def release(self, request: int) -> None:
        """All memory of the request that it has here."""
        self.memory -= self.pools.memory[request]
        self.promised_memory -= self.pools.memory[request]

    def _forget(self, task: Task) -> None:
        tasks = self.tasks[task.request]
        tasks.remove(task)
        if not tasks:
            del self.tasks[task.request]
            del self.requests[bisect_left(self.requests, task.request)]
        elif tasks[0].since < 0:
            tasks[0].since = self.selections

    # the next batch

    def _select(self) -> None:
        """Put waiting tasks into the batch and preempt decodes that find no room."""
        if not self.pending:
            self.batch_tokens = len(self.batch)
            return
        selection = Selection(self.memory, self.capacity)
        self._take_passed_over(selection)
        selection.take_prompts(self.pending_prompts)
        selection.keep(self.blocked)
        selection.keep(self.batch)
        if len(selection.chosen) < len(self.requests):
            self._take_waiting(selection)
        self.batch_tokens = selection.tokens
        self._change_batch(selection.chosen)

    def _take_passed_over(self, selection: Selection) -> None:
        for task in self.pending:
            if self._passed_over(task) < MAX_PREEMPTIONS or not selection.fits(task):
                break
            if task.request not in selection.requests and selection.has_room(task):
                selection.take(task)

    def _take_waiting(self, selection: Selection) -> None:
        for request in self.requests:
            if len(selection.chosen) == MAX_BATCH:
                break
            if request in selection.requests:
                continue
            task = self.tasks[request][0]
            if not selection.fits(task) or not selection.has_room(task):
                break
            selection.take(task)

    def _change_batch(self, chosen: dict[Task, None]) -> None:
        for task in [task for task in self.batch if task not in chosen]:
            del self.batch[task]
            task.is_running = False
            task.is_blocked = True
            task.left = task.fin - self.rounds
            self.pools.preemptions += 1
            self._queue(task)
            self.blocked[task] = None
        entering = [task for task in chosen if not task.is_running]
        if len(entering) == len(self.pending):
            self.pending.clear()
        elif len(entering) > 2:
            self.pending = [task for task in self.pending if task not in chosen]
        else:
            for task in entering:
                self.pending.remove(task)
        for task in entering:
            self._enter(task)
        if len(chosen) < len(self.requests):
            self.selections += 1
            for task in chosen:
                task.since += 1

    def _enter(self, task: Task) -> None:
        if task.is_blocked:
            task.is_blocked = False
            del self.blocked[task]
        else:
            self.memory += task.memory
            self.pools.memory[task.request] += task.memory
        if task.is_prompt:
            self.pending_prompts.remove(task)
            self.prompts_in_batch.append(task)
            return
        task.is_running = True
        task.fin = self.rounds + task.left
        heappush(self.ends, (task.fin, task.request, task))
        self.batch[task] = None
