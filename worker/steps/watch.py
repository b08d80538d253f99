"""WatchedEngine is a worker's engine, of which can be seen from outside its thread since when it is at which step, and
what steps take.

It decides one thing: that a step has run too long. A thread that hangs cannot be ended, so what follows is the end of
the process, and that is for whoever keeps the worker (Worker.wait_broken).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeVar

from engine.errors import EngineBroken
from engine.pending import PendingStep
from engine.types import Chunk, SampledToken, Step
from worker.steps.times import StepTimes

T = TypeVar("T")
NAMED = 8  # requests of a step that hangs


class StepEngine(Protocol):
    def step(self, step: Step) -> list[SampledToken]: ...

    def begin(self, step: Step) -> PendingStep: ...

    def probe(self) -> SampledToken: ...

    @property
    def drafting_s(self) -> float: ...


class WatchedEngine:
    def __init__(self, engine: StepEngine, now_s: Callable[[], float], num_stages: int = 1) -> None:
        """`now_s`: a clock that stands still while the process does, or a process that slept would end itself.
        `num_stages`: of the engine, in which steps run beside each other."""
        self._engine = engine
        self._now_s = now_s
        self._running: tuple[Step, float] | None = None  # what the engine's thread is at, and since when
        self._begun: deque[tuple[PendingStep, float]] = deque(maxlen=max(2, num_stages))  # and when
        self._runs_beside = num_stages > 1
        self._ended_s = 0.0  # of the last step
        self._drafting_s = 0.0  # as the engine said after it
        self.times = StepTimes()

    def step(self, step: Step) -> list[SampledToken]:
        begun_s = self._now_s()
        tokens = self._watched(step, lambda: self._engine.step(step))
        self._note(step, begun_s)
        return tokens

    def begin(self, step: Step) -> PendingStep:
        begun_s = self._now_s()
        pending = self._watched(step, lambda: self._engine.begin(step))
        self._begun.append((pending, begun_s))
        return pending

    def result(self, step: Step, pending: PendingStep) -> list[SampledToken]:
        tokens = self._watched(step, pending.result)
        for begun, begun_s in self._begun:
            if begun is pending:
                ran_s = begun_s if self._runs_beside else max(begun_s, self._ended_s)  # behind the one before it
                self._note(step, ran_s)
        return tokens

    def probe(self) -> SampledToken:
        return self._watched(Step(chunks=()), self._engine.probe)

    @property
    def age_s(self) -> float:
        """How long it has been at what it is at; 0 when it stands idle."""
        running = self._running
        return self._now_s() - running[1] if running is not None else 0.0

    def check(self, timeout_s: float) -> None:
        """Raise EngineBroken when it has been at one step for longer."""
        running = self._running
        if running is not None and (age_s := self._now_s() - running[1]) > timeout_s:
            what = _described(running[0])
            raise EngineBroken(f"{what} has not ended after {age_s:.1f} s; step_timeout_s is {timeout_s:g}")

    def _note(self, step: Step, begun_s: float) -> None:
        self._ended_s = self._now_s()
        prompt_tokens, guesses, decoded = 0, 0, list[int]()
        for chunk in step.chunks:
            if _decodes(chunk):
                decoded.append(chunk.start + 1)
                guesses += _guessed(chunk)
            else:
                prompt_tokens += len(chunk.token_ids)
        drafting_s, self._drafting_s = self._engine.drafting_s - self._drafting_s, self._engine.drafting_s
        self.times.note(prompt_tokens, len(decoded), sum(decoded), self._ended_s - begun_s - drafting_s, guesses)

    def _watched(self, step: Step, call: Callable[[], T]) -> T:
        self._running = step, self._now_s()
        try:
            return call()
        finally:
            self._running = None


def _decodes(chunk: Chunk) -> bool:
    """One token, behind which guesses may stand."""
    return chunk.start > 0 and (len(chunk.token_ids) == 1 or any(spec.given_id is None for spec in chunk.scores))


def _guessed(chunk: Chunk) -> int:
    """Behind its token; a draft model's are not among the chunk's own."""
    return len(chunk.token_ids) - 1 + (0 if chunk.draft is None else len(chunk.draft.guesses))


def _described(step: Step) -> str:
    if not step.chunks:
        return "a step of the engine's own"
    names = [f"{chunk.request_id} ({len(chunk.token_ids)} at {chunk.start})" for chunk in step.chunks[:NAMED]]
    more = f" and {len(step.chunks) - NAMED} more" if len(step.chunks) > NAMED else ""
    return f"a step of {len(step.chunks)} requests, {', '.join(names)}{more},"
