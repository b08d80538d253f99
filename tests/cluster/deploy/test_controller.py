"""The controller's watch over members whose Ray is in trouble. Actors are fakes; no Ray is started."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RpcError

from cluster.deploy import controller as controllers
from cluster.deploy.controller import Controller
from cluster.deploy.roster import Roster
from cluster.spec.load import parse_spec
from cluster.spec.resolve import resolve

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
        self.told: list[Any] = []
        self.event = {"name": name, "incarnation": "a", "stage": "ready", "fraction": 1.0, "address": "h:1"}
        self.event |= {"http": "", "pid": 7, "host": "h", "reason": ""}
        self.describe = remote(lambda: self.event | {"turns": 0, "drained": self.is_drained})
        self.secrets = remote(lambda: None)
        self.set_workers = remote(lambda _, workers: self.told.append(workers))
        self.is_drained = False
        self.drains: list[bool] = []  # the undo of each
        self.drain = remote(self.drains.append)
        self.stop = remote(lambda grace_s: None)


@pytest.fixture
def members(monkeypatch: pytest.MonkeyPatch) -> dict[str, Member]:
    """Ray names each only at the second time that it is asked."""
    there: dict[str, Any] = {name: Member(name) for name in ("router-0", "decode-0")}
    asked: set[str] = set()

    def find_actor(name: str) -> Member | None:
        if name not in asked:
            asked.add(name)
            raise RpcError("the GCS is being restarted")
        return there.get(name)

    monkeypatch.setattr(controllers, "find_actor", find_actor)
    monkeypatch.setattr(controllers, "_restored", lambda: (Checkpoint(), None))
    monkeypatch.setattr(controllers, "log_into", lambda *_: None)
    monkeypatch.setattr(controllers, "PROBE_S", 0.01)
    return there


ROLES = {"router-0": "router", "decode-0": "decode"}
POOLS = [{"role": "prefill", "replicas": 1}, {"role": "decode", "replicas": 1}]
SPEC = resolve(parse_spec({"model": "m", "pools": POOLS, "router": {"host": "127.0.0.1"}}), None)


async def run_until(is_done: Callable[[], object]) -> None:
    async with running():
        await until(is_done)


async def until(is_done: Callable[[], object]) -> None:
    async with asyncio.timeout(10.0):
        while not is_done():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def running(launch: Callable[[str], None] = print) -> AsyncIterator[Controller]:
    controller = Controller(SPEC, log_dir="", launch=launch)
    try:
        yield controller
    finally:
        for task in controller._tasks:
            task.cancel()
        await controller._awake.stop()


def test_members_are_watched_though_ray_could_not_name_them_at_first(members: dict[str, Member]) -> None:
    asyncio.run(run_until(lambda: members["router-0"].told))
    assert members["router-0"].told[-1] == [("decode-0", "decode", "h:1", "a", "", False)]


async def test_a_pool_grows_and_is_left_again(members: dict[str, Member], monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[object] = []

    def kill(handle: Member, no_restart: bool) -> None:
        killed.append((handle, no_restart))
        del members[str(handle.event["name"])]

    monkeypatch.setattr("ray.kill", kill)
    created: list[str] = []

    def launch(name: str) -> None:
        created.append(name)
        if len(created) == 1:
            raise ValueError("Ray is in trouble")
        members[name] = Member(name)

    def told() -> list[str]:
        return [entry[0] for entry in members["router-0"].told[-1]] if members["router-0"].told else []

    async with running(launch) as controller:
        await until(lambda: told() == ["decode-0"])
        assert await controller.scale("decode", 2, None) == ""
        assert await controller.pending("decode") == [("decode-1", "waiting", "wants CPU 1 of Ray")]
        await until(lambda: told() == ["decode-0", "decode-1"])
        assert created == ["decode-1", "decode-1"]
        assert await controller.scale("decode", 2, None) == ""
        assert await controller.pending("decode") == []

        assert await controller.scale("decode", 1, None) == ""
        assert await controller.pending("decode") == [("decode-1", "leaving", "")]
        await until(lambda: members["decode-1"].drains)
        assert await controller.scale("decode", 2, None) == ""
        assert await controller.pending("decode") == [], "it comes back"
        await until(lambda: members["decode-1"].drains[-1:] == [True])
        assert not killed

        assert await controller.remove("router-0", None) is None
        assert await controller.remove("decode-0", None) == ""
        await until(lambda: members["decode-0"].drains)
        gone, knew = members["decode-0"], list[list[str]]()
        gone.stop = remote(lambda grace_s: knew.append(told()))
        gone.is_drained = True
        assert await controller.pending("decode") == [("decode-0", "leaving", "")]
        await until(lambda: "decode-0" not in controller._roster)
        assert killed == [(gone, True)]
        assert knew == [["decode-1"]], "no router is surprised"
        assert (await controller.pools())["decode"] == ["decode-1"]


async def test_of_the_last_two_of_a_phase_one_stays(members: dict[str, Member]) -> None:
    """Though routers that were asked for each have not heard of the other."""
    takers = {"prefill": {"prefill-0": True}, "decode": {"decode-0": True, "decode-1": True}}
    only = "decode-1 is the only worker for decode that takes requests; start another one, or force it"
    async with running(lambda name: members.update({name: Member(name)})) as controller:
        await until(lambda: members["router-0"].told)
        await controller.scale("decode", 2, takers)
        both = await controller.scale("decode", 0, takers)
        assert both.startswith("decode-0 and decode-1 are the only workers for decode that take requests")
        await until(lambda: len(members["router-0"].told[-1]) == 2)
        answers = await asyncio.gather(controller.remove("decode-0", takers), controller.remove("decode-1", takers))
        assert list[str | None](answers) == ["", only]
        assert await controller.scale("decode", 0, takers) == only
        await until(lambda: [entry[0] for entry in members["router-0"].told[-1] if entry[-1]] == ["decode-0"])
        assert await controller.take_back("decode-0")
        assert await controller.remove("decode-1", takers) == ""
        assert await controller.remove("decode-0", None) == "", "it is forced"


async def test_one_that_leaves_and_dies_is_not_started_again(
    members: dict[str, Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a controller that is started in the middle of it goes on."""
    killed: list[object] = []
    monkeypatch.setattr("ray.kill", lambda handle, no_restart: killed.append(no_restart))
    last = Roster(ROLES)
    for name in ROLES:
        last.on_event(members[name].event)
    last.set_leaving("decode-0")
    monkeypatch.setattr(controllers, "_restored", lambda: (Checkpoint(), last.saved))
    async with running() as controller:
        await until(lambda: members["decode-0"].drains)
        members["decode-0"].event |= {"incarnation": "b", "stage": "started", "address": ""}
        await until(lambda: killed)
        assert killed == [True]
        assert (await controller.pools())["decode"] == []
        assert members["router-0"].told[-1] == []


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


async def test_a_name_is_given_again_when_ray_knows_no_such_actor(
    members: dict[str, Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not to one whose process is being ended, and which may be hard to end."""
    kills: list[object] = []

    def kill(handle: Member, no_restart: bool) -> None:
        kills.append(handle)
        if len(kills) == 1:
            raise RpcError("the GCS is being restarted")
        del members["decode-0"]

    monkeypatch.setattr("ray.kill", kill)
    created: list[str] = []

    def launch(name: str) -> None:
        created.append(name)
        members[name] = Member(name)

    async with running(launch) as controller:
        await until(lambda: members["router-0"].told)
        members["decode-0"].is_drained = True
        assert await controller.remove("decode-0", None) == ""
        await until(lambda: controller._roster.member("decode-0").is_gone)
        assert not await controller.take_back("decode-0"), "it is too late"
        await controller.scale("decode", 1, None)
        await until(lambda: created)
        assert created == ["decode-1"]
        await until(lambda: "decode-0" not in controller._roster)
        assert len(kills) == 2
        await controller.scale("decode", 2, None)
        await until(lambda: created == ["decode-1", "decode-0"])
