"""The controller's watch over members whose Ray is in trouble. Actors are fakes; no Ray is started."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RpcError

from cluster.deploy import controller as controllers
from cluster.deploy.controller import Controller
from cluster.deploy.roster import Roster

pytestmark = pytest.mark.unit


class Checkpoint:
    async def save(self, _: object) -> None: ...


def remote(call: Callable[..., object]) -> Any:
    async def answer(*arguments: object) -> object:
        return call(*arguments)

    return SimpleNamespace(remote=answer)


class Member:
    """Its describe and set_workers; what it is told stands in `told`."""

    def __init__(self, name: str) -> None:
        self.told: list[object] = []
        self.event = {"name": name, "incarnation": "a", "stage": "ready", "fraction": 1.0, "address": "h:1"}
        self.event |= {"pid": 7, "host": "h", "reason": ""}
        self.describe = remote(lambda: self.event | {"turns": 0})
        self.secrets = remote(lambda: None)
        self.set_workers = remote(lambda _, workers: self.told.append(workers))


@pytest.fixture
def members(monkeypatch: pytest.MonkeyPatch) -> dict[str, Member]:
    """Ray names each only at the second time that it is asked."""
    there = {name: Member(name) for name in ("router-0", "decode-0")}
    asked: set[str] = set()

    def find_actor(name: str) -> Member:
        if name not in asked:
            asked.add(name)
            raise RpcError("the GCS is being restarted")
        return there[name]

    monkeypatch.setattr(controllers, "find_actor", find_actor)
    monkeypatch.setattr(controllers, "_restored", lambda: (Checkpoint(), None))
    monkeypatch.setattr(controllers, "log_into", lambda *_: None)
    monkeypatch.setattr(controllers, "PROBE_S", 0.01)
    return there


ROLES = {"router-0": "router", "decode-0": "decode"}


async def run_until(is_done: Callable[[], object]) -> None:
    controller = Controller(ROLES, drain_s=1.0, liveness_timeout_s=5.0, load_timeout_s=60.0, log_dir="")
    async with asyncio.timeout(10.0):
        while not is_done():
            await asyncio.sleep(0.01)
    for task in controller._tasks:
        task.cancel()
    await controller._awake.stop()


def test_members_are_watched_though_ray_could_not_name_them_at_first(members: dict[str, Member]) -> None:
    asyncio.run(run_until(lambda: members["router-0"].told))
    assert members["router-0"].told[-1] == [("decode-0", "decode", "h:1", "a", "")]


def test_what_failed_is_replaced_by_the_next_controller(
    members: dict[str, Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that heard of it had noted it, and died before it could do anything."""
    last = Roster(ROLES)
    for name in ROLES:
        last.on_event(members[name].event)
    members["decode-0"].event |= {"stage": "failed", "reason": "no memory"}
    last.on_event(members["decode-0"].event)
    killed: list[object] = []
    monkeypatch.setattr(controllers, "_restored", lambda: (Checkpoint(), last.saved))
    monkeypatch.setattr("ray.kill", lambda handle, no_restart: killed.append(handle))
    asyncio.run(run_until(lambda: killed))
    assert killed == [members["decode-0"]]
