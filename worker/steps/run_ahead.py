"""RunAhead runs a worker's steps so that the next one is begun while the last one runs, where an engine can do that.

    begin     begin a step, in the engine's thread, and return before it is done
    finish    wait for its tokens

Two are pending at most, or as many as an engine has pipeline stages. What goes wrong goes wrong for one request: a
step that could not be begun, or failed, or began with tokens of one that failed, is run again by itself
(execution.run_step) when its turn to finish comes. It decides nothing of who runs next.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from engine.errors import raise_if_broken
from engine.execution import has_failed, run_step
from engine.pending import PendingStep
from engine.types import SampledToken, Step
from worker.steps.watch import WatchedEngine

log = logging.getLogger(__name__)

T = TypeVar("T")
BatchT = TypeVar("BatchT")


@dataclass(slots=True, kw_only=True)
class BegunBatch(Generic[BatchT]):
    """A batch whose step is in the engine."""

    batch: BatchT
    step: Step
    before: BegunBatch[BatchT] | None  # which still runs
    pending: PendingStep | None = None  # none: it could not be begun
    is_good: bool = True

    @property
    def must_finish(self) -> bool:
        """Whether it has to be run again, so that nothing may be begun with what it computes now."""
        return self.pending is None or (self.before is not None and not self.before.is_good)


class RunAhead(Generic[BatchT]):
    def __init__(self, engine: WatchedEngine, step_of: Callable[[BatchT], Step], *, max_failed_steps: int) -> None:
        """`step_of` makes a batch's step; again when it has to be run again, with what is known by then."""
        self._engine = engine
        self._step_of = step_of
        self._run_step = partial(run_step, engine, max_failed_steps=max_failed_steps)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")

    async def run(self, batch: BatchT) -> list[SampledToken]:
        """One step after the other. Raises EngineBroken."""
        return await self._in_thread(self._run_step, self._step_of(batch))

    async def begin(self, batch: BatchT, before: BegunBatch[BatchT] | None) -> BegunBatch[BatchT]:
        """Raises EngineBroken."""
        begun = BegunBatch(batch=batch, step=self._step_of(batch), before=before)
        begun.pending = await self._attempt(begun, self._engine.begin, begun.step)
        return begun

    async def finish(self, begun: BegunBatch[BatchT]) -> list[SampledToken]:
        """The step's tokens. Raises EngineBroken."""
        tokens: list[SampledToken] | None = None
        if begun.pending is not None:
            tokens = await self._attempt(begun, self._engine.result, begun.step, begun.pending)
        has_tokens = tokens is not None and not has_failed(begun.step, tokens)
        begun.is_good, begun.before = has_tokens and not begun.must_finish, None
        if tokens is not None and begun.is_good:
            return tokens
        return await self.run(begun.batch)

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    async def _attempt(self, begun: BegunBatch[BatchT], call: Callable[..., T], *args: object) -> T | None:
        """What the call returns; None when it failed and the step is to be run again. Raises EngineBroken."""
        try:
            return await self._in_thread(call, *args)
        except Exception as error:
            raise_if_broken(error)
            log.exception("a step of %d requests failed, and is run again", len(begun.step.chunks))
            return None

    async def _in_thread(self, call: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *args)
