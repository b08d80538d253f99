"""The batching rules of DistServe's own simulator, as a named variant on the planner's clock: "distserve" and "vllm".

They are kept to reproduce its results, not to serve by: KV passes from prefill to decode in no time, decode has no
memory limit and nobody is preempted. The rules:

    prefill   the whole queue, first come first served, while its tokens fit max_batch_tokens; a batch stays together
              through the pipeline stages
    decode    all that is queued, first come first served, while sum(context + 1) <= 50,000; survivors queue again
              behind those that came meanwhile; each stage takes all it finds, so that micro-batches may melt together
    overhead  2 ms + 0.1 us for each token of context, once an iteration, at the first stage
    vllm      one pipeline does both: prefill whenever a prompt waits, else a decode iteration

A request's TTFT is the end of its prefill, and its TPOT counts output_len decode iterations after that.

Requests that decode together are one Group, and on a single stage steps between events are passed over at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from placement.latency.base import DecodeLine, decode_run_s, steps_within
from placement.papers.distserve.groups import Group, Requests, cut, joined
from placement.papers.distserve.latency import DistServeLatency
from placement.simulator.clock import VirtualClock
from placement.simulator.outcome import Outcome
from placement.workload.requests import Workload
from placement.workload.traces import WorkloadError

DECODE_CAP_TOKENS = 50_000
OVERHEAD_S = 2e-3
OVERHEAD_S_PER_TOKEN = 1e-7


@dataclass(frozen=True, slots=True, kw_only=True)
class DistServeCluster:
    """`decode` None: the vllm variant, every one of the `num_prefill` pipelines does both phases."""

    prefill: DistServeLatency
    decode: DistServeLatency | None
    num_prefill: int = 1
    num_decode: int = 1

    def play(self, workload: Workload) -> Outcome:
        return simulate(self, workload)

    def scaled(self, factor: float) -> DistServeCluster:
        """Published coefficients have no known error."""
        return self

    @property
    def workers_by_pool(self) -> Mapping[str, int]:
        return {"prefill": self.num_prefill, "decode": self.num_decode}

    @property
    def kv_tokens_by_pool(self) -> Mapping[str, int]:
        return {}


def simulate(cluster: DistServeCluster, workload: Workload) -> Outcome:
    """Raises WorkloadError for a prompt that no prefill step could take."""
    longest = int(workload.prompt_len.max())
    if longest > cluster.prefill.max_batch_tokens:
        raise WorkloadError(
            f"{workload.name}: a prompt of {longest} tokens; {cluster.prefill.source} takes "
            f"{cluster.prefill.max_batch_tokens} in a step, so cut the prompts or give it more GPUs"
        )
    run = _Simulation(workload)
    if cluster.decode is None:
        heads = [run.pipeline(cluster.prefill, cluster.prefill) for _ in range(cluster.num_prefill)]
    else:
        decodes = [run.pipeline(cluster.decode, cluster.decode) for _ in range(cluster.num_decode)]
        heads = [run.pipeline(cluster.prefill, None) for _ in range(cluster.num_prefill)]
        run.decode_heads = decodes
    run.prefill_heads = heads
    run.play()
    return run.outcome()


class _Simulation(Requests):
    """One simulation: the requests, the clock and the first stages."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self.clock = VirtualClock()
        self.prefill_heads: list[_Stage] = []
        self.decode_heads: list[_Stage] = []

    def pipeline(self, latency: DistServeLatency, decode: DistServeLatency | None) -> _Stage:
        """The first stage of a new pipeline. `decode` None: it only does prefill."""
        stages = [_Stage(self, latency, is_head=i == 0) for i in range(latency.stages)]
        for stage, after in zip(stages, [*stages[1:], stages[0]], strict=True):
            stage.next = after
        stages[-1].is_last = True
        stages[-1].decodes_here = decode is not None
        return stages[0]

    def play(self) -> None:
        self.clock.at(self.arrival[0], self._arrive, 0)
        self.clock.run()

    def _arrive(self, request: int) -> None:
        head = min(self.prefill_heads, key=lambda stage: stage.prefill_load)
        head.prompts.append(request)
        head.prefill_load += 1
        head.wake()
        if request + 1 < len(self.arrival):
            self.clock.at(self.arrival[request + 1], self._arrive, request + 1)

    def enter_decode(self, request: int, here: _Stage) -> None:
        """Its prompt is done: it queues for decode, where its prefill was or where the fewest wait."""
        self.first_token[request] = self.clock.now
        if here.decodes_here:
            assert here.next is not None
            head = here.next
        else:
            head = min(self.decode_heads, key=lambda stage: stage.num_queued)
        head.add(request)
        head.wake()

    def outcome(self) -> Outcome:
        return Outcome(
            workload=self.workload,
            first_token_s=np.array(self.first_token),
            finish_s=np.array(self.finish),
            tokens_per_tpot=0,
        )


