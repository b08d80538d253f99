"""Flights runs a worker's steps so that the next one is begun while the last one runs, where an engine can do that.

    take_off    begin a step, in the engine's thread, and return before it is done
    land        wait for its tokens

At most two are in flight. What goes wrong goes wrong for one request: a step that could not be begun, or failed, or
began with tokens of one that failed, is run again by itself (execution.run_step) when its turn to land comes. It
decides nothing of who runs next.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

from engine.errors import EngineBroken
from engine.execution import run_step
from engine.pending import PendingStep
from engine.types import SampledToken, Step

log = logging.getLogger(__name__)

T = TypeVar("T")


class StepEngine(Protocol):
    def step(self, step: Step) -> list[SampledToken]: ...

    def begin(self, step: Step) -> PendingStep: ...


@dataclass(slots=True, kw_only=True)
class StepInFlight:
    make: Callable[[], Step]  # asked again when the step has to be run again, with what is known by then
    before: StepInFlight | None  # which still runs
    begun: PendingStep | None = None
    is_good: bool = True

    @property
    def must_land(self) -> bool:
        """Whether it has to be run again, so that nothing may be begun with what it computes now."""
        return self.begun is None or (self.before is not None and not self.before.is_good)


class Flights:
    def __init__(self, engine: StepEngine, thread: ThreadPoolExecutor) -> None:
        """`thread`: the engine's, one."""
        self._engine = engine
        self._thread = thread

    async def run(self, step: Step) -> list[SampledToken]:
        """One step after the other. Raises EngineBroken."""
        return await self._in_thread(run_step, self._engine, step)

    async def take_off(self, make: Callable[[], Step], before: StepInFlight | None) -> StepInFlight:
        """Begin the step that `make` returns. Raises EngineBroken."""
        flight, step = StepInFlight(make=make, before=before), make()
        try:
            flight.begun = await self._in_thread(self._engine.begin, step)
        except EngineBroken:
            raise
        except Exception:
            log.exception("a step of %d requests could not be begun", len(step.chunks))
        return flight

    async def land(self, flight: StepInFlight) -> list[SampledToken]:
        """The step's tokens. Raises EngineBroken."""
        drawn: list[SampledToken] | None = None
        if flight.begun is not None:
            try:
                drawn = await self._in_thread(flight.begun.result)
            except EngineBroken:
                raise
            except Exception:
                log.exception("a step failed")
        flight.is_good, flight.before = drawn is not None and not flight.must_land, None
        if drawn is not None and flight.is_good:
            return drawn
        return await self.run(flight.make())

    async def _in_thread(self, call: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *args)
