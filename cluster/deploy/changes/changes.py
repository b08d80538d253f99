"""Changes of a running cluster: another spec is looked at, refused whole or taken whole; then workers are brought to it
one after another (rolling.py). The controller tells routers and workers of what changes at once, whenever it sees one
that does not know yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ray.exceptions import RayError

from cluster.deploy.changes.rolling import Rolling, RollingHost
from cluster.deploy.changes.running_spec import Planned, RunningSpec
from cluster.deploy.ray import within
from cluster.deploy.roster import Roster
from cluster.router.takers import RouterStanding
from cluster.spec.errors import SpecError
from cluster.spec.sources import Sources

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 10.0
CHECK_TIMEOUT_S = 8.0  # of a change, at a router: less than who asked for it waits
STEP_S = 0.25  # of a change; a step asks each router


class ChangesHost(RollingHost, Protocol):
    """The controller."""

    @property
    def is_watched(self) -> bool:
        """A `kvrelay up` stays with the cluster."""

    @property
    def ready_routers(self) -> Mapping[str, Any]:
        """By name: actors, None for a router that is not ready."""

    async def on_spec_taken(self) -> None: ...


class Changes:
    def __init__(self, host: ChangesHost, roster: Roster, running: RunningSpec) -> None:
        self._host = host
        self._running = running
        self._roster = roster
        self._rolling = Rolling(host, roster, running)
        self._lock = asyncio.Lock()  # a spec is compared with what the cluster runs with when it is taken

    @property
    def spec(self) -> dict[str, Any]:
        """What the cluster runs with: rows of key, value and source; and how far a change of it is."""
        current, total = self._rolling.progress
        rollout = {"running": self._running.is_rolling, "reason": self._running.reason}
        return {"rows": self._running.rows, "rollout": rollout | {"current": current, "total": total}}

    async def apply(self, data: object, sources: Sources, max_surge: int | None, *, dry_run: bool) -> dict[str, Any]:
        """Returns what changes, and why it is not done, if so: then nothing is."""
        async with self._lock:
            return await self._apply(data, sources, max_surge, dry_run=dry_run)

    async def _apply(self, data: object, sources: Sources, max_surge: int | None, *, dry_run: bool) -> dict[str, Any]:
        try:
            planned = self._running.plan_for(data, sources)
        except SpecError as error:
            return {"why_not": str(error), "changes": []}
        why = self._why_not_watched(planned) or self._why_not_gone(planned)
        why = why or ("" if dry_run else planned.why_not)
        why = why or await self._why_not_at_routers(planned)
        if not why and not dry_run:
            self._running.take(planned, max_surge)
            await self._host.on_spec_taken()
        return {
            "why_not": why,
            "changes": [change.shown(planned.sources_before, sources) for change in planned.changes],
        }

    async def set_adapters(self, add: Mapping[str, str], remove: Sequence[str]) -> str:
        """Have requests name others. Returns why not; then nothing changes."""
        async with self._lock:
            try:
                planned = self._running.plan_adapters(add, remove)
            except SpecError as error:
                return str(error)
            why = await self._why_not_at_routers(planned)
            if not why:
                self._running.take_now(planned)
                await self._host.on_spec_taken()
            return why

    def _why_not_watched(self, planned: Planned) -> str:
        replan = planned.written.replan
        if replan == "off" or self._host.is_watched:
            return ""
        return (
            f"replan is {replan}, and no `kvrelay up` stays with this cluster to do it; run `kvrelay replan` beside it"
        )

    def _why_not_gone(self, planned: Planned) -> str:
        """Workers of a model that is served no more may run on for its last requests: neither its name nor its pool's
        can be taken meanwhile, or they would be taken for others' workers."""
        served, wanted = self._running.resolved.served, planned.resolved
        pools = {pool.label: pool.model for pool in wanted.pools}
        for member in self._roster.workers_now():
            is_named = member.model not in served and member.model in wanted.served
            if is_named or pools.get(member.pool, member.model) != member.model:
                return (
                    f"{member.name} of {member.model or 'the first model'} is not gone yet; apply it again in a while"
                )
        return ""

    async def _why_not_at_routers(self, planned: Planned) -> str:
        """One that is not ready is told when it is there again. One that says nothing is no consent: what it is asked
        about may be what ends it, and every router after it."""
        routers = {name: router for name, router in self._host.ready_routers.items() if router is not None}
        whys = await asyncio.gather(*(self._why_not_at(router, planned) for router in routers.values()))
        return next((f"{name}: {why}" for name, why in zip(routers, whys, strict=True) if why), "")

    async def _why_not_at(self, router: Any, planned: Planned) -> str:
        try:
            return str(await within(router.why_not.remote(planned.resolved), CHECK_TIMEOUT_S))
        except (RayError, TimeoutError) as error:
            logger.warning("a router did not say whether it takes a change: %s", " ".join(str(error).split()))
            return "it did not answer, and nothing is changed; look into its log, and ask again when it is back"

    async def roll(self, pools: Sequence[str], max_surge: int | None) -> str:
        """Have the workers of these pools replaced; none: of all. Returns which pool there is not."""
        if unknown := [pool for pool in pools if pool not in self._running.sizes]:
            return f"there is no pool {unknown[0]!r}; there are {', '.join(self._running.sizes)}"
        self._running.roll(pools or list(self._running.sizes), max_surge)
        await self._host.save()
        return ""

    async def run(self) -> None:
        """For ever: whenever workers are to be brought to a spec, step by step; or one stands in for nobody."""
        while True:
            try:
                if self._running.is_rolling:
                    await self._rolling.step(await self._routers_standing())
                elif any(each.is_stand_in and not each.is_leaving for each in self._roster.workers_now()):
                    await self._rolling.dismiss(await self._routers_standing())
            except (TimeoutError, RayError) as error:
                logger.warning("workers are replaced later: %s", " ".join(str(error).split()))
            except Exception:
                logger.exception("workers are replaced later")
            await asyncio.sleep(STEP_S)

    async def _routers_standing(self) -> dict[str, RouterStanding | None]:
        return {name: await self._standing_of(router) for name, router in self._host.ready_routers.items()}

    async def _standing_of(self, router: Any) -> RouterStanding | None:
        with contextlib.suppress(RayError, TimeoutError):
            return await within(router.standing.remote(), CALL_TIMEOUT_S) if router is not None else None
        return None
