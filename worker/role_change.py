"""RoleChange makes a worker one of another role: what runs moves away or ends, then the role's object is replaced.

    begin: drains --> nothing runs, no page is held --> the old role ends its pairs --> the new one, hello again
               \\--- call_off: it stays as it is

Weights, pages and what the prefix cache knows of them stay.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import grpc
import grpc.aio

from kvrelay.v1 import worker_pb2 as pb
from kvrelay.v1 import worker_pb2_grpc
from worker.options import WorkerOptions

log = logging.getLogger(__name__)

POLL_S = 0.02


class Changing(Protocol):
    """The worker."""

    options: WorkerOptions
    role: Any

    @property
    def is_drained(self) -> bool: ...

    def take_role(self, options: WorkerOptions) -> None: ...


class RoleChange:
    def __init__(self, worker: Changing) -> None:
        self._worker = worker
        self._task: asyncio.Task[None] | None = None
        self.is_settled = False  # it cannot be called off any more, and is not done
        self._then: Callable[[], object] | None = None  # what was asked for meanwhile
        self._failure: BaseException | None = None

    def check(self) -> None:
        """Raise what a change has failed by, if one has: the worker has no role any more."""
        if self._failure is not None:
            raise self._failure

    def begin(self, options: Callable[[], WorkerOptions]) -> None:
        """Have it be of these, as they are then. A role that it has is taken anew."""
        self.call_off()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(options))
            self._task.add_done_callback(self._on_done)

    def then(self, ask: Callable[[], object]) -> None:
        """Of a change that is settled: what comes after it. The last that is asked for holds."""
        self._then = ask

    def call_off(self) -> None:
        self._then = None
        if self._task is not None and not self.is_settled:
            self._task.cancel()
            self._task = None

    async def end(self) -> None:
        """The worker stops: called off, or done."""
        self.call_off()
        if self._task is not None:
            await asyncio.wait({self._task})

    async def _run(self, wanted: Callable[[], WorkerOptions]) -> None:
        worker = self._worker
        while not worker.is_drained:
            await asyncio.sleep(POLL_S)
        self.is_settled = True
        before, old = worker.options.role, worker.role
        await old.stop_serving()
        await old.close()
        options = wanted()
        worker.take_role(options)
        log.info("%s was a %s worker and is a %s worker", options.name, before, options.role)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        if self._task is task:
            self._task, self.is_settled = None, False
        if not task.cancelled():
            self._failure = task.exception()
        if self._then is not None and self._failure is None:
            then, self._then = self._then, None
            try:
                then()
            except Exception:
                log.exception("what was asked for while the role changed cannot be done")


class Receivers(worker_pb2_grpc.HandoffServicer):
    """The Handoff service of whatever role the worker has."""

    def __init__(self, receiver: Callable[[], worker_pb2_grpc.HandoffServicer | None]) -> None:
        self._receiver = receiver

    async def Connect(
        self, request_iterator: AsyncIterator[pb.PrefillMessage], context: grpc.aio.ServicerContext
    ) -> None:
        if (receiver := self._receiver()) is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this worker takes no KV: it decodes nothing")
            return
        await receiver.Connect(request_iterator, context)
