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
from typing import Literal

from engine.pages.pool import pages_for
from placement.latency.base import DecodeLine, LatencyModel, decode_run_s, steps_within
from placement.latency.scaled import scaled_latency
from placement.simulator.clock import VirtualClock
from placement.simulator.colocated.batch import Request, RunningBatch
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
    return ColocatedSimulation(cluster, workload).play()


class ColocatedSimulation:
    def __init__(self, cluster: ColocatedCluster, workload: Workload) -> None:
        self.cluster = cluster
        self.clock = VirtualClock()
        self.ledger = Ledger(workload)
        self.machines = [ColocatedMachine(cluster, self.clock, self.ledger) for _ in range(cluster.num_workers)]
        self._arrival_s: list[float] = workload.arrival_s.tolist()
        self._prompt_len: list[int] = workload.prompt_len.tolist()
        self._output_len: list[int] = workload.output_len.tolist()

    def play(self) -> Outcome:
        self.clock.at(self._arrival_s[0], self._arrive, 0)
        self.clock.run()
        return self.ledger.outcome()

    def _arrive(self, index: int) -> None:
        if index + 1 < len(self._arrival_s):
            self.clock.at(self._arrival_s[index + 1], self._arrive, index + 1)
        request = Request(index, self._prompt_len[index], self._output_len[index])
        if pages_for(request.size, self.cluster.page_size) > self.cluster.num_pages:
            self.ledger.counters["rejected"] += 1
            return
        machine = min(self.machines, key=_load)
        machine.load += request.size
        self.clock.at(self.clock.now + self.cluster.message_s, machine.submit, request)