class _Stage:
    """One pipeline stage: free, in a prefill step, or in a run of decode steps."""

    __slots__ = (
        "begun",
        "decodes_here",
        "is_busy",
        "is_head",
        "is_last",
        "is_woken",
        "latency",
        "line",
        "next",
        "passed",
        "prefill_load",
        "prompts",
        "queued",
        "run",
        "running",
        "steps",
        "version",
    )

    def __init__(self, run: _Simulation, latency: DistServeLatency, *, is_head: bool) -> None:
        self.run = run
        self.latency = latency
        self.is_head = is_head
        self.is_last = False
        self.decodes_here = False
        self.next: _Stage | None = None
        self.prompts: deque[int] = deque()  # at the head: requests
        self.passed: deque[list[int]] = deque()  # behind it: batches of the stage before
        self.prefill_load = 0  # requests waiting for or in a prefill step here
        self.queued: deque[Group] = deque()  # for decode, the first to go first
        self.running = Group()
        self.is_busy = False
        self.is_woken = False
        self.begun = 0.0
        self.steps = 0  # of the run of decode steps under way; 0: none
        self.version = 0  # of its end
        self.line = DecodeLine(0.0, 0.0)

    @property
    def num_queued(self) -> int:
        return sum(group.count for group in self.queued)

    def wake(self) -> None:
        """Something was queued. Who is free begins when all that happens now has: a batch that was passed on together
        is taken together, as its simulator's processes do, which sleep until the one that woke them waits."""
        if self.steps > 1:
            self._cut_short()
        elif not (self.is_busy or self.is_woken):
            self.is_woken = True
            self.run.clock.at(self.run.clock.now, self._on_woken, 0)

    def _on_woken(self, _: int) -> None:
        self.is_woken = False
        if not self.is_busy:
            self._start()

    def add(self, request: int) -> None:
        """A newcomer, behind all that is queued."""
        run = self.run
        if not self.queued:
            self.queued.append(Group())
        group = self.queued[-1]
        run.base[request] = run.prompt[request] - group.rounds
        run.fin[request] = group.rounds + run.output[request]
        run.owner[request] = group
        group.order.append(request)
        heappush(group.ends, (run.fin[request], request))
        group.count += 1
        group.context += run.prompt[request]

    def _start(self) -> None:
        self.is_busy = True
        if self.prompts:
            self._prefill(self._take_prompts())
        elif self.passed:
            self._prefill(self.passed.popleft())
        elif self.queued:
            self._decode()
        else:
            self.is_busy = False

    # prefill

    def _take_prompts(self) -> list[int]:
        left, taken = self.latency.max_batch_tokens, []
        while self.prompts and self.run.prompt[self.prompts[0]] <= left:
            taken.append(self.prompts.popleft())
            left -= self.run.prompt[taken[-1]]
        return taken

    def _prefill(self, batch: list[int]) -> None:
        prompt = self.run.prompt
        took = self.latency.prefill_s([(prompt[i], 0) for i in batch])
        if self.is_head:
            took += OVERHEAD_S + OVERHEAD_S_PER_TOKEN * sum(prompt[i] for i in batch)
        self.running.order = deque(batch)
        self.run.clock.at(self.run.clock.now + took, self._on_prefilled, 0)

    def _on_prefilled(self, _: int) -> None:
        batch = list(self.running.order)
        self.running.order.clear()
        self.prefill_load -= len(batch)
        self.is_busy = False
        if self.is_last:
            for request in batch:
                self.run.enter_decode(request, self)
        else:
            assert self.next is not None
            self.next.passed.append(batch)
            self.next.prefill_load += len(batch)
            self.next.wake()
        self._start()

    # decode

    def _decode(self) -> None:
        """Begin a run of decode steps with all that is queued and fits."""
        group = self._take_queued()
        self.running = group
        tokens = group.load
        line = self.latency.decode_line(group.count, tokens)
        if self.is_head:
            overhead = OVERHEAD_S + OVERHEAD_S_PER_TOKEN * group.context
            line = DecodeLine(line.step_s + overhead, line.per_token_s + OVERHEAD_S_PER_TOKEN)
        self.line = line
        self.begun = self.run.clock.now
        self.steps = 1
        if self.is_head and self.is_last and not self.queued and not self.prompts:
            end = self.run.next_end(group)
            assert end is not None
            self.steps = min(end - group.rounds, 1 + (DECODE_CAP_TOKENS - tokens) // group.count)
        self._schedule_end()

    def _schedule_end(self) -> None:
        self.version += 1
        took = decode_run_s(self.line, self.running.count, self.steps)
        self.run.clock.at(self.begun + took, self._on_decoded, self.version)

    def _cut_short(self) -> None:
        """Somebody waits: the step under way is the run's last."""
        elapsed = self.run.clock.now - self.begun
        steps = 1 + steps_within(self.line, self.running.count, elapsed, self.steps - 1)
        if steps < self.steps:
            self.steps = steps
            self._schedule_end()

    def _on_decoded(self, version: int) -> None:
        if version != self.version:
            return
        assert self.next is not None
        group, steps, self.steps = self.running, self.steps, 0
        self.running = Group()
        if self.is_last:
            group.rounds += steps
            group.context += steps * group.count
            self._end_due(group)
        self.is_busy = False
        if group.count:
            after = self.next
            after.queued.append(group)
            if after is not self:
                after.wake()
        self._start()

    def _end_due(self, group: Group) -> None:
        run, now = self.run, self.run.clock.now
        while (end := run.next_end(group)) is not None and end <= group.rounds:
            _, request = heappop(group.ends)
            run.finish[request] = now
            run.is_done[request] = True
            run.owner[request] = None
            group.count -= 1
            group.context -= run.base[request] + group.rounds
        if len(group.order) > 2 * group.count + 16:
            group.order = deque(i for i in group.order if not run.is_done[i])

    def _take_queued(self) -> Group:
        """The longest run from the front that the cap lets in, as one group."""
        taken, left = Group(), DECODE_CAP_TOKENS
        while self.queued:
            group = self.queued[0]
            if group.load <= left:
                left -= group.load
                taken = joined(taken, self.queued.popleft(), self.run)
                continue
            front, self.queued[0] = cut(group, left, self.run)
            if front.count:
                taken = joined(taken, front, self.run)
            break
        if not taken.count:
            raise WorkloadError(f"a request has over {DECODE_CAP_TOKENS} tokens of context; DistServe decodes no more")
        return taken
