"""The rules of Splitwise's own simulator, as a named variant on the planner's clock: machines, pools and batches.

Kept to reproduce its results. Designs: `baseline` machines do both phases, each request goes to the machine with the
fewest pending tokens; otherwise prompt and token machines, and a mixed pool of those that lend themselves to the other
phase:

    a prompt goes to the prompt machine with the fewest pending tokens, unless that has a queue and would pass 8,192;
      then to the best mixed machine by the same rule; then a token machine becomes mixed for it
    its tokens go to the token machine with the least memory promised, unless it would be full; then to the best mixed
      machine; then a prompt machine becomes mixed for it
    a mixed machine that has run empty goes back to its pool

A machine's next batch holds at most 512 requests and 2,048 tokens (a longer prompt alone), in this order: those passed
over four times, prompts, preempted decodes, the decodes of the last batch, waiting decodes. A decode that finds no room
is preempted: its memory stays, its turn is lost. Memory is reserved for the true output length. KV leaves after the
prompt, over a link of its own; when the receiver has no room, it is asked again every second.

A request's TTFT is the end of its prompt, its TBT is (E2E - TTFT) / output tokens. Decode steps between events are
passed over at once, as Splitwise's simulator does too.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from operator import attrgetter
from typing import Protocol

import numpy as np

from placement.latency.base import DecodeLine
from placement.simulator.clock import VirtualClock
from placement.simulator.outcome import Outcome
from placement.workload.requests import Workload

MAX_BATCH = 512
MAX_BATCH_TOKENS = 2048
MAX_PREEMPTIONS = 4
MAX_PENDING_TOKENS = 8192
RETRY_S = 1.0


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitwiseCluster:
    """`num_token` 0: a baseline of `num_prompt` machines that do both."""

    prompt: SplitwiseTimes
    num_prompt: int
    token: SplitwiseTimes
    num_token: int

    def __post_init__(self) -> None:
        for key, least in (("num_prompt", 1), ("num_token", 0)):
            if getattr(self, key) < least:
                raise ValueError(f"{key} is {getattr(self, key)}; give {least} or more")
        if self.prompt.kv_bytes_per_token != self.token.kv_bytes_per_token:
            raise ValueError(
                f"a token's KV has {self.prompt.kv_bytes_per_token} bytes on prompt machines and "
                f"{self.token.kv_bytes_per_token} on token machines; give machines that serve one model"
            )

    def play(self, workload: Workload) -> Outcome:
        return simulate(self, workload)

    def scaled(self, factor: float) -> SplitwiseCluster:
        """Its table has no known error."""
        return self

    @property
    def workers_by_pool(self) -> Mapping[str, int]:
        if not self.num_token:
            return {"colocated": self.num_prompt}
        return {"prefill": self.num_prompt, "decode": self.num_token}

    @property
    def kv_tokens_by_pool(self) -> Mapping[str, int]:
        return {}


def simulate(cluster: SplitwiseCluster, workload: Workload) -> Outcome:
    """Same arguments, same outcome. A request may never end: its machine's memory is full of prompts, none of which has
    room for its tokens, or machines wait for each other's memory. It has nan, and is counted as unserved."""
    run = _Run(cluster, workload)
    run.play()
    unserved = sum(1 for finish_s in run.finish if finish_s != finish_s)
    return Outcome(
        workload=workload,
        first_token_s=np.array(run.first_token),
        finish_s=np.array(run.finish),
        counters={"preemptions": run.preemptions, "lent": run.lent, "unserved": unserved},
        busy_s=run.busy_s(),
        tokens_per_tpot=0,
    )


class _Task:
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


