"""Controller is the actor that watches one deployment: it hears every worker and router, and tells routers the
workers' addresses. It makes no routing decision and no request passes it: when it is gone the cluster serves on.

Actors tell it their events themselves; it learns of a crash by the failing of a call that waits for an actor's end.
Ray restarts it like any other; then it finds the actors by name and asks each how it stands.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayError

from cluster.deploy.ray import find_actor
from cluster.deploy.roster import Roster
from worker.roles import kind_of

logger = logging.getLogger(__name__)
CALL_TIMEOUT_S = 10.0


class Controller:
    """`roles`: name -> role of every worker and router. `placement_group` is removed with the actors ("": none)."""

    def __init__(self, roles: Mapping[str, str], placement_group: str, drain_s: float) -> None:
        self._roster = Roster(roles)
        self._placement_group = placement_group
        self._drain_s = drain_s
        self._changed = asyncio.Condition()
        self._is_stopping = False
        self._watched: dict[str, str] = {}  # name -> incarnation whose end is waited for
        self._pushed: dict[str, list[tuple[str, str, str, str]]] = {}  # router's incarnation -> what it was told
        self._tasks: set[asyncio.Task[None]] = set()
        for name in (*self._roster.router_names(), *self._roster.worker_names()):
            self._spawn(self._adopt(name))

    async def on_event(self, event: dict[str, Any]) -> None:
        """A ServiceEvent of a worker or router."""
        must_tell = self._roster.on_event(event)
        self._watch(event["name"])
        await self._notify()
        if must_tell:
            await self._tell_routers()

    async def wait_change(self, version: int, timeout_s: float) -> dict[str, Any]:
        """The snapshot (Roster.snapshot) once it is newer than `version`, or after `timeout_s`."""
        async with self._changed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait_for(lambda: self._roster.version > version)
        return self._roster.snapshot()

    async def last_address(self, name: str) -> str:
        """Where a router was reached before it was restarted; nothing at its first start."""
        served_as = self._roster.member(name).served_as
        return served_as[0] if served_as is not None else ""

    async def stop(self) -> None:
        """End everything but this actor: routers first, which let running requests end within `drain_s`; then workers,
        those that prefill before those that only decode."""
        self._is_stopping = True
        await self._stop_all(self._roster.router_names(), self._drain_s)
        workers = self._roster.worker_names()
        workers.sort(key=lambda name: "prefill" not in kind_of(self._roster.member(name).role).phases)
        await self._stop_all(workers, 0.0)
        if self._placement_group:
            with contextlib.suppress(ValueError):
                ray.util.remove_placement_group(ray.util.get_placement_group(self._placement_group))

    async def _stop_all(self, names: Sequence[str], grace_s: float) -> None:
        handles = [handle for name in names if (handle := find_actor(name)) is not None]
        ready = [h for name in names if (h := find_actor(name)) is not None and self._roster.member(name).is_ready]
        stops = [_call(handle.stop.remote(grace_s), grace_s + CALL_TIMEOUT_S) for handle in ready]
        await asyncio.gather(*stops, return_exceptions=True)
        for handle in handles:
            ray.kill(handle, no_restart=True)

    async def _adopt(self, name: str) -> None:
        """After a restart of this actor, those that run already are asked; at the first start nobody does."""
        handle = find_actor(name)
        if handle is None:
            return
        try:
            event = await _call(handle.describe.remote(), None)
        except ActorDiedError as error:
            self._roster.on_failed(name, " ".join(str(error).split()))
            await self._notify()
            return
        except RayError as error:
            logger.warning("%s does not answer: %s", name, error)
            return
        if event["stage"] != "started":  # else it tells us itself
            await self.on_event(event)

    def _watch(self, name: str) -> None:
        incarnation = self._roster.member(name).incarnation
        if self._watched.get(name) != incarnation:
            self._watched[name] = incarnation
            self._spawn(self._wait_end(name, incarnation))

    async def _wait_end(self, name: str, incarnation: str) -> None:
        handle = find_actor(name)
        if handle is None:
            return
        try:
            await handle.wait_end.remote()
            return  # it ended by itself and has said why
        except RayActorError as error:
            reason = " ".join(str(error).split())
            will_return = not isinstance(error, ActorDiedError)
        if self._is_stopping:
            return
        self._roster.on_lost(name, incarnation, reason)
        if not will_return:
            self._roster.on_failed(name, reason)
        elif self._roster.member(name).stage == "failed":
            ray.kill(handle, no_restart=True)
        await self._notify()

    async def _tell_routers(self) -> None:
        workers = self._roster.workers()
        for name in self._roster.router_names():
            member = self._roster.member(name)
            if not member.is_ready or self._pushed.get(member.incarnation) == workers:
                continue
            self._pushed[member.incarnation] = workers
            self._spawn(self._tell_router(name, member.incarnation, workers))

    async def _tell_router(self, name: str, incarnation: str, workers: list[tuple[str, str, str, str]]) -> None:
        handle = find_actor(name)
        try:
            if handle is not None:
                await _call(handle.set_workers.remote(workers), CALL_TIMEOUT_S)
        except (RayError, TimeoutError) as error:  # it says so when it is back, and is told then
            logger.warning("%s was not told of the workers: %s", name, error)
            self._pushed.pop(incarnation, None)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _call(ref: Any, timeout_s: float | None) -> Any:
    async with asyncio.timeout(timeout_s):
        return await ref
