"""What is waited for, and for how long, where Ray has no room."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.deploy.changes.rolling import MOST_REFUSALS, MOST_STALLED, Rolling
from cluster.deploy.changes.running_spec import RunningSpec
from cluster.deploy.roster import Member, Roster, roles_of
from cluster.router.takers import RouterStanding
from cluster.spec.load import parse_spec
from cluster.spec.pool import PoolSpec
from cluster.spec.resolve import WorkerPlan, resolve

pytestmark = pytest.mark.unit

SPEC = parse_spec({"model": "m", "pools": [{"role": "prefill"}, {"role": "decode"}]})


class Host:
    def __init__(self) -> None:
        self.has = False
        self.asked = 0
        self.left: list[str] = []
        self.started: list[tuple[str, bool]] = []

    async def has_room(self, plan: WorkerPlan) -> bool:
        self.asked += 1
        return self.has

    async def start_worker(self, pool: PoolSpec, *, is_stand_in: bool) -> None:
        self.started.append((pool.label, is_stand_in))

    async def let_go(self, name: str) -> None:
        self.left.append(name)

    async def save(self) -> None: ...


def made() -> tuple[Host, Roster, RunningSpec, Rolling]:
    running = RunningSpec.of(SPEC, resolve(SPEC, None), {}, None, "127.0.0.1")
    roster = Roster(roles_of([("prefill-0", "prefill"), ("decode-0", "decode")], 1))
    for member in roster.workers_now():
        be_ready(member, running)
    host = Host()
    return host, roster, running, Rolling(host, roster, running)


def be_ready(member: Member, running: RunningSpec) -> None:
    member.stage, member.incarnation, member.made_by = "ready", member.name, running.made_by(member.pool)
    member.served_as = ("h:1", member.name)


def routers(roster: Roster) -> Any:
    return {"router-0": RouterStanding({}, {each.name: each.incarnation for each in roster.workers_now()})}


async def test_a_worker_of_a_model_that_went_is_not_taken_for_anothers() -> None:
    """It runs on for its last requests."""
    _, roster, _, rolling = made()
    member = next(each for each in roster.workers_now() if each.pool == "decode")
    member.model = "gone"
    assert rolling.progress == (1, 2)


async def test_room_that_comes_back_only_some_time_later_is_waited_for() -> None:
    host, roster, running, rolling = made()
    running.roll(["decode"], None)
    for _ in range(MOST_REFUSALS - 1):
        await rolling.step(routers(roster))
        assert running.reason == "looking for room for one more in decode"
    host.has = True
    await rolling.step(routers(roster))
    assert host.started == [("decode", True)]


async def test_without_room_the_only_one_is_not_touched_and_it_stops() -> None:
    host, roster, running, rolling = made()
    running.roll(["decode"], None)
    while running.is_rolling:
        await rolling.step(routers(roster))
    assert host.asked == MOST_REFUSALS
    assert running.reason.startswith("decode-0 is the only worker for decode")
    assert (host.left, host.started) == ([], [])


async def test_who_has_become_the_only_one_for_another_phase_is_not_touched_and_its_stand_in_goes() -> None:
    """The roles of both were changed since they were started."""
    host, roster, running, rolling = made()
    host.has = True
    takers = {"prefill": {"decode-0": True}, "decode": {"prefill-0": True}}
    running.roll(["prefill"], None)
    ready = {each.name: each.incarnation for each in roster.workers_now()}
    await rolling.step({"router-0": RouterStanding(takers, ready)})
    assert host.started == [("prefill", True)]
    be_ready(roster.member(roster.add("prefill", "prefill", is_stand_in=True)), running)
    takers["prefill"]["prefill-1"] = True
    ready = {each.name: each.incarnation for each in roster.workers_now()}
    while running.is_rolling:
        await rolling.step({"router-0": RouterStanding(takers, ready)})
    assert running.reason.startswith("prefill-0 is the only worker for decode")
    assert host.left == ["prefill-1"]


async def test_a_stand_in_makes_room_for_one_that_waits_for_it() -> None:
    host, roster, running, rolling = made()
    running.sizes["decode"] = 2
    running.begin(None)
    be_ready(roster.member(roster.add("decode", "decode", is_stand_in=True)), running)
    roster.member(roster.add("decode", "decode")).made_by = running.made_by("decode")
    for _ in range(MOST_STALLED + 1):
        assert host.left == []
        await rolling.step(routers(roster))
        assert running.reason in ("decode-2 is at waiting", "")
    assert host.left == ["decode-1"]


async def test_one_that_stands_in_goes_though_nobody_is_replaced_unless_it_is_needed() -> None:
    host, roster, running, rolling = made()
    be_ready(roster.member(roster.add("decode", "decode", is_stand_in=True)), running)
    ready = {each.name: each.incarnation for each in roster.workers_now()}
    only = {"router-0": RouterStanding({"decode": {"decode-1": True}}, ready)}
    await rolling.dismiss({"router-0": None})
    await rolling.dismiss(only)
    assert host.left == []
    running.sizes["decode"] = 0
    await rolling.dismiss(only)
    running.sizes["decode"] = 1
    await rolling.dismiss({"router-0": RouterStanding({"decode": {"decode-0": True, "decode-1": True}}, ready)})
    assert host.left == ["decode-1", "decode-1"]


def test_what_a_controller_of_another_version_kept_is_read() -> None:
    _, _, running, _ = made()
    running.resize("decode", 3, "kvrelay scale")
    saved = running.saved | {"mood": "good"}
    del saved["rolls"]
    _, _, again, _ = made()
    again.restore(saved)
    assert again.saved == running.saved
