"""RunAhead over an engine that computes nothing: what fails, what hangs, and what of it can be seen from outside."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from engine.errors import EngineBroken
from engine.pending import PendingStep
from engine.types import Chunk, SampledToken, SampleSpec, SamplingParams, Step
from worker.steps.run_ahead import RunAhead
from worker.steps.watch import WatchedEngine

pytestmark = pytest.mark.unit


class Engine:
    """Each begun step's end is `end`; a step alone, and a probe, is good unless `is_broken`."""

    def __init__(self, end: Callable[[Step], list[SampledToken]] | None = None, is_broken: bool = False) -> None:
        self._end = end or tokens_of
        self._is_broken = is_broken

    @property
    def drafting_s(self) -> float:
        return 0.0

    def step(self, step: Step) -> list[SampledToken]:
        if self._is_broken:
            raise RuntimeError("no such kernel")
        return tokens_of(step)

    def begin(self, step: Step) -> PendingStep:
        return Later(step, self._end)

    def probe(self) -> SampledToken:
        return self.step(step_of("probe"))[0]


class Later:
    def __init__(self, step: Step, end: Callable[[Step], list[SampledToken]]) -> None:
        self._step, self._end = step, end

    def result(self) -> list[SampledToken]:
        return self._end(self._step)


def step_of(name: str) -> Step:
    spec = SampleSpec(params=SamplingParams(), position=8)
    return Step(chunks=[Chunk(request_id=name, token_ids=(1,), start=7, block_table=(0,), sample=spec)])


def tokens_of(step: Step, error: str = "") -> list[SampledToken]:
    return [SampledToken(request_id=chunk.request_id, token_id=5, error=error) for chunk in step.chunks]


class Clock:
    now_s = 0.0


def run_ahead(engine: Engine) -> tuple[RunAhead[str], WatchedEngine, Clock]:
    clock = Clock()
    watched = WatchedEngine(engine, lambda: clock.now_s)
    return RunAhead(watched, step_of, max_failed_steps=3), watched, clock


@pytest.mark.parametrize("is_begun", [True, False])
async def test_a_step_that_hangs_is_seen_with_what_is_in_it(is_begun: bool) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def hang(step: Step) -> list[SampledToken]:
        reached.set()
        assert go_on.wait(10)
        return tokens_of(step)

    engine = Engine(hang)
    if not is_begun:
        engine.step = hang  # type: ignore[method-assign]
    steps, watched, clock = run_ahead(engine)
    assert watched.age_s == 0.0

    async def compute() -> list[SampledToken]:
        return await steps.finish(await steps.begin("a", None)) if is_begun else await steps.run("a")

    computing = asyncio.create_task(compute())
    assert await asyncio.to_thread(reached.wait, 10)
    clock.now_s = 3.0
    assert watched.age_s == 3.0
    watched.check(timeout_s=3.0)
    clock.now_s = 3.5
    with pytest.raises(EngineBroken, match=r"^a step of 1 requests, a \(1 at 7\), has not ended after 3\.5 s"):
        watched.check(timeout_s=3.0)
    go_on.set()
    assert await computing == tokens_of(step_of("a"))
    assert watched.age_s == 0.0
    watched.check(timeout_s=3.0)
    steps.close()


async def test_a_begun_step_without_a_finite_row_is_run_again() -> None:
    steps, _, _ = run_ahead(Engine(lambda step: tokens_of(step, "not finite")))
    assert await steps.finish(await steps.begin("a", None)) == tokens_of(step_of("a"))
    steps.close()


async def test_an_engine_that_computes_nothing_is_broken_while_running_ahead_too() -> None:
    steps, _, _ = run_ahead(Engine(lambda step: tokens_of(step, "not finite"), is_broken=True))
    with pytest.raises(EngineBroken, match=r"^3 steps in a row failed"):
        await steps.finish(await steps.begin("a", None))
    steps.close()


async def test_an_error_that_cannot_heal_is_not_tried_again() -> None:
    def end(step: Step) -> list[SampledToken]:
        raise RuntimeError("CUDA error: device-side assert triggered")

    engine = Engine(end)
    steps, _, _ = run_ahead(engine)
    begun = await steps.begin("a", None)
    engine.step = lambda step: pytest.fail("it was run again")  # type: ignore[method-assign]
    with pytest.raises(EngineBroken, match=r"^the device is lost to this process"):
        await steps.finish(begun)
    steps.close()
