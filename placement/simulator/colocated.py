"""Colocated workers, the comparison that may win: each does prefill and decode of the requests it is given.

Two ways to share a step, both after vLLM:

    prefill_first   whenever prompts wait and fit, a step is prefill alone, else every running request decodes
    chunked         a step decodes for every running request, and fills what is left of max_batch_tokens with chunks of
                    prompts, first come first served

A request gets pages for its prompt when its first chunk is scheduled, and more as it grows; when they run out the
youngest is preempted and begins again, its tokens so far behind its prompt. Requests go to the worker with the fewest
tokens still to compute and make, known exactly and at once: the comparison is given the better router. Decode steps
between events are passed over at once. No live policy is in this: the cluster does not serve this way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Literal

from engine.pages.pool import pages_for
from placement.latency.base import DecodeLine, LatencyModel, decode_run_s, steps_within
from placement.latency.scaled import scaled_latency
from placement.simulator.clock import VirtualClock
from placement.simulator.ledger import DECODE, PREFILL, PREFILL_QUEUE, Ledger
from placement.simulator.outcome import Outcome
from placement.workload.requests import Workload

Sharing = Literal["prefill_first", "chunked"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ColocatedCluster:
    latency: LatencyModel
    num_workers: int
    num_pages: int
    page_size: int = 16
    sharing: Sharing = "chunked"
    max_batch_tokens: int = 2048
    max_batch_size: int = 256
    watermark: float = 0.01  # share of the pages that a new prompt leaves free
    step_overhead_s: float = 0.0
    message_s: float = 0.0005

    def play(self, workload: Workload) -> Outcome:
        return simulate_colocated(self, workload)

    def scaled(self, factor: float) -> ColocatedCluster:
        return replace(self, latency=scaled_latency(self.latency, factor))

    @property
    def workers_by_pool(self) -> Mapping[str, int]:
        return {"colocated": self.num_workers}

    @property
    def kv_tokens_by_pool(self) -> Mapping[str, int]:
        return {"colocated": self.num_workers * self.num_pages * self.page_size}


def simulate_colocated(cluster: ColocatedCluster, workload: Workload) -> Outcome:
    """Every request of the workload; one that no worker could hold alone is rejected. Same arguments, same outcome."""
    return _Run(cluster, workload).play()


class _Request:
    __slots__ = ("computed", "end_step", "index", "joined_step", "left", "num_tokens", "order", "pages")

    def __init__(self, index: int, num_tokens: int, left: int) -> None:
        self.index = index
        self.num_tokens = num_tokens  # to prefill: the prompt, and what it made before it was preempted
        self.left = left  # tokens still to make
        self.computed = 0
        self.order = 0
        self.pages = 0  # held, but for those that growth has added in the run under way
        self.joined_step = 0
        self.end_step = -1  # of the machine, while it decodes


class _Run:
    def __init__(self, cluster: ColocatedCluster, workload: Workload) -> None:
        self.cluster = cluster
        self.clock = VirtualClock()
        self.ledger = Ledger(workload)
        self.arrival: list[float] = workload.arrival_s.tolist()
        self.prompt_len: list[int] = workload.prompt_len.tolist()
        self.output_len: list[int] = workload.output_len.tolist()
        self.machines = [_Machine(self, cluster) for _ in range(cluster.num_workers)]

    def play(self) -> Outcome:
        self.clock.at(self.arrival[0], self._arrive, 0)
        self.clock.run()
        return self.ledger.outcome()

    def _arrive(self, index: int) -> None:
        if index + 1 < len(self.arrival):
            self.clock.at(self.arrival[index + 1], self._arrive, index + 1)
        prompt_len, output_len = self.prompt_len[index], self.output_len[index]
        if pages_for(prompt_len + output_len, self.cluster.page_size) > self.cluster.num_pages:
            self.ledger.counters["rejected"] += 1
            return
        machine = min(self.machines, key=_load)
        machine.load += prompt_len + output_len
        request = _Request(index, prompt_len, output_len)
        self.clock.at(self.clock.now + self.cluster.message_s, machine.submit, request)


class _Machine:
    def __init__(self, run: _Run, cluster: ColocatedCluster) -> None:
        self.run = run
        self.cluster = cluster
        self.load = 0
        self.free = cluster.num_pages
        self.waiting: deque[_Request] = deque()
        self.chunking: deque[_Request] = deque()  # begun, with tokens of the prompt left
        self.decoding: dict[_Request, None] = {}
        self.ends: list[tuple[int, int, int, _Request]] = []
        self.context = 0  # tokens of all decoding requests, those of the next step counted
        self.steps = 0
        self.next_order = 0
        self.is_busy = False
        # the step or run under way
        self.chunks: list[tuple[_Request, int]] = []
        self.does_decode = False
        self.planned = 0
        self.begun_s = 0.0
        self.line = DecodeLine(1.0, 0.0)
        self.version = 0

    def submit(self, request: _Request) -> None:
        self.run.ledger.enter(request.index, PREFILL_QUEUE, self.run.clock.now)
        self.waiting.append(request)
        if not self.is_busy:
            self._start()
        elif not self.chunks:
            self._cut_short()

    # what the next step does

    def _start(self) -> None:
        self.chunks = self._choose_chunks()
        if self.cluster.sharing == "prefill_first" and self.chunks:
            self.does_decode = False
        else:
            self.does_decode = self._make_room()
        self.is_busy = bool(self.chunks) or self.does_decode
        if not self.is_busy:
            if self.waiting and not self.decoding and not self.chunking:  # a preempted one was alone
                self._start()
            return
        now = self.run.clock.now
        self.begun_s = now
        count = len(self.decoding) if self.does_decode else 0
        for request, _ in self.chunks:
            if not request.computed:
                self.run.ledger.enter(request.index, PREFILL, now)
        if self.chunks:
            plan = [(length, request.computed) for request, length in self.chunks]
            latency = self.cluster.latency
            step_s = latency.mixed_s(plan, count, self.context) if count else latency.prefill_s(plan)
            self.line = DecodeLine(step_s * latency.stages + self.cluster.step_overhead_s, 0.0)
            self._plan(1)
        else:
            self._plan_run(count)

    def _plan_run(self, count: int) -> None:
        line, latency = self.cluster.latency.decode_line(count, self.context), self.cluster.latency
        self.line = DecodeLine(
            line.step_s * latency.stages + self.cluster.step_overhead_s, line.per_token_s * latency.stages
        )
        spare = self.free - count
        steps = min(self._next_end() - self.steps, 1 + (spare * self.cluster.page_size // count if spare > 0 else 0))
        if line.until_tokens < self.context + steps * count:
            steps = max(1, min(steps, 1 + int((line.until_tokens - self.context) // count)))
        if self._may_begin():
            steps = 1
        self._plan(steps)

    def _plan(self, steps: int) -> None:
        self.planned = steps
        self.version += 1
        took_s = decode_run_s(self.line, len(self.decoding) if self.does_decode else 1, steps)
        self.run.clock.at(self.begun_s + took_s, self._on_end, self.version)

    def _cut_short(self) -> None:
        if self.planned > 1 and self._may_begin():
            elapsed_s = self.run.clock.now - self.begun_s
            steps = 1 + steps_within(self.line, len(self.decoding), elapsed_s, self.planned - 1)
            if steps < self.planned:
                self._plan(steps)

    def _may_begin(self) -> bool:
        """Whether a prompt would be computed in the next step."""
        return bool(self.chunking) or bool(self.waiting and self._has_room() and self._fits(self.waiting[0]))

    def _fits(self, request: _Request) -> bool:
        kept = int(self.cluster.watermark * self.cluster.num_pages) if self.decoding or self.chunking else 0
        return self.free - pages_for(request.num_tokens, self.cluster.page_size) >= kept

    def _has_room(self) -> bool:
        return len(self.decoding) + len(self.chunking) < self.cluster.max_batch_size

    def _choose_chunks(self) -> list[tuple[_Request, int]]:
        """What of which prompts is computed next, within the tokens that a step may take."""
        chunked = self.cluster.sharing == "chunked"
        left = self.cluster.max_batch_tokens - (len(self.decoding) if chunked else 0)
        chunks: list[tuple[_Request, int]] = []
        for request in self.chunking:
            if left > 0:
                length = min(left, request.num_tokens - request.computed)
                chunks.append((request, length))
                left -= length
        while self.waiting and left > 0 and self._has_room():
            request = self.waiting[0]
            is_too_long = not chunked and chunks and request.num_tokens > left
            if is_too_long or not self._fits(request):
                break
            self.waiting.popleft()
            request.pages = pages_for(request.num_tokens, self.cluster.page_size)
            self.free -= request.pages
            request.order = self.next_order
            self.next_order += 1
            length = min(left, request.num_tokens) if chunked else request.num_tokens
            self.chunking.append(request)
            chunks.append((request, length))
            left -= length
        return chunks

    # pages of those that decode

    def _make_room(self) -> bool:
        """Pages for the next token of everyone who decodes; preempts the youngest while they are short."""
        while self.decoding:
            growing = sum(self._grows(request) for request in self.decoding)
            if growing <= self.free:
                for request in self.decoding:
                    if self._grows(request):
                        request.pages += 1
                self.free -= growing
                return True
            self._preempt(max(self.decoding, key=lambda request: request.order))
        return False

    def _length(self, request: _Request) -> int:
        """Tokens whose KV stands in its pages."""
        return request.num_tokens + self.steps - request.joined_step

    def _grows(self, request: _Request) -> bool:
        return self._length(request) >= request.pages * self.cluster.page_size

    def _preempt(self, request: _Request) -> None:
        length = self._length(request)
        del self.decoding[request]
        self.context -= length + 1
        self.free += request.pages
        request.left -= self.steps - request.joined_step
        request.num_tokens = length + 1  # the token that it had not computed yet is known too
        request.computed = request.pages = 0
        request.end_step = -1
        ledger = self.run.ledger
        ledger.counters["preempted"] += 1
        ledger.counters["recomputed_tokens"] += length
        ledger.enter(request.index, PREFILL_QUEUE, self.run.clock.now)
        self.waiting.appendleft(request)

    # the end of a step or run

    def _next_end(self) -> int:
        while self.ends[0][3].end_step != self.ends[0][0]:
            heappop(self.ends)
        return self.ends[0][0]

    def _on_end(self, version: int) -> None:
        if version != self.version:
            return
        self.run.ledger.busy_s["colocated"] += self.run.clock.now - self.begun_s
        if self.does_decode:
            self._end_decode(self.planned)
        for request, length in self.chunks:
            request.computed += length
            if request.computed == request.num_tokens:
                self.chunking.remove(request)
                self._on_first_token(request)
        self.chunks = []
        self.is_busy = False
        self._start()

    def _end_decode(self, steps: int) -> None:
        count = len(self.decoding)
        if steps > 1:  # the first step's pages were taken by _make_room
            self.steps += steps - 1
            for request in self.decoding:
                more = pages_for(self._length(request) + 1, self.cluster.page_size) - request.pages
                request.pages += more
                self.free -= more
            self.steps -= steps - 1
        self.steps += steps
        self.context += count * steps
        while self.ends and self.ends[0][0] <= self.steps:
            end_step, _, _, request = heappop(self.ends)
            if request.end_step == end_step and request in self.decoding:
                del self.decoding[request]
                self.context -= self._length(request) + 1
                self.free += request.pages
                self._finish(request)

    def _on_first_token(self, request: _Request) -> None:
        """The prompt is computed, and its first token drawn; after a preemption it is one more token."""
        run = self.run
        run.ledger.on_first_token(request.index, run.clock.now + self.cluster.message_s)
        request.left -= 1
        if not request.left:
            self.free += request.pages
            self._finish(request)
            return
        run.ledger.enter(request.index, DECODE, run.clock.now)
        request.joined_step = self.steps
        request.end_step = self.steps + request.left
        self.decoding[request] = None
        self.context += request.num_tokens + 1
        heappush(self.ends, (request.end_step, request.index, request.order, request))

    def _finish(self, request: _Request) -> None:
        self.load -= self.run.prompt_len[request.index] + self.run.output_len[request.index]
        self.run.ledger.on_finished(request.index, self.run.clock.now + self.cluster.message_s)


def _load(machine: _Machine) -> int:
    return machine.load
