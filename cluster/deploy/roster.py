"""Roster knows every worker and router of one deployment: where each stands, and what the routers must be told.

It decides and remembers; the controller (cluster/deploy/controller.py) carries out. It starts nothing, asks nobody, and
reads no clock. What an earlier incarnation says is dropped: a restarted process is another one.

    waiting -> started -> weights -> ... -> ready -> lost -> started ...
                  \\-> failed: it said so, or died MAX_LOAD_DEATHS times before the cluster was ever ready

Who dies again and again, loading or as soon as it serves, is started ever later (`load_delay_s`), until it has served
well.

`saved` is all it knows, as plain data: the next controller restores it, so that what routers are told never shrinks
because a controller was restarted. Each restart begins a new epoch, and a version of it is newer than all before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import count
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from worker.options import pool_of

MAX_LOAD_DEATHS = 3
MAX_LOAD_DELAY_S = 60.0
SERVED_WELL_S = 10.0
MAX_PAST = 16  # earlier incarnations of a member that are remembered; none of them lives on for so many starts
ROUTER = "router"
SAID = ("incarnation", "stage", "fraction", "address", "http", "pid", "host", "reason")  # of a ServiceEvent


class Version(NamedTuple):
    epoch: int = 0  # of the controller's process
    change: int = 0  # within it


class WorkerEntry(NamedTuple):
    """What a router is told of a worker."""

    name: str
    role: str
    address: str
    incarnation: str
    trouble: str = ""  # that it died of late, how often and of what
    is_leaving: bool = False  # it is drained, and then ended
    model: str = ""  # of the spec's `served`


class Newest:
    """Of a sender's numbered words, the newest that was taken: an older one that comes late is dropped."""

    def __init__(self) -> None:
        self._version = Version()

    def takes(self, version: Iterable[int]) -> bool:
        offered = Version(*version)
        if offered <= self._version:
            return False
        self._version = offered
        return True


@dataclass(slots=True, kw_only=True)
class Member:
    name: str
    role: str  # ROUTER, or a worker's
    model: str = ""  # of a worker, of the spec's `served`
    stage: str = "waiting"
    fraction: float = 0.0
    address: str = ""
    http: str = ""  # of a router: where it serves HTTP
    incarnation: str = ""
    pid: int = 0
    host: str = ""
    reason: str = ""
    starts: int = 0
    deaths: int = 0  # since it last served well
    last_death: str = ""  # the reason of the newest of them
    served_as: tuple[str, str] | None = None  # address and incarnation when it was last ready
    served_http: str = ""  # likewise
    past: list[str] = field(default_factory=list)  # its earlier incarnations
    is_added: bool = False  # since the start: the controller creates its actor
    is_stand_in: bool = False  # beyond its pool's size, while others are replaced
    made_by: str = ""  # names what it was started with (cluster/spec/compare.py)
    knobs: dict[str, Any] = field(default_factory=dict)  # that change while it runs, as it was last told
    # leaving: for good, once nothing runs there; gone: nothing does, and its process is being ended; returning: it was
    # leaving, and may drain still
    departure: Literal["", "leaving", "gone", "returning"] = ""

    @property
    def is_ready(self) -> bool:
        return self.stage == "ready"

    @property
    def is_leaving(self) -> bool:
        return self.departure in ("leaving", "gone")

    @property
    def is_gone(self) -> bool:
        return self.departure == "gone"

    @property
    def pool(self) -> str:
        return pool_of(self.name) if self.role != ROUTER else ""


