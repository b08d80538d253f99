"""Roster knows every worker and router of one deployment: where each stands, and what the routers must be told.

It decides and remembers; the controller (cluster/deploy/controller.py) carries out. It starts nothing, asks nobody, and
reads no clock. An event of an earlier incarnation is dropped: a restarted process is another one.

    waiting -> started -> weights -> ... -> ready -> lost -> started ...
                  \\-> failed (it said so, or it died MAX_LOAD_DEATHS times before it was ever ready)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

MAX_LOAD_DEATHS = 3
ROUTER = "router"


@dataclass(slots=True, kw_only=True)
class Member:
    name: str
    role: str  # ROUTER, or a worker's
    stage: str = "waiting"
    fraction: float = 0.0
    address: str = ""
    incarnation: str = ""
    pid: int = 0
    host: str = ""
    reason: str = ""
    starts: int = 0
    deaths_in_load: int = 0  # since it was last ready
    served_as: tuple[str, str] | None = None  # address and incarnation when it was last ready

    @property
    def is_ready(self) -> bool:
        return self.stage == "ready"


class Roster:
    def __init__(self, roles: Mapping[str, str]) -> None:
        """`roles`: name -> ROUTER or a worker's role, in the order to show them."""
        self._members = {name: Member(name=name, role=role) for name, role in roles.items()}
        self.version = 0  # counts changes, so that a watcher can wait for the next one

    def on_event(self, event: Mapping[str, Any]) -> bool:
        """Take a ServiceEvent in. True if the routers must hear of it."""
        member = self._members.get(event["name"])
        if member is None:
            return False
        is_new = event["incarnation"] != member.incarnation
        if is_new and event["stage"] != "started" and member.incarnation and member.stage != "lost":
            return False
        if is_new:
            member.deaths_in_load += bool(member.starts) and member.stage not in ("ready", "lost")
            member.starts += 1
        for key in ("incarnation", "stage", "fraction", "address", "pid", "host", "reason"):
            setattr(member, key, event[key])
        if member.is_ready:
            member.deaths_in_load = 0
            member.served_as = (member.address, member.incarnation)
        self.version += 1
        self._give_up_if_hopeless(member, "its process ended")
        return member.is_ready

    def on_lost(self, name: str, incarnation: str, reason: str) -> None:
        """Its process ended. It may come back as another incarnation."""
        member = self._members[name]
        if member.incarnation != incarnation or member.stage in ("failed", "ended", "lost"):
            return
        if not member.is_ready:
            member.deaths_in_load += 1
        self._set(member, "lost", f"its process ended while it was {_doing(member)}: {reason}")
        self._give_up_if_hopeless(member, reason)

    def _give_up_if_hopeless(self, member: Member, reason: str) -> None:
        if member.deaths_in_load >= MAX_LOAD_DEATHS:
            self._set(member, "failed", f"it died {member.deaths_in_load} times while loading: {reason}")

    def on_failed(self, name: str, reason: str) -> None:
        """It will not come back by itself."""
        self._set(self._members[name], "failed", reason)

    def workers(self) -> list[tuple[str, str, str, str]]:
        """(name, role, address, incarnation) of every worker that has been ready, lost ones included: a router
        knows better and sooner than this roster whether it can reach one."""
        return [
            (m.name, m.role, *m.served_as)
            for m in self._members.values()
            if m.role != ROUTER and m.served_as is not None
        ]

    def router_names(self) -> list[str]:
        return [m.name for m in self._members.values() if m.role == ROUTER]

    def worker_names(self) -> list[str]:
        return [m.name for m in self._members.values() if m.role != ROUTER]

    def member(self, name: str) -> Member:
        return self._members[name]

    def snapshot(self) -> dict[str, Any]:
        """Plain data for whoever watches: version, is_ready, failed (sentences), members."""
        members = self._members.values()
        return {
            "version": self.version,
            "is_ready": all(member.is_ready for member in members),
            "has_crashed": any(member.stage == "failed" and member.deaths_in_load > 0 for member in members),
            "failed": [f"{member.name}: {member.reason}" for member in members if member.stage == "failed"],
            "members": [asdict(member) for member in members],
        }

    def _set(self, member: Member, stage: str, reason: str) -> None:
        member.stage, member.fraction, member.reason = stage, 0.0, reason
        self.version += 1


def _doing(member: Member) -> str:
    return "ready" if member.is_ready else f"at {member.stage}"


def roles_of(workers: Iterable[tuple[str, str]], num_routers: int) -> dict[str, str]:
    """Routers first, then workers (name, role) in the order given."""
    return {f"router-{i}": ROUTER for i in range(num_routers)} | dict(workers)
