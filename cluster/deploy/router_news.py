"""RouterNews tells the routers of one deployment whose addresses the workers have and which spec is gone by.

not taken yet -> being told -> taken by this incarnation; one that fails is told again at the next `tell`
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from typing import Any

from ray.exceptions import RayError

from cluster.deploy.changes.running_spec import RunningSpec
from cluster.deploy.ray import within
from cluster.deploy.roster import Roster, Version, WorkerEntry

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 10.0


class RouterNews:
    """`handles`: of the actors that are known, by name."""

    def __init__(self, roster: Roster, running: RunningSpec, handles: Mapping[str, Any]) -> None:
        self._roster = roster
        self._running = running
        self._handles = handles
        self._told: dict[str, list[WorkerEntry]] = {}  # router's incarnation -> what it has taken, or is about to
        self._told_spec: dict[str, int] = {}  # likewise: the number of the spec
        self._telling: set[asyncio.Task[None]] = set()

    def on_spec_given(self, incarnation: str) -> None:
        """It began with the spec of now."""
        self._told_spec[incarnation] = self._running.number

    def tell(self) -> list[asyncio.Task[None]]:
        """Each router what it has not taken yet. Returns all that is being told: a sign of life may have begun it, of
        any member."""
        workers, version = self._roster.workers(), self._roster.version
        for name in self._roster.router_names():
            router = self._roster.member(name)
            incarnation = router.incarnation
            if router.is_ready and self._told.get(incarnation) != workers:
                self._told[incarnation] = workers
                self._begin(self._tell_workers(name, incarnation, version, workers))
            if router.is_ready and self._told_spec.get(incarnation, 0) != self._running.number:
                self.on_spec_given(incarnation)
                self._begin(self._tell_spec(name, incarnation))
        return list(self._telling)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _tell_workers(self, name: str, incarnation: str, version: Version, workers: list[WorkerEntry]) -> None:
        try:
            await within(self._handles[name].set_workers.remote(version, workers), CALL_TIMEOUT_S)
        except (KeyError, RayError, TimeoutError) as error:  # told again when it answers again
            logger.warning("%s was not told of the workers: %s", name, " ".join(str(error).split()))
            self._told.pop(incarnation, None)

    async def _tell_spec(self, name: str, incarnation: str) -> None:
        try:
            await within(self._handles[name].take_spec.remote(self._running.resolved), CALL_TIMEOUT_S)
        except (KeyError, RayError, TimeoutError) as error:  # likewise
            logger.warning("%s goes by the last spec: %s", name, " ".join(str(error).split()))
            self._told_spec.pop(incarnation, None)