class Roster:
    def __init__(
        self,
        roles: Mapping[str, str],
        saved: Mapping[str, Any] | None = None,
        models: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`roles`: name -> ROUTER or a worker's role, in the order to show them. `saved`: an earlier controller's, who
        knew who is there by then. `models`: of workers, those that are not the cluster's own."""
        members = [Member(name=name, role=role, model=models.get(name, "")) for name, role in roles.items()]
        self._members = {member.name: member for member in members if saved is None}
        self.was_ready = False  # all of them, at some time
        self.version = Version(epoch=1)  # of the newest change, so that a watcher can wait for the next one
        if saved is not None:
            self.was_ready = saved["was_ready"]
            self.version = Version(epoch=saved["epoch"] + 1)
            for kept in saved["members"]:
                served_as = tuple(kept["served_as"]) if kept["served_as"] else None
                known = {key: kept[key] for key in Member.__slots__ if key in kept}  # another version may have noted it
                self._members[kept["name"]] = Member(**{**known, "served_as": served_as})

    @property
    def saved(self) -> dict[str, Any]:
        """Plain data from which the next controller goes on."""
        members = [asdict(member) for member in self._members.values()]
        return {"epoch": self.version.epoch, "was_ready": self.was_ready, "members": members}

    def on_event(self, event: Mapping[str, Any]) -> bool:
        """Take a ServiceEvent in, sent or asked for. True if the member's life has changed: it is another process, or
        at another stage."""
        member = self._members.get(event["name"])
        if member is None or event["incarnation"] in member.past:
            return False
        said = {key: event[key] for key in SAID}
        before = {key: getattr(member, key) for key in SAID}
        if said == before:
            return False
        if said["incarnation"] != before["incarnation"]:
            if member.starts and member.stage != "lost":
                _note_death(member, "its process ended")
            member.starts += 1
            _end_life(member)
        for key, value in said.items():
            setattr(member, key, value)
        if member.is_ready:
            member.served_as, member.served_http = (member.address, member.incarnation), member.http
            self.was_ready = self.was_ready or all(other.is_ready for other in self._members.values())
        self._note_change()
        self._give_up_if_hopeless(member, "its process ended")
        return any(said[key] != before[key] for key in ("incarnation", "stage"))

    def on_lost(self, name: str, incarnation: str, reason: str) -> None:
        """Its process ended. It may come back as another incarnation."""
        member = self._members[name]
        if member.incarnation != incarnation or member.stage in ("failed", "ended", "lost"):
            return
        _note_death(member, reason)
        self._set(member, "lost", f"{reason} (it was {_doing(member)})")
        self._give_up_if_hopeless(member, reason)

    def on_killed(self, name: str, reason: str) -> None:
        """It is sent a SIGKILL: whatever its process says from now on is not believed. Another one is started."""
        member = self._members[name]
        if member.stage != "lost":
            _note_death(member, reason)
        _end_life(member)
        self._set(member, "lost", f"killed: {reason} (it was {_doing(member)})")
        self._give_up_if_hopeless(member, reason)

    def _give_up_if_hopeless(self, member: Member, reason: str) -> None:
        """Whoever waits for the first start is told soon; a cluster that has served goes on trying."""
        if member.deaths >= MAX_LOAD_DEATHS and member.served_as is None and not self.was_ready:
            self._set(member, "failed", f"it died {member.deaths} times while loading: {reason}")

    def on_served_well(self, name: str) -> None:
        """It has been ready for SERVED_WELL_S: what it died of before is forgotten."""
        member = self._members[name]
        if member.deaths:
            member.deaths, member.last_death = 0, ""
            self._note_change()

    def on_failed(self, name: str, reason: str) -> None:
        """It will not come back by itself."""
        self._set(self._members[name], "failed", reason)

    def is_to_be_replaced(self, event: Mapping[str, Any]) -> bool:
        """Whether who says this has failed and is still there, in a cluster that has served. The controller that heard
        it first may have died before it did anything."""
        member = self._members.get(event["name"])
        has_failed = member is not None and member.stage == "failed" and member.incarnation == event["incarnation"]
        return has_failed and self.was_ready

    def load_delay_s(self, name: str) -> float:
        """How long a process that was just started waits before it loads: after the second death twice as long each
        time."""
        deaths = self._members[name].deaths
        return min(MAX_LOAD_DELAY_S, 2.0 ** (deaths - 2)) if deaths > 1 else 0.0

    def workers(self) -> list[WorkerEntry]:
        """Every worker that has been ready, lost ones included: a router knows better and sooner than this roster
        whether it can reach one."""
        return [
            WorkerEntry(m.name, m.role, *m.served_as, self._trouble(m), m.is_leaving, m.model)
            for m in self._members.values()
            if m.role != ROUTER and m.served_as is not None and not m.is_gone
        ]

    def router_names(self) -> list[str]:
        return [m.name for m in self._members.values() if m.role == ROUTER]

    def worker_names(self) -> list[str]:
        return [m.name for m in self._members.values() if m.role != ROUTER]

    def member(self, name: str) -> Member:
        return self._members[name]

    def __contains__(self, name: str) -> bool:
        return name in self._members

    # how many there are to be

    def staying(self, pool: str) -> list[str]:
        """Of a pool, the first numbers first."""
        return [member.name for member in self._pool(pool) if not member.is_leaving and not member.is_stand_in]

    def stand_ins(self, pool: str) -> list[str]:
        """Of a pool, those that stay while others are replaced."""
        return [member.name for member in self._pool(pool) if not member.is_leaving and member.is_stand_in]

    def going(self, pool: str, replicas: int) -> list[str]:
        """Who leaves if it is to have so many. In a pool of none nobody stands in."""
        return self.staying(pool)[replicas:] + ([] if replicas else self.stand_ins(pool))

    @property
    def leaving(self) -> set[str]:
        return {member.name for member in self._members.values() if member.is_leaving}

    def pending(self, pool: str) -> list[Member]:
        """Of a pool, who is not yet, or still, there."""
        return [member for member in self._pool(pool) if member.is_leaving or not member.is_ready]

    def _pool(self, pool: str) -> list[Member]:
        return sorted((m for m in self._members.values() if m.pool == pool), key=lambda m: int(m.name[len(pool) + 1 :]))

    def is_being_ended(self, pool: str) -> bool:
        """Whether a worker of the pool has been left, whose name is not free yet."""
        return any(member.is_gone for member in self._pool(pool))

    def resize(self, pool: str, role: str, replicas: int, model: str = "") -> list[str]:
        """Have so many in it: the last ones leave, and who leaves comes back before another is added. Returns who is
        added."""
        names = self.staying(pool)
        for name in self.going(pool, replicas):
            self.set_leaving(name)
        missing = max(0, replicas - len(names))
        own = [member for member in self._pool(pool) if not member.is_stand_in]
        leaving = [member.name for member in own if member.is_leaving and not member.is_gone]
        back = leaving[:missing]
        for name in back:
            self.set_leaving(name, undo=True)
        return [self.add(pool, role, model) for _ in range(missing - len(back))]

    def add(self, pool: str, role: str, model: str = "", *, is_stand_in: bool = False) -> str:
        """One more, of the first name that is free, which is returned."""
        name = self.free_name(pool)
        self._members[name] = Member(name=name, role=role, model=model, is_added=True, is_stand_in=is_stand_in)
        self._note_change()
        return name

    def free_name(self, pool: str) -> str:
        return next(name for i in count() if (name := f"{pool}-{i}") not in self._members)

    def workers_now(self) -> list[Member]:
        """By pool and number."""
        pools = dict.fromkeys(member.pool for member in self._members.values() if member.role != ROUTER)
        return [member for pool in pools for member in self._pool(pool)]

    def set_leaving(self, name: str, *, undo: bool = False) -> None:
        self._members[name].departure = "returning" if undo else "leaving"
        self._note_change()

    def set_gone(self, name: str) -> None:
        self._members[name].departure = "gone"
        self._note_change()

    def on_told_of_departure(self, name: str) -> None:
        """Its process knows whether it leaves."""
        if self._members[name].departure == "returning":
            self._members[name].departure = ""

    def remove(self, name: str) -> None:
        """It has left."""
        del self._members[name]
        self._note_change()

    def snapshot(self) -> dict[str, Any]:
        """Plain data for whoever watches: version, is_ready, failed (sentences), members."""
        members = self._members.values()
        return {
            "version": self.version,
            "is_ready": all(member.is_ready for member in members),
            "has_crashed": any(member.stage == "failed" and member.deaths > 0 for member in members),
            "failed": [f"{member.name}: {member.reason}" for member in members if member.stage == "failed"],
            "members": [asdict(member) for member in members],
        }

    def _trouble(self, member: Member) -> str:
        if not member.deaths:
            return ""
        delay_s = self.load_delay_s(member.name)
        times = "once" if member.deaths == 1 else f"{member.deaths} times one after another"
        wait = f", so that it waits {delay_s:g} s before it loads" if delay_s and not member.is_ready else ""
        return f"it died {times}{wait}; the last time: {member.last_death}"

    def _set(self, member: Member, stage: str, reason: str) -> None:
        member.stage, member.fraction, member.reason = stage, 0.0, reason
        self._note_change()

    def _note_change(self) -> None:
        self.version = self.version._replace(change=self.version.change + 1)


def _end_life(member: Member) -> None:
    if member.incarnation and member.incarnation not in member.past:
        member.past = [*member.past, member.incarnation][-MAX_PAST:]


def _note_death(member: Member, reason: str) -> None:
    member.deaths += 1
    member.last_death = f"{reason} (it was {_doing(member)})"


def _doing(member: Member) -> str:
    return "ready" if member.is_ready else f"at {member.stage}"


def roles_of(workers: Iterable[tuple[str, str]], num_routers: int) -> dict[str, str]:
    """Routers first, then workers (name, role) in the order given."""
    return {f"router-{i}": ROUTER for i in range(num_routers)} | dict(workers)
