"""Rolling brings the workers to what the running spec wants, a step at a time: it gathers how all stand, asks
next_step (steps.py) and has the step carried out. What it goes by is kept by others, so that it goes on after a
restart of the controller.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from cluster.deploy.changes.running_spec import RunningSpec
from cluster.deploy.changes.steps import Done, Drain, Standing, Start, Step, Stop, Wait, next_step
from cluster.deploy.roster import Member, Roster
from cluster.router.takers import RouterStanding, why_alone, without
from cluster.spec.pool import PoolSpec
from cluster.spec.resolve import WorkerPlan
from worker.roles import ROLES

logger = logging.getLogger(__name__)

MOST_REFUSALS = 20  # of Ray, in a row: then there is no room
MOST_STALLED = 40  # steps
UNPLACED = "at waiting"  # a member's stage before its process is there
MOST_DEATHS = 2  # of a worker that was never ready, one after another; then it is not waited for


class RollingHost(Protocol):
    """The controller. Each raises what Ray raises, and TimeoutError."""

    async def has_room(self, plan: WorkerPlan) -> bool: ...

    async def start_worker(self, pool: PoolSpec, *, is_stand_in: bool) -> None: ...

    async def let_go(self, name: str) -> None: ...

    async def save(self) -> None: ...


class Rolling:
    def __init__(self, host: RollingHost, roster: Roster, running: RunningSpec) -> None:
        self._host = host
        self._roster = roster
        self._running = running
        self._stalled = 0  # steps in a row in which somebody waited for room
        self._refusals: dict[str, int] = {}  # by pool: how often in a row Ray had no room

    @property
    def progress(self) -> tuple[int, int]:
        """Workers that are as the spec has them and ready, and workers that there shall be."""
        staying = [each for each in self._roster.workers_now() if not each.is_leaving and not each.is_stand_in]
        return sum(each.is_ready and self._is_current(each) for each in staying), sum(self._running.sizes.values())

    async def step(self, routers: Mapping[str, RouterStanding | None]) -> None:
        """`routers`: None for one that does not answer."""
        silent = [name for name, standing in routers.items() if standing is None]
        step: Step = Wait(f"{silent[0]} does not answer") if silent else await self._next(routers)
        number, reason = self._running.number, getattr(step, "reason", "")
        if reason != self._running.reason:
            logger.info("workers are replaced: %s", reason or step)
        await self._carry_out(step)
        if number == self._running.number and self._running.is_rolling:
            self._running.reason = reason

    async def _next(self, routers: Mapping[str, RouterStanding | None]) -> Step:
        workers, alone = self._look(routers)
        step = next_step(self._running.sizes, workers, await self._surges(workers), alone)
        return self._with_room(step, workers, alone)

    async def dismiss(self, routers: Mapping[str, RouterStanding | None]) -> None:
        """While nobody is replaced, one that stands in has to go, unless it is the only one for a phase."""
        workers, alone = self._look(routers)
        for each in workers:
            is_needed = None in routers.values() or each.name in alone
            if each.is_stand_in and not each.is_leaving and not (is_needed and self._running.sizes.get(each.pool)):
                await self._host.let_go(each.name)
                return  # the next one hears of it

    def _look(self, routers: Mapping[str, RouterStanding | None]) -> tuple[list[Standing], dict[str, str]]:
        """How all stand, and by worker why it may not leave now."""
        standing = {name: each for name, each in routers.items() if each is not None}
        workers = [self._standing(member, standing) for member in self._roster.workers_now()]
        leaving = self._roster.leaving
        alone = {
            each.name: why
            for each in workers
            for name, router in standing.items()
            if (why := _why_asked_for(each, name, router) or why_alone([each.name], without(router.takers, leaving)))
        }
        return workers, alone

    def _with_room(self, step: Step, workers: Sequence[Standing], alone: Mapping[str, str]) -> Step:
        """Where one waits for room on and on, a stand-in makes some, or is the one that waits."""
        waiting = step.reason if isinstance(step, Wait) and UNPLACED in step.reason else ""
        self._stalled = self._stalled + 1 if waiting and waiting == self._running.reason else 0
        stand_ins = [each.name for each in workers if each.is_stand_in and not each.is_leaving]
        free = [name for name in stand_ins if name not in alone]
        return Drain(free[0]) if self._stalled >= MOST_STALLED and free else step

    async def _surges(self, workers: Sequence[Standing]) -> dict[str, bool | None]:
        """Pools with old workers, and whether each may have one beyond its size. What a worker that has left was given
        comes back to Ray only some time later."""
        pools = {each.pool for each in workers if not each.is_current and each.pool in self._running.sizes}
        if self._running.max_surge is not None:
            return dict.fromkeys(pools, self._running.max_surge > 0)
        if any(each.is_stand_in or each.is_leaving for each in workers):
            return dict.fromkeys(pools)
        plans = {pool: self._running.plan(self._roster.free_name(pool)) for pool in pools}
        for pool, plan in plans.items():
            self._refusals[pool] = 0 if await self._host.has_room(plan) else self._refusals.get(pool, 0) + 1
        tries = {pool: self._refusals[pool] for pool in plans}
        return {pool: None if 0 < number < MOST_REFUSALS else not number for pool, number in tries.items()}

    async def _carry_out(self, step: Step) -> None:
        match step:
            case Start(pool, is_stand_in):
                await self._start(pool, is_stand_in=is_stand_in)
            case Drain(name):
                await self._host.let_go(name)
            case Stop(reason, stand_ins):
                self._running.settle(reason)
                for name in stand_ins:
                    await self._host.let_go(name)
                await self._host.save()
            case Done():
                self._running.settle()
                await self._host.save()

    async def _start(self, label: str, *, is_stand_in: bool) -> None:
        pool = self._running.pool(label)
        assert pool is not None, "sizes are of pools that there are"
        await self._host.start_worker(pool, is_stand_in=is_stand_in)

    def _is_current(self, member: Member) -> bool:
        pool = self._running.pool(member.pool)
        is_of_it = pool is not None and pool.model == member.model
        return is_of_it and member.made_by == self._running.made_by(member.pool)

    def _standing(self, member: Member, routers: Mapping[str, RouterStanding]) -> Standing:
        strangers = [name for name, each in routers.items() if each.ready.get(member.name) != member.incarnation]
        trouble = "" if member.is_ready else f"at {member.stage}{f' ({member.reason})' if member.reason else ''}"
        return Standing(
            name=member.name,
            pool=member.pool,
            role=_role_now(member, routers),
            is_current=self._is_current(member),
            is_used=member.is_ready and not strangers,
            is_stand_in=member.is_stand_in,
            is_leaving=member.is_leaving,
            model=member.model,
            is_unserved=member.model not in self._running.resolved.served,
            trouble=trouble or f"ready, and not yet used by {', '.join(strangers)}",
            failure=_failure(member),
        )


def _role_now(member: Member, routers: Mapping[str, RouterStanding]) -> str:
    """By the phases that routers have it for: it may have been given another role than it was started with."""
    takers = [(key, names) for router in routers.values() for key, names in router.takers.items()]
    phases = {key.partition(" ")[0] for key, names in takers if member.name in names}
    return next((kind.name for kind in ROLES.values() if phases == {*kind.phases}), member.role)


def _why_asked_for(worker: Standing, name: str, router: RouterStanding) -> str:
    """Whose model goes, once its last requests have ended."""
    is_asked_for = worker.is_unserved and worker.model in router.models
    return f"requests of {worker.model} run at {name}" if is_asked_for else ""


def _failure(member: Member) -> str:
    if member.is_ready or member.served_as is not None:
        return ""
    if member.stage == "failed":
        return member.reason
    return member.last_death if member.deaths >= MOST_DEATHS else ""