class _Machine:
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
        "promised_memory",
        "promised_tokens",
        "prompts_in_batch",
        "requests",
        "rounds",
        "run",
        "selections",
        "tasks",
        "version",
    )

    def __init__(self, run: _Run, latency: SplitwiseTimes, pool: list[_Machine]) -> None:
        self.run = run
        self.latency = latency
        self.pool = pool  # where it belongs
        self.is_lent = False
        self.memory = 0
        self.capacity = latency.kv_capacity_bytes
        self.promised_memory = 0
        self.promised_tokens = 0
        self.pending: list[_Task] = []  # by (times passed over, arrival) when they came
        self.pending_prompts: deque[_Task] = deque()
        self.blocked: dict[_Task, None] = {}
        self.requests: list[int] = []  # all that have a task here, by arrival
        self.tasks: dict[int, list[_Task]] = {}
        self.batch: dict[_Task, None] = {}  # decodes
        self.prompts_in_batch: list[_Task] = []
        self.batch_tokens = 0
        self.ends: list[tuple[int, int, _Task]] = []
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

    def arrive(self, task: _Task) -> None:
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

    def _queue(self, task: _Task) -> None:
        self.pending.insert(self._place_of(task), task)
        if task.is_prompt:
            self.pending_prompts.append(task)

    def _place_of(self, task: _Task) -> int:
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

    def _passed_over(self, task: _Task) -> int:
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
        now = self.run.clock.now
        elapsed = now - (self.end_s - self.duration * self.iterations)
        self.iterations = int(elapsed // self.duration) + 1
        self._schedule(now + (self.duration * self.iterations - elapsed))

    def _schedule(self, end_s: float) -> None:
        self.end_s = end_s
        self.version += 1
        self.run.clock.at(end_s, self._on_end, self.version)

    def start(self) -> None:
        """Select the next batch and run it, decodes until the next of them ends."""
        self._select()
        if not self.num_batch:
            if not self.requests:
                self.run.on_empty(self)
            return
        count = len(self.batch)
        if self.prompts_in_batch:
            tokens = sum(task.size for task in self.prompts_in_batch)
            self.duration = self.latency.mixed_s([(tokens, 0)], count, count)
            self.iterations = 1
        else:
            self.duration = self.latency.decode_line(count, count).step_s
            self.iterations = self._next_end() - self.rounds
        self._schedule(self.run.clock.now + self.duration * self.iterations)

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
            self.run.on_prompt_done(task, self)
        self.start()

    def _end_decode(self, task: _Task) -> None:
        task.is_running = False
        del self.batch[task]
        self._forget(task)
        self.promised_tokens -= 1
        self.release(task.request)
        self.run.finish[task.request] = self.run.clock.now

    def release(self, request: int) -> None:
        """All memory of the request that it has here."""
        self.memory -= self.run.memory[request]
        self.promised_memory -= self.run.memory[request]

    def _forget(self, task: _Task) -> None:
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
        chosen: dict[_Task, None] = {}
        taken: set[int] = set()
        tokens = 0
        memory = self.memory

        def fits(task: _Task) -> bool:
            return len(chosen) < MAX_BATCH and (not chosen or tokens + task.size <= MAX_BATCH_TOKENS)

        for task in self.pending:
            if self._passed_over(task) < MAX_PREEMPTIONS or not fits(task):
                break
            if task.request in taken or not (task.is_blocked or task.memory + memory <= self.capacity):
                continue
            chosen[task] = None
            taken.add(task.request)
            tokens += task.size
            memory += 0 if task.is_blocked else task.memory
        for task in self.pending_prompts:
            if not fits(task):
                break
            if task.request in taken:
                continue
            if task.memory + memory > self.capacity:
                break
            chosen[task] = None
            taken.add(task.request)
            tokens += task.size
            memory += task.memory
        for group in (self.blocked, self.batch):
            room = min(MAX_BATCH - len(chosen), MAX_BATCH_TOKENS - tokens if chosen else MAX_BATCH_TOKENS)
            for task in group:
                if room <= 0:
                    break
                if task.request not in taken:
                    chosen[task] = None
                    taken.add(task.request)
                    tokens += 1
                    room -= 1
        if len(chosen) < len(self.requests):
            for request in self.requests:
                if len(chosen) == MAX_BATCH:
                    break
                if request in taken:
                    continue
                task = self.tasks[request][0]
                if not fits(task) or not (task.is_blocked or task.memory + memory <= self.capacity):
                    break
                chosen[task] = None
                taken.add(request)
                tokens += task.size
                memory += 0 if task.is_blocked else task.memory
        self.batch_tokens = tokens
        self._change_batch(chosen)

    def _change_batch(self, chosen: dict[_Task, None]) -> None:
        for task in [task for task in self.batch if task not in chosen]:
            del self.batch[task]
            task.is_running = False
            task.is_blocked = True
            task.left = task.fin - self.rounds
            self.run.preemptions += 1
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

    def _enter(self, task: _Task) -> None:
        if task.is_blocked:
            task.is_blocked = False
            del self.blocked[task]
        else:
            self.memory += task.memory
            self.run.memory[task.request] += task.memory
        if task.is_prompt:
            self.pending_prompts.remove(task)
            self.prompts_in_batch.append(task)
            return
        task.is_running = True
        task.fin = self.rounds + task.left
        heappush(self.ends, (task.fin, task.request, task))
        self.batch[task] = None


class _Run:
    def __init__(self, cluster: SplitwiseCluster, workload: Workload) -> None:
        count = len(workload)
        self.clock = VirtualClock()
        self.arrival: list[float] = workload.arrival_s.tolist()
        self.prompt_len: list[int] = workload.prompt_len.tolist()
        self.output_len: list[int] = workload.output_len.tolist()
        self.first_token = [float("nan")] * count
        self.finish = [float("nan")] * count
        self.memory = [0] * count  # bytes the request holds, wherever it is
        self.decodes_at: list[_Machine | None] = [None] * count  # None: where its prompt was
        self.preemptions = 0
        self.lent = 0
        self.is_over = False  # all have arrived
        self.sending = 0
        self.idle_since_s = -1.0  # when only requests that wait for room were left; below 0: they are not
        self.kv_bytes = cluster.prompt.kv_bytes_per_token
        self.link_bytes_per_s = cluster.prompt.link_bytes_per_s
        self.is_baseline = not cluster.num_token
        self.prompts: list[_Machine] = []
        self.tokens: list[_Machine] = []
        self.mixed: list[_Machine] = []
        self.prompts += [_Machine(self, cluster.prompt, self.prompts) for _ in range(cluster.num_prompt)]
        self.tokens += [_Machine(self, cluster.token, self.tokens) for _ in range(cluster.num_token)]
        self.machines = [*self.prompts, *self.tokens]

    def play(self) -> None:
        self.clock.at(self.arrival[0], self._arrive, 0)
        self.clock.run()

    def _arrive(self, request: int) -> None:
        if request + 1 < len(self.arrival):
            self.clock.at(self.arrival[request + 1], self._arrive, request + 1)
        else:
            self.is_over = True
        prompt_len = self.prompt_len[request]
        if self.is_baseline:
            source = target = min(self.prompts, key=_tokens_promised)
        else:
            source, target = self._place(request)
        source.promised_tokens += prompt_len
        target.promised_tokens += 1
        prompt = _Task(request, is_prompt=True, size=prompt_len, left=0, memory=(prompt_len + 1) * self.kv_bytes)
        if source is target:
            source.arrive(prompt)
            source.arrive(self._token_task(request))
        else:
            self.decodes_at[request] = target
            source.arrive(prompt)

    def _token_task(self, request: int) -> _Task:
        left = self.output_len[request] - 1
        return _Task(request, is_prompt=False, size=1, left=left, memory=left * self.kv_bytes)

    def _place(self, request: int) -> tuple[_Machine, _Machine]:
        """Where its prompt and its tokens go; a machine may be lent to the other phase for it."""
        prompt_len = self.prompt_len[request]
        prompt_bytes = (prompt_len + 1) * self.kv_bytes
        all_bytes = prompt_bytes + (self.output_len[request] - 1) * self.kv_bytes
        source = _with_short_queue(self.prompts, prompt_len) or _with_short_queue(self.mixed, prompt_len)
        target = _with_memory(self.tokens, all_bytes) or _with_memory(self.mixed, all_bytes)
        if source is None and self.tokens:
            source = self._lend(min(self.tokens, key=_tokens_promised))
        if target is None and self.prompts:
            target = self._lend(min(self.prompts, key=_memory_promised))
        if source is None or target is None:
            source = target = min([*self.prompts, *self.mixed, *self.tokens], key=_tokens_promised)
        if source is target:
            source.promised_memory += all_bytes
        else:
            source.promised_memory += prompt_bytes
            target.promised_memory += all_bytes
        return source, target

    def _lend(self, machine: _Machine) -> _Machine:
        machine.pool.remove(machine)
        self.mixed.append(machine)
        machine.is_lent = True
        self.lent += 1
        return machine

    def on_empty(self, machine: _Machine) -> None:
        if machine.is_lent:
            machine.is_lent = False
            self.mixed.remove(machine)
            machine.pool.append(machine)

    def on_prompt_done(self, task: _Task, machine: _Machine) -> None:
        machine.promised_tokens -= task.size
        self.first_token[task.request] = self.clock.now
        if self.decodes_at[task.request] is not None:
            self._send(task.request, machine)

    def _send(self, request: int, source: _Machine) -> None:
        """Its KV leaves, as soon as the receiver has room for it."""
        target = self.decodes_at[request]
        assert target is not None
        if target.memory + self.memory[request] > target.capacity:
            if not self._is_stuck():
                self.clock.at(self.clock.now + RETRY_S, lambda source: self._send(request, source), source)
            return
        self.idle_since_s = -1.0
        self.sending += 1
        target.memory += self.memory[request]
        took = self.prompt_len[request] * self.kv_bytes / self.link_bytes_per_s
        self.clock.at(self.clock.now + took, lambda source: self._on_sent(request, source, target), source)

    def _is_stuck(self) -> bool:
        """Nobody comes, computes or sends any more, and everyone who waits to send has asked in vain: machines that
        wait for each other's memory, or a request that is too large for its receiver. Splitwise's ask on."""
        is_idle = self.is_over and not self.sending and not any(machine.num_batch for machine in self.machines)
        if not is_idle:
            self.idle_since_s = -1.0
        elif self.idle_since_s < 0:
            self.idle_since_s = self.clock.now
        return is_idle and self.clock.now - self.idle_since_s > 1.5 * RETRY_S

    def busy_s(self) -> dict[str, float]:
        """Seconds that machines computed, by the pool that they belong to; those lent count where they belong."""
        if self.is_baseline:
            return {"colocated": sum(machine.busy_s for machine in self.machines)}
        of_prompts = sum(machine.busy_s for machine in self.machines if machine.pool is self.prompts)
        return {"prefill": of_prompts, "decode": sum(machine.busy_s for machine in self.machines) - of_prompts}

    def _on_sent(self, request: int, source: _Machine, target: _Machine) -> None:
        self.sending -= 1
        source.release(request)
        target.arrive(self._token_task(request))
        source.on_sent()


_tokens_promised = attrgetter("promised_tokens")
_memory_promised = attrgetter("promised_memory")


def _with_short_queue(machines: list[_Machine], prompt_len: int) -> _Machine | None:
    if not machines:
        return None
    best = min(machines, key=_tokens_promised)
    is_long = best.pending and best.promised_tokens + prompt_len > MAX_PENDING_TOKENS
    return None if is_long else best


def _with_memory(machines: list[_Machine], wanted: int) -> _Machine | None:
    if not machines:
        return None
    best = min(machines, key=_memory_promised)
    return None if best.promised_memory + wanted >= best.capacity else best
