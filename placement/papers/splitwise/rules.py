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

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from placement.papers.splitwise.batch import Task
from placement.papers.splitwise.machine import Machine, Pools, SplitwiseTimes
from placement.simulator.outcome import Outcome
from placement.workload.requests import Workload

MAX_PENDING_TOKENS = 8192
RETRY_S = 1.0


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
    run = _Simulation(cluster, workload)
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


class _Simulation(Pools):
    """The pools, which machine a request goes to, and its KV on the way."""

    def __init__(self, cluster: SplitwiseCluster, workload: Workload) -> None:
        count = len(workload)
        super().__init__(count)
        self.arrival: list[float] = workload.arrival_s.tolist()
        self.prompt_len: list[int] = workload.prompt_len.tolist()
        self.output_len: list[int] = workload.output_len.tolist()
        self.first_token = [float("nan")] * count
        self.decodes_at: list[Machine | None] = [None] * count  # None: where its prompt was
        self.lent = 0
        self.is_over = False  # all have arrived
        self.sending = 0
        self.idle_since_s = -1.0  # when only requests that wait for room were left; below 0: they are not
        self.kv_bytes = cluster.prompt.kv_bytes_per_token
        self.link_bytes_per_s = cluster.prompt.link_bytes_per_s
        self.is_baseline = not cluster.num_token
        self.prompts: list[Machine] = []
        self.tokens: list[Machine] = []
        self.mixed: list[Machine] = []
        self.prompts += [Machine(self, cluster.prompt, self.prompts) for _ in range(cluster.num_prompt)]
        self.tokens += [Machine(self, cluster.token, self.tokens) for _ in range(cluster.num_token)]
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
        prompt = Task(request, is_prompt=True, size=prompt_len, left=0, memory=(prompt_len + 1) * self.kv_bytes)
        if source is target:
            source.arrive(prompt)
            source.arrive(self._token_task(request))
        else:
            self.decodes_at[request] = target
            source.arrive(prompt)

    def _token_task(self, request: int) -> Task:
        left = self.output_len[request] - 1
        return Task(request, is_prompt=False, size=1, left=left, memory=left * self.kv_bytes)

    def _place(self, request: int) -> tuple[Machine, Machine]:
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

    def _lend(self, machine: Machine) -> Machine:
        machine.pool.remove(machine)
        self.mixed.append(machine)
        machine.is_lent = True
        self.lent += 1
        return machine

    def on_empty(self, machine: Machine) -> None:
        if machine.is_lent:
            machine.is_lent = False
            self.mixed.remove(machine)
            machine.pool.append(machine)

    def on_prompt_done(self, task: Task, machine: Machine) -> None:
        machine.promised_tokens -= task.size
        self.first_token[task.request] = self.clock.now
        if self.decodes_at[task.request] is not None:
            self._send(task.request, machine)

    def _send(self, request: int, source: Machine) -> None:
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

    def _on_sent(self, request: int, source: Machine, target: Machine) -> None:
        self.sending -= 1
        source.release(request)
        target.arrive(self._token_task(request))
        source.on_sent()


_tokens_promised = attrgetter("promised_tokens")
_memory_promised = attrgetter("promised_memory")


def _with_short_queue(machines: list[Machine], prompt_len: int) -> Machine | None:
    if not machines:
        return None
    best = min(machines, key=_tokens_promised)
    is_long = best.pending and best.promised_tokens + prompt_len > MAX_PENDING_TOKENS
    return None if is_long else best


def _with_memory(machines: list[Machine], wanted: int) -> Machine | None:
    if not machines:
        return None
    best = min(machines, key=_memory_promised)
    return None if best.promised_memory + wanted >= best.capacity else best
