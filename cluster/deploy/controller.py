"""Controller is the actor that watches one deployment: it asks every worker and router how it stands, kills those that
hang, and tells routers the workers' addresses. It makes no routing decision and no request passes it: when it is gone
the cluster serves on.

    restore what the last one knew -> hear every member, or fail to within SURVEY_S -> tell the routers, and again
                                                                                       whenever that changes

Members also tell it their events themselves. Ray restarts it like any other actor, and a member that is no longer asked
kills one that hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayError

from cluster.deploy.changes.changes import Changes
from cluster.deploy.changes.running_spec import RunningSpec
from cluster.deploy.checkpoint import Checkpoint
from cluster.deploy.liveness import Liveness
from cluster.deploy.own_ray.local_ray import LOOPBACK
from cluster.deploy.ray import find_actor, why_full, within
from cluster.deploy.room import has_room
from cluster.deploy.roster import MAX_LOAD_DELAY_S, ROUTER, SERVED_WELL_S, Member, Roster, roles_of
from cluster.deploy.router_news import RouterNews
from cluster.router.takers import Takers, why_alone, without
from cluster.spec.errors import SpecError
from cluster.spec.model import ClusterSpec
from cluster.spec.pool import PoolSpec
from cluster.spec.resolve import WorkerPlan, workers_of
from cluster.spec.sources import Sources
from engine.limits.memory_kills import MemoryKills
from worker.awake import AwakeClock
from worker.log_file import log_into
from worker.membership import Greeting
from worker.process import BROKEN_EXIT_CODE
from worker.roles import kind_of
from worker.wire.secrets import Secrets

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 10.0
POLL_S = 0.1
PROBE_S = 1.0
LEAVING_S = 0.2  # for PROBE_S, of one whose leaving waits to be looked at
WATCHER_S = 60.0  # a `kvrelay up` that stays asks several times in so long
SURVEY_S = 5.0  # after a restart: one that says nothing for so long stays as the routers know it


class Controller:
    """`running`: what the cluster was started with. `launch` creates the actor of a worker that was not there then."""

    def __init__(self, running: RunningSpec, *, log_dir: str, launch: Callable[[WorkerPlan], None]) -> None:
        log_into(log_dir, "controller")
        self._checkpoint, saved = _restored()
        if saved is not None and "spec" in saved:
            _restore(running, saved["spec"])
        self._running = running
        spec = running.resolved
        plans = workers_of(spec)
        roles = roles_of(((plan.name, plan.options.role) for plan in plans), spec.router.replicas)
        self._roster = Roster(roles, saved, {plan.name: plan.model for plan in plans})
        for name in self._roster.worker_names() if saved is None else ():
            self._note_made(name)
        self._changes = Changes(self, self._roster, running)
        self._launch = launch
        self._liveness = Liveness(timeout_s=spec.liveness_timeout_s, load_timeout_s=_load_timeout_s(spec))
        self._memory_kills = MemoryKills()
        self._awake = AwakeClock()
        self._changed = asyncio.Condition()
        self._is_stopping = False
        self._secrets: asyncio.Future[Secrets] = asyncio.get_running_loop().create_future()
        self._handles: dict[str, Any] = {}
        names = [*self._roster.router_names(), *self._roster.worker_names()]
        self._heard = {name: asyncio.Event() for name in names}  # asked once, whatever came of it
        self._hurried: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)  # looked at without a pause
        self._is_confirmed = saved is None  # at the first start there is nobody to hear
        self._news = RouterNews(self._roster, running, self._handles)
        self._watched_s = -math.inf  # when somebody last asked how all stand
        self._tasks: set[asyncio.Task[None]] = set()
        self._awake.start()
        self._spawn(self._confirm())
        for name in names:
            self._spawn(self._keep(name))

    # for members

    async def greet(self, event: dict[str, Any]) -> Greeting:
        """What a process that has just started must know; waits until the secrets are known."""
        await self.on_event(event)
        if (name := event["name"]) not in self._roster:
            self._kill(name, "it is on no roster", no_restart=True)
            raise LookupError(f"{name} is on no roster")
        secrets, member = await asyncio.shield(self._secrets), self._roster.member(name)
        is_router = member.role == ROUTER
        if is_router:
            self._news.on_spec_given(event["incarnation"])
        else:
            member.knobs = self._running.live_knobs(member.pool)
        return Greeting(
            secrets=secrets,
            last_address=member.served_as[0] if member.served_as is not None else "",
            last_http=member.served_http,
            load_delay_s=self._roster.load_delay_s(name),
            spec=self._running.resolved if is_router else None,
            knobs=member.knobs,
        )

    async def on_event(self, event: dict[str, Any]) -> None:
        """A ServiceEvent of a worker or router, sent or asked for."""
        if event["name"] not in self._roster:
            return  # it has left
        version, is_new_stage = self._roster.version, self._roster.on_event(event)
        self._liveness.on_answer(event, now := self._awake.now_s())
        if self._liveness.ready_for_s(event["name"], now) >= SERVED_WELL_S:
            self._roster.on_served_well(event["name"])
        if is_new_stage:
            await self.save()
        if self._roster.is_to_be_replaced(event):
            await self._replace(event["name"], f"it failed: {self._roster.member(event['name']).reason}")
        if self._roster.version != version:
            await self._notify()
        self._tell_routers()

    async def ping(self) -> None:
        """For a member that asks whether this process hangs."""

    # for routers, whom an operator asks

    async def pools(self) -> dict[str, list[str]]:
        """Who each has, by pool, the first numbers first; without those that leave."""
        return {pool: self._roster.staying(pool) for pool in self._running.sizes}

    async def size(self, pool: str) -> int:
        """How many workers it shall have, whoever said so last."""
        return self._running.sizes.get(pool, 0)

    async def scale(self, pool: str, replicas: int, takers: Takers | None) -> str:
        """Have so many in it. Returns why not; empty if it is so. `takers`: who takes requests, as a router knows, of
        whom each phase must be left one; None: or none."""
        kept = self._running.pool(pool)
        if kept is None:
            return f"there is no pool {pool!r} any more"
        if why := self._why_alone(self._roster.going(pool, replicas), takers):
            return why
        if replicas != self._running.sizes[pool]:
            self._running.resize(pool, replicas, "kvrelay scale")
        with contextlib.suppress(TimeoutError):  # who comes takes the name and the place of who goes
            async with asyncio.timeout(CALL_TIMEOUT_S / 2):
                while self._roster.is_being_ended(pool) and len(self._roster.staying(pool)) < replicas:
                    await asyncio.sleep(POLL_S)
        newest = self._running.sizes.get(pool, 0)  # of several that waited
        await self._take_in(self._roster.resize(pool, kept.role, newest, kept.model))
        for name in self._roster.leaving:
            self._hurried[name].set()
        return ""

    async def _take_in(self, added: Sequence[str]) -> None:
        for name in added:
            self._note_made(name)
        await self.save()  # before there is an actor that the next controller would not know
        await self._notify()
        self._tell_routers()
        for name in added:
            self._heard[name] = asyncio.Event()
            self._spawn(self._keep(name))

    async def pending(self, pool: str) -> list[tuple[str, str, str]]:
        """Who is on the way."""
        return [(m.name, *self._standing(m)) for m in self._roster.pending(pool)]

    async def remove(self, name: str, takers: Takers | None) -> str | None:
        """Have a worker leave. Returns why not, empty if it does; None: there is none of the name, or none any more."""
        if not self._is_kept(name):
            return None
        if why := self._why_alone([name, *self._stand_ins_beside(name)], takers):
            return why
        self._resize_by(-1, name)
        await self._set_leaving(name, undo=False)
        return ""

    async def take_back(self, name: str) -> bool:
        """Have it stay. Whether there is one of the name, and it is not too late."""
        if not self._is_kept(name):
            return False
        self._resize_by(1, name)
        await self._set_leaving(name, undo=True)
        return True

    def _resize_by(self, number: int, name: str) -> None:
        """One that leaves for good, or comes back, makes its pool smaller or larger; not one that stands in, or is
        being replaced, whose place is kept."""
        member, sizes = self._roster.member(name), self._running.sizes
        is_change = member.is_leaving != (number < 0)
        if not is_change or member.is_stand_in or member.pool not in sizes:
            return
        size = sizes[member.pool]
        if number < 0 or len(self._roster.staying(member.pool)) >= size:
            self._running.resize(member.pool, max(0, size + number), "kvrelay drain")

    def _stand_ins_beside(self, name: str) -> list[str]:
        """Who goes with the last one of a pool."""
        member = self._roster.member(name)
        is_last = self._running.sizes.get(member.pool) == 1 and not (member.is_leaving or member.is_stand_in)
        return self._roster.stand_ins(member.pool) if is_last else []

    def _is_kept(self, name: str) -> bool:
        return name in self._roster.worker_names() and not self._roster.member(name).is_gone

    def _why_alone(self, names: Sequence[str], takers: Takers | None) -> str:
        """Of two that are asked for at once, by whatever routers, the second one hears of the first."""
        return "" if takers is None else why_alone(names, without(takers, self._roster.leaving))

    async def _set_leaving(self, name: str, *, undo: bool) -> None:
        if self._roster.member(name).is_leaving == undo:
            self._roster.set_leaving(name, undo=undo)
            await self.save()
            self._tell_routers()
            self._hurried[name].set()

    def _standing(self, member: Member) -> tuple[str, str]:
        is_wanted = self._running.pool(member.pool) is not None and not member.is_leaving
        if member.stage == "waiting" and is_wanted:
            return member.stage, member.reason or self._running.plan(member.name).wants
        return "leaving" if member.is_leaving else member.stage, member.reason

    # who changes what all run with, for routers; and what it takes

    async def spec(self) -> dict[str, Any]:
        return self._changes.spec

    async def apply_spec(self, data: object, sources: Sources, max_surge: int | None, dry_run: bool) -> dict[str, Any]:
        return await self._changes.apply(data, sources, max_surge, dry_run=dry_run)

    async def set_adapters(self, add: Mapping[str, str], remove: Sequence[str]) -> str:
        return await self._changes.set_adapters(add, remove)

    async def roll(self, pools: Sequence[str], max_surge: int | None) -> str:
        return await self._changes.roll(pools, max_surge)

    @property
    def is_watched(self) -> bool:
        return self._awake.now_s() < self._watched_s + WATCHER_S

    @property
    def ready_routers(self) -> dict[str, Any]:
        names = self._roster.router_names()
        return {name: self._handle(name) if self._roster.member(name).is_ready else None for name in names}

    async def on_spec_taken(self) -> None:
        self._liveness.load_timeout_s = _load_timeout_s(self._running.resolved)
        await self.save()
        await self._notify()
        await asyncio.gather(*self._tell_routers())

    async def has_room(self, plan: WorkerPlan) -> bool:
        return await asyncio.to_thread(has_room, plan, loopback=self._running.machine is not None)

    async def start_worker(self, pool: PoolSpec, *, is_stand_in: bool) -> None:
        await self._take_in([self._roster.add(pool.label, pool.role, pool.model, is_stand_in=is_stand_in)])

    async def let_go(self, name: str) -> None:
        await self._set_leaving(name, undo=False)

    # for `kvrelay up`

    async def set_secrets(self, secrets: Secrets) -> None:
        if not self._secrets.done():
            self._secrets.set_result(secrets)

    async def wait_change(self, version: Sequence[int], timeout_s: float) -> dict[str, Any]:
        """The snapshot (Roster.snapshot) once it is newer than `version`, or after `timeout_s`; `wants_secrets` if
        nobody that lives could tell them."""
        self._watched_s = self._awake.now_s()
        async with self._changed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait_for(lambda: self._roster.version > tuple(version))
        snapshot = self._roster.snapshot()
        for member in snapshot["members"]:
            if member["role"] != ROUTER:
                member["reason"] = self._standing(self._roster.member(member["name"]))[1]
        return snapshot | {"wants_secrets": not self._secrets.done(), "spec_number": self._running.number}

    async def leave(self) -> None:
        """Nobody asks on."""
        self._watched_s = -math.inf

    async def resolved_spec(self) -> ClusterSpec:
        """What the cluster runs with now."""
        return self._running.resolved

    async def stop(self) -> None:
        """End everything but this actor: routers first, which let running requests end within `drain_s`; then workers,
        those that prefill before those that only decode."""
        self._is_stopping = True
        await self._stop_all(self._roster.router_names(), self._running.resolved.router.drain_s)
        workers = self._roster.worker_names()
        workers.sort(key=lambda name: "prefill" not in kind_of(self._roster.member(name).role).phases)
        await self._stop_all(workers, 0.0)
        self._checkpoint.forget()

    async def _stop_all(self, names: Sequence[str], grace_s: float) -> None:
        handles = {name: handle for name in names if (handle := self._handle(name)) is not None}
        ready = [handle for name, handle in handles.items() if self._roster.member(name).is_ready]
        stops = [within(handle.stop.remote(grace_s), grace_s + CALL_TIMEOUT_S) for handle in ready]
        await asyncio.gather(*stops, return_exceptions=True)
        for handle in handles.values():
            ray.kill(handle, no_restart=True)

    # the watch over the members

    async def _confirm(self) -> None:
        await self.save()  # the epoch, before anybody is told of it
        if not self._is_confirmed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SURVEY_S):
                    await asyncio.gather(*(event.wait() for event in self._heard.values()))
            silent = [name for name, event in self._heard.items() if not event.is_set()]
            logger.info("restarted; %s", f"not heard: {', '.join(silent)}" if silent else "every member was heard")
            self._is_confirmed = True
        self._tell_routers()
        self._spawn(self._changes.run())

    async def _keep(self, name: str) -> None:
        while not self._is_stopping:
            try:
                if await self._look_after(name):
                    return  # another member may have the name by now
            except (TimeoutError, RayError):
                pass  # Ray may be in trouble itself: the watch goes on
            except Exception:
                logger.exception("the watch over %s goes on", name)
            self._heard[name].set()
            if not self._roster.member(name).is_gone:
                await self._replace_if_hung(name)
            await self._pause(name)

    async def _pause(self, name: str) -> None:
        hurried = self._hurried[name]
        hurried.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVING_S if self._roster.member(name).departure else PROBE_S):
                await hurried.wait()

    async def _look_after(self, name: str) -> bool:
        """Whether it is there no more."""
        member, handle = self._roster.member(name), self._handle(name)
        if member.is_leaving and (handle is None or member.is_gone or not member.is_ready):
            return await self._dismiss(name, handle)
        if handle is not None:
            await self._probe(name, handle)
        elif member.is_added:
            await self._create(name)
        return False

    async def _replace_if_hung(self, name: str) -> None:
        reason = self._liveness.why_hung(name, self._roster.member(name).stage, self._awake.now_s())
        if reason and await self._is_in_charge(name, reason):
            await self._replace(name, f"{reason}{self._and_why(name)}")

    async def _is_in_charge(self, name: str, reason: str) -> bool:
        """Not while Ray itself does not answer, which keeps an order to kill and carries it out once it can, be all
        well by then. Ends this process where Ray has put another in its place."""
        epoch = await self._checkpoint.epoch()
        if epoch is None:
            logger.warning("not killing %s, for Ray does not answer either: %s", name, reason)
            return False
        if epoch > self._roster.version.epoch:
            logger.warning("another controller has taken over")
            os._exit(BROKEN_EXIT_CODE)
        return True

    async def _probe(self, name: str, handle: Any) -> None:
        """Raises TimeoutError when nothing is said, neither by the process nor by Ray, and what Ray raises."""
        incarnation = self._roster.member(name).incarnation
        try:
            answer = await within(handle.describe.remote(), self._running.resolved.liveness_timeout_s)
            if not self._secrets.done() and (secrets := await within(handle.secrets.remote(), CALL_TIMEOUT_S)):
                await self.set_secrets(secrets)
        except RayActorError as error:
            await self._on_gone(name, incarnation, error)
            return
        await self.on_event(answer)
        member = self._roster.member(name)
        await self._tell_knobs(member, handle)
        if member.is_leaving and answer["drained"]:
            await self._dismiss(name, handle)
        elif member.departure:
            is_returning = not member.is_leaving
            await within(handle.drain.remote(is_returning), CALL_TIMEOUT_S)
            if is_returning:
                self._roster.on_told_of_departure(name)

    async def _dismiss(self, name: str, handle: Any | None) -> bool:
        """Nothing runs there: its process ends for good, once no router knows it any more. Its name is free when Ray
        knows no such actor, which the next look shows."""
        self._roster.set_gone(name)
        await self.save()
        await asyncio.gather(*self._tell_routers())
        if handle is not None:
            with contextlib.suppress(TimeoutError, RayError):
                await within(handle.stop.remote(0.0), CALL_TIMEOUT_S)
            self._handles.pop(name, None)
            ray.kill(handle, no_restart=True)
            return False
        self._roster.remove(name)
        await self.save()
        await self._notify()
        return True

    async def _tell_knobs(self, member: Member, handle: Any) -> None:
        """One that started before they were changed."""
        knobs = self._running.live_knobs(member.pool) if member.role != ROUTER and member.is_ready else member.knobs
        if knobs != member.knobs:
            await within(handle.take_knobs.remote(knobs), CALL_TIMEOUT_S)
            member.knobs = knobs
            await self.save()

    def _note_made(self, name: str) -> None:
        member = self._roster.member(name)
        member.made_by = self._running.made_by(member.pool)
        member.knobs = self._running.live_knobs(member.pool)

    async def _create(self, name: str) -> None:
        self._note_made(name)
        await self.save()
        if self._running.pool(self._roster.member(name).pool) is None:
            return  # another spec was taken since: it will be let go
        try:
            await asyncio.to_thread(self._launch, self._running.plan(name))
        except Exception as error:
            self._roster.member(name).reason = f"it cannot be created: {' '.join(str(error).split())}"
            raise

    async def _on_gone(self, name: str, incarnation: str, error: RayActorError) -> None:
        member = self._roster.member(name)
        if self._is_stopping or member.stage == "failed":
            return
        if isinstance(error, ActorDiedError):
            self._roster.on_failed(name, f"its process ended: {' '.join(str(error).split())}")
        else:  # Ray knows no more by now than that it restarts it
            self._roster.on_lost(name, incarnation, f"its process ended; its log may say why{self._and_why(name)}")
            self._liveness.on_lost(name, self._awake.now_s())
        await self._after_loss(name)

    def _and_why(self, name: str) -> str:
        """What may have ended a process, or kept it from its work, as far as this machine's kernel says."""
        here = self._running.node_host
        if here != LOOPBACK and self._roster.member(name).host not in ("", here):
            return ""
        why = self._memory_kills.news() or why_full()
        return f", and {why}" if why else ""

    async def _replace(self, name: str, reason: str) -> None:
        self._kill(name, reason)
        self._roster.on_killed(name, reason)
        self._liveness.on_lost(name, self._awake.now_s())
        await self._after_loss(name)

    async def _after_loss(self, name: str) -> None:
        if self._roster.member(name).stage == "failed":
            self._kill(name, self._roster.member(name).reason, no_restart=True)
        await self.save()
        await self._notify()

    def _kill(self, name: str, reason: str, *, no_restart: bool = False) -> None:
        """SIGKILL in the end, by the node's raylet: it reaches a stopped process, too."""
        logger.warning("killing %s%s: %s", name, " for good" if no_restart else "", reason)
        with contextlib.suppress(RayError):  # it is judged again
            if (handle := self._handle(name)) is not None:
                ray.kill(handle, no_restart=no_restart)

    def _tell_routers(self) -> list[asyncio.Task[None]]:
        """Only a confirmed roster."""
        return self._news.tell() if self._is_confirmed else []

    def _handle(self, name: str) -> Any | None:
        if name not in self._handles and (handle := find_actor(name)) is not None:
            self._handles[name] = handle
        return self._handles.get(name)

    async def save(self) -> None:
        await self._checkpoint.save(lambda: self._roster.saved | {"spec": self._running.saved})

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _restored() -> tuple[Checkpoint, dict[str, Any] | None]:
    """An error raised by an actor's constructor would end it for good; a process that ends is started again."""
    try:
        checkpoint = Checkpoint()
        return checkpoint, checkpoint.load()
    except Exception:
        logger.exception("what the last controller knew cannot be read")
        os._exit(BROKEN_EXIT_CODE)


def _restore(running: RunningSpec, saved: dict[str, Any]) -> None:
    try:
        running.restore(saved)
    except SpecError as error:  # an actor whose constructor fails is gone for good
        logger.error("the cluster's last spec cannot be read, and it goes on with its first: %s", error)


def _load_timeout_s(spec: ClusterSpec) -> float:
    return spec.ready_timeout_s + MAX_LOAD_DELAY_S