class ColocatedMachine:
    def __init__(self, cluster: ColocatedCluster, clock: VirtualClock, ledger: Ledger) -> None:
        self.cluster = cluster
        self.clock = clock
        self.ledger = ledger
        self.load = 0  # tokens of the requests that are here or on their way
        self.batch = RunningBatch(cluster.num_pages, cluster.page_size)
        self.waiting: deque[Request] = deque()
        self.chunking: deque[Request] = deque()  # begun, with tokens of the prompt left
        self.next_order = 0
        self.is_busy = False
        # the step or run under way
        self.chunks: list[tuple[Request, int]] = []
        self.does_decode = False
        self.planned = 0
        self.begun_s = 0.0
        self.line = DecodeLine(1.0, 0.0)
        self.version = 0

    def submit(self, request: Request) -> None:
        self.ledger.enter(request.index, PREFILL_QUEUE, self.clock.now)
        self.waiting.append(request)
        if not self.is_busy:
            self._start()
        elif not self.chunks:
            self._cut_short()

    # what the next step does

    def _start(self) -> None:
        self.chunks = self._choose_chunks()
        is_prefill_alone = self.cluster.sharing == "prefill_first" and bool(self.chunks)
        self.does_decode = not is_prefill_alone and self._make_room()
        self.is_busy = bool(self.chunks) or self.does_decode
        if not self.is_busy:
            if self.waiting and not self.batch.requests and not self.chunking:  # a preempted one was alone
                self._start()
            return
        self.begun_s = self.clock.now
        for request, _ in self.chunks:
            if not request.computed:
                self.ledger.enter(request.index, PREFILL, self.clock.now)
        if self.chunks:
            self._plan_step()
        else:
            self._plan_run()

    def _plan_step(self) -> None:
        """One step with chunks of prompts."""
        latency, count = self.cluster.latency, len(self.batch.requests) if self.does_decode else 0
        chunks = [(length, request.computed) for request, length in self.chunks]
        step_s = latency.mixed_s(chunks, count, self.batch.context_tokens) if count else latency.prefill_s(chunks)
        self.line = DecodeLine(step_s * latency.stages + self.cluster.step_overhead_s, 0.0)
        self._plan(1)

    def _plan_run(self) -> None:
        """Decode steps, as many as pass before anything changes."""
        latency, batch, count = self.cluster.latency, self.batch, len(self.batch.requests)
        line = latency.decode_line(count, batch.context_tokens)
        self.line = DecodeLine(
            line.step_s * latency.stages + self.cluster.step_overhead_s, line.per_token_s * latency.stages
        )
        steps = batch.steps_ahead
        if line.until_tokens < batch.context_tokens + steps * count:
            steps = max(1, min(steps, 1 + int((line.until_tokens - batch.context_tokens) // count)))
        if self._may_begin():
            steps = 1
        self._plan(steps)

    def _plan(self, steps: int) -> None:
        self.planned = steps
        self.version += 1
        took_s = decode_run_s(self.line, len(self.batch.requests) if self.does_decode else 1, steps)
        self.clock.at(self.begun_s + took_s, self._on_end, self.version)

    def _cut_short(self) -> None:
        if self.planned > 1 and self._may_begin():
            elapsed_s = self.clock.now - self.begun_s
            steps = 1 + steps_within(self.line, len(self.batch.requests), elapsed_s, self.planned - 1)
            if steps < self.planned:
                self._plan(steps)

    def _may_begin(self) -> bool:
        """Whether a prompt would be computed in the next step."""
        return bool(self.chunking) or bool(self.waiting and self._has_room() and self._fits(self.waiting[0]))

    def _fits(self, request: Request) -> bool:
        is_alone = not self.batch.requests and not self.chunking
        kept = 0 if is_alone else int(self.cluster.watermark * self.cluster.num_pages)
        return self.batch.free_pages - pages_for(request.num_tokens, self.cluster.page_size) >= kept

    def _has_room(self) -> bool:
        return len(self.batch.requests) + len(self.chunking) < self.cluster.max_batch_size

    def _choose_chunks(self) -> list[tuple[Request, int]]:
        """What of which prompts is computed next, within the tokens that a step may take."""
        chunked = self.cluster.sharing == "chunked"
        left = self.cluster.max_batch_tokens - (len(self.batch.requests) if chunked else 0)
        chunks: list[tuple[Request, int]] = []
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
            self.batch.take_prompt_pages(request)
            request.order = self.next_order
            self.next_order += 1
            length = min(left, request.num_tokens) if chunked else request.num_tokens
            self.chunking.append(request)
            chunks.append((request, length))
            left -= length
        return chunks

    def _make_room(self) -> bool:
        """Whether anybody is left to decode, when everybody has pages for a token more."""
        for request in self.batch.make_room():
            self.ledger.counters["preempted"] += 1
            self.ledger.counters["recomputed_tokens"] += request.num_tokens - 1
            self.ledger.enter(request.index, PREFILL_QUEUE, self.clock.now)
            self.waiting.appendleft(request)
        return bool(self.batch.requests)

    # the end of a step or run

    def _on_end(self, version: int) -> None:
        if version != self.version:
            return
        self.ledger.busy_s["colocated"] += self.clock.now - self.begun_s
        if self.does_decode:
            for request in self.batch.advance(self.planned):
                self._finish(request)
        for request, length in self.chunks:
            request.computed += length
            if request.computed == request.num_tokens:
                self.chunking.remove(request)
                self._on_first_token(request)
        self.chunks = []
        self.is_busy = False
        self._start()

    def _on_first_token(self, request: Request) -> None:
        """The prompt is computed, and its first token drawn; after a preemption it is one more token."""
        self.ledger.on_first_token(request.index, self.clock.now + self.cluster.message_s)
        request.left -= 1
        if not request.left:
            self.batch.release(request)
            self._finish(request)
            return
        self.ledger.enter(request.index, DECODE, self.clock.now)
        self.batch.join(request)

    def _finish(self, request: Request) -> None:
        self.load -= request.size
        self.ledger.on_finished(request.index, self.clock.now + self.cluster.message_s)


def _load(machine: ColocatedMachine) -> int:
    return machine.load
