"""One engine that does prefill and decode of all requests: what disaggregated serving is compared with on one GPU.

This is the simplest true one, and no cluster as mixed workers are: kvrelay's own engine, kernels and page pool, and
the rule that vLLM and Sarathi use (chunked prefill): every step decodes for all running requests and fills what is left
of `max_batch_tokens` with chunks of prompts, first come first served. A request begins when pages for its prompt and
all its output are free, so nothing is ever preempted. It runs in one process, with no router and no network: what it
is compared with pays for both.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.pages.pool import PagePool, pages_for
from engine.types import Chunk, SampleSpec, SamplingParams, Step
from kvrelay.bench.metrics import Outcome

IDLE_S = 0.0005


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    at_s: float
    prompt: Sequence[int]
    new_tokens: int


@dataclass(slots=True, kw_only=True)
class _Running:
    arrival: Arrival
    outcome: Outcome
    pages: list[int]
    computed: int = 0
    tokens: list[int] = field(default_factory=list)

    @property
    def is_prefilled(self) -> bool:
        return self.computed >= len(self.arrival.prompt)


class Colocated:
    def __init__(self, engine: Any, *, max_batch_tokens: int, max_batch_size: int) -> None:
        self._engine = engine
        self._pool = PagePool(engine.layout.num_pages, engine.layout.page_size)
        self._max_batch_tokens = max_batch_tokens
        self._max_batch_size = max_batch_size
        self._waiting: deque[tuple[Arrival, Outcome]] = deque()
        self._running: list[_Running] = []
        self._start_s = 0.0

    def play(self, arrivals: Sequence[Arrival]) -> tuple[list[Outcome], float]:
        """What became of each, and seconds from start to last end. `arrivals` in order of time."""
        outcomes = [Outcome(index=i, due_s=a.at_s, input_len=len(a.prompt)) for i, a in enumerate(arrivals)]
        due = deque(zip(arrivals, outcomes, strict=True))
        self._start_s = time.perf_counter()
        while due or self._waiting or self._running:
            while due and due[0][0].at_s <= self._now():
                self._waiting.append(due.popleft())
            self._admit()
            chunks = self._next_chunks()
            if chunks:
                self._step(chunks)
            else:
                time.sleep(IDLE_S)
        return outcomes, max(outcome.ended_s for outcome in outcomes)

    def _now(self) -> float:
        return time.perf_counter() - self._start_s

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_batch_size:
            arrival, outcome = self._waiting[0]
            count = pages_for(len(arrival.prompt) + arrival.new_tokens, self._pool.page_size)
            if count > self._pool.available:
                return
            self._waiting.popleft()
            self._running.append(_Running(arrival=arrival, outcome=outcome, pages=self._pool.allocate(count)))

    def _next_chunks(self) -> list[Chunk]:
        decoding = [one for one in self._running if one.is_prefilled]
        chunks = [self._chunk(one, (one.tokens[-1],), one.computed) for one in decoding]
        left = self._max_batch_tokens - len(chunks)
        for one in self._running:
            if left <= 0:
                break
            if not one.is_prefilled:
                length = min(left, len(one.arrival.prompt) - one.computed)
                chunks.append(
                    self._chunk(one, tuple(one.arrival.prompt[one.computed : one.computed + length]), one.computed)
                )
                left -= length
        return chunks

    def _chunk(self, one: _Running, ids: tuple[int, ...], start: int) -> Chunk:
        end = start + len(ids)
        is_sampled = end >= len(one.arrival.prompt)
        params = SamplingParams(temperature=0.0, max_tokens=one.arrival.new_tokens)
        return Chunk(
            request_id=str(one.outcome.index),
            token_ids=ids,
            start=start,
            block_table=one.pages[: pages_for(end, self._pool.page_size)],
            sample=SampleSpec(params=params, position=end) if is_sampled else None,
        )

    def _step(self, chunks: Sequence[Chunk]) -> None:
        sampled = {token.request_id: token for token in self._engine.step(Step(chunks=chunks))}
        now = self._now()
        by_id = {str(one.outcome.index): one for one in self._running}
        for chunk in chunks:
            one = by_id[chunk.request_id]
            one.computed = chunk.start + len(chunk.token_ids)
            token = sampled.get(chunk.request_id)
            if token is None:
                continue
            one.tokens.append(token.token_id)
            one.outcome.token_times_s.append(now)
            one.outcome.output_len += 1
            if token.error or len(one.tokens) == one.arrival.new_tokens:
                one.outcome.code, one.outcome.message = ("INTERNAL", token.error) if token.error else ("", "")
                one.outcome.ended_s = now
                self._pool.release(one.pages)
                self._running.remove(one)
