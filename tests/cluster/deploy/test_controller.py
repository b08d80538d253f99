"""The controller's watch over members whose Ray is in trouble. Actors are fakes; no Ray is started."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, RpcError

from cluster.deploy import controller as controllers
from cluster.deploy.changes import changes
from cluster.deploy.changes.running_spec import RunningSpec
from cluster.deploy.controller import Controller
from cluster.deploy.liveness import Liveness
from cluster.deploy.roster import Roster
from cluster.router.takers import RouterStanding
from cluster.spec.load import parse_spec
from cluster.spec.model import ClusterSpec
from cluster.spec.resolve import WorkerPlan, resolve

pytestmark = pytest.mark.unit


class Checkpoint:
    saved_epoch: int | None = 1

    async def epoch(self) -> int | None:
        return self.saved_epoch

    async def save(self, _: object) -> None: ...


def remote(call: Callable[..., object]) -> Any:
    async def answer(*arguments: object) -> object:
        return call(*arguments)

    return SimpleNamespace(remote=answer)


class Member:
    """Its describe and set_workers; what it is told stands in `told`."""

    def __init__(self, name: str) -> None:
        self.told: list[Any] = []
        self.event: dict[str, Any] = {
            "name": name,
            "incarnation": "a",
            "stage": "ready",
            "fraction": 1.0,
            "address": "h:1",
        }
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
WRITTEN = parse_spec({"model": "m", "pools": POOLS, "router": {"host": "127.0.0.1"}})
SPEC = resolve(WRITTEN, None)


async def run_until(is_done: Callable[[], object]) -> None:
    async with running():
        await until(is_done)


async def until(is_done: Callable[[], object]) -> None:
    async with asyncio.timeout(10.0):
        while not is_done():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def running(launch: Callable[[WorkerPlan], None] = print) -> AsyncIterator[Controller]:
    controller = Controller(RunningSpec.of(WRITTEN, SPEC, {}, None, "127.0.0.1"), log_dir="", launch=launch)
    try:
        yield controller
    finally:
        for task in controller._tasks:
            task.cancel()
        await controller._awake.stop()


def test_members_are_watched_though_ray_could_not_name_them_at_first(members: dict[str, Member]) -> None:
    asyncio.run(run_until(lambda: members["router-0"].told))
    assert members["router-0"].told[-1] == [("decode-0", "decode", "h:1", "a", "", False, "")]


async def test_a_pool_grows_and_is_left_again(members: dict[str, Member], monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[object] = []

    def kill(handle: Member, no_restart: bool) -> None:
        killed.append((handle, no_restart))
        del members[str(handle.event["name"])]

    monkeypatch.setattr("ray.kill", kill)
    created: list[str] = []

    def launch(plan: WorkerPlan) -> None:
        created.append(plan.name)
        if len(created) == 1:
            raise ValueError("Ray is in trouble")
        members[plan.name] = Member(plan.name)

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
        assert await controller.size("decode") == 2
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


@pytest.mark.parametrize(
    ("why_full", "kills", "told"),
    [
        ("", "", " (it was "),
        ("the disk is full", "", ", and the disk is full ("),
        ("", "the kernel has killed it", ", and the kernel has killed it ("),
    ],
)
async def test_of_a_process_that_ended_it_says_what_may_be_why(
    members: dict[str, Member], monkeypatch: pytest.MonkeyPatch, why_full: str, kills: str, told: str
) -> None:
    def die() -> None:
        raise ActorUnavailableError("it is restarted", None)

    monkeypatch.setattr(controllers, "why_full", lambda: why_full)
    members["decode-0"].describe = remote(die)
    monkeypatch.setattr(controllers, "MemoryKills", lambda: SimpleNamespace(news=lambda: kills))
    async with running() as controller:
        member = controller._roster.member("decode-0")
        await until(lambda: member.reason)
        assert member.reason.startswith(f"its process ended; its log may say why{told}")


async def test_one_that_leaves_does_not_wait_for_the_next_probe(
    members: dict[str, Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.kill", lambda handle, no_restart: members.pop(handle.event["name"]))
    async with running(lambda plan: members.update({plan.name: Member(plan.name)})) as controller:
        await controller.scale("decode", 3, None)
        await until(lambda: members["router-0"].told and len(members["router-0"].told[-1]) == 3)
        monkeypatch.setattr(controllers, "PROBE_S", 60.0)
        await asyncio.sleep(0.1)  # all are being waited for, so long
        for member in (members["decode-1"], members["decode-2"]):
            member.drain = remote(lambda undo, of=member: setattr(of, "is_drained", True))
        assert await controller.remove("decode-2", None) == ""
        await until(lambda: "decode-2" not in controller._roster)
        assert await controller.scale("decode", 1, None) == ""
        await until(lambda: "decode-1" not in controller._roster)


async def test_of_the_last_two_of_a_phase_one_stays(members: dict[str, Member]) -> None:
    """Though routers that were asked for each have not heard of the other."""
    takers = {"prefill": {"prefill-0": True}, "decode": {"decode-0": True, "decode-1": True}}
    only = "decode-1 is the only worker for decode that takes requests; start another one, or force it"
    async with running(lambda plan: members.update({plan.name: Member(plan.name)})) as controller:
        await until(lambda: members["router-0"].told)
        await controller.scale("decode", 2, takers)
        both = await controller.scale("decode", 0, takers)
        assert both.startswith("decode-0 and decode-1 are the only workers for decode that take requests")
        await until(lambda: len(members["router-0"].told[-1]) == 2)
        answers = await asyncio.gather(controller.remove("decode-0", takers), controller.remove("decode-1", takers))
        assert list[str | None](answers) == ["", only]
        assert await controller.scale("decode", 0, takers) == only
        await until(lambda: [entry[0] for entry in members["router-0"].told[-1] if entry.is_leaving] == ["decode-0"])
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


async def test_what_failed_keeps_its_reason_though_what_it_said_before_is_being_noted_still(
    members: dict[str, Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.kill", lambda *_, **__: None)
    async with running() as controller:
        controller._roster.was_ready = True
        said = members["decode-0"].event | {"incarnation": "b"}
        members["decode-0"].event = said | {"stage": "failed", "reason": "no memory"}
        monkeypatch.setattr(controller, "save", lambda: asyncio.sleep(0))
        await asyncio.gather(
            controller.on_event(said | {"stage": "weights"}), controller.on_event(members["decode-0"].event)
        )
        assert controller._roster.member("decode-0").last_death.startswith("it failed: no memory")


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

    def launch(plan: WorkerPlan) -> None:
        created.append(plan.name)
        members[plan.name] = Member(plan.name)

    async with running(launch) as controller:
        await until(lambda: members["router-0"].told)
        members["decode-0"].is_drained = True
        assert await controller.remove("decode-0", None) == ""
        await until(lambda: controller._roster.member("decode-0").is_gone)
        assert not await controller.take_back("decode-0"), "it is too late"
        both = controller.scale("decode", 1, None), controller.scale("decode", 2, None)
        await asyncio.gather(*both)
        assert len(kills) == 2
        await until(lambda: created == ["decode-0", "decode-1"])


@pytest.mark.parametrize("is_replaced", [False, True])
async def test_who_hangs_is_killed_once_ray_answers_and_not_by_a_controller_that_was_replaced(
    members: dict[str, Member], monkeypatch: pytest.MonkeyPatch, is_replaced: bool
) -> None:
    """One that was cut off from all would kill them when it no longer is: Ray keeps what it cannot do yet."""
    checkpoint, killed, ended = Checkpoint(), list[str](), list[int]()
    checkpoint.saved_epoch = None
    monkeypatch.setattr(controllers, "_restored", lambda: (checkpoint, None))
    monkeypatch.setattr("ray.kill", lambda handle, no_restart: killed.append(handle.event["name"]))

    def end(code: int) -> None:
        ended.append(code)
        raise ProcessLookupError

    monkeypatch.setattr("os._exit", end)
    async with running() as controller:
        controller._liveness = Liveness(timeout_s=0.05, load_timeout_s=60.0)  # members' loops do not turn
        await until(lambda: members["router-0"].told)
        await asyncio.sleep(0.2)
        assert not killed
        checkpoint.saved_epoch = controller._roster.version.epoch + is_replaced
        await until(lambda: "router-0" in killed or ended)
        assert bool(killed) != is_replaced


class RouterMember(Member):
    """It uses every worker that it was told of, and keeps the specs that it was told."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.specs: list[ClusterSpec] = []
        self.why = ""
        self.take_spec = remote(self.specs.append)
        self.why_not = remote(lambda spec: self.why)
        self.standing = remote(lambda: RouterStanding({}, {entry[0]: entry[3] for entry in self.told[-1]}))


@pytest.fixture
def served(members: dict[str, Member], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[WorkerPlan]]:
    """Plans of workers that are started, each of them ready at once and drained as soon as it is told."""
    created: list[WorkerPlan] = []

    def start(name: str) -> None:
        member = members[name] = Member(name)
        member.event["incarnation"] = f"{name}-{len(created)}"
        member.drain = remote(lambda undo: setattr(member, "is_drained", not undo))

    def launch(plan: WorkerPlan) -> None:
        created.append(plan)
        start(plan.name)

    def kill(handle: Member, no_restart: bool) -> None:
        if no_restart:
            del members[str(handle.event["name"])]
        else:
            handle.event["incarnation"] += "-again"

    monkeypatch.setattr("ray.kill", kill)
    monkeypatch.setattr(changes, "STEP_S", 0.01)
    monkeypatch.setattr(controllers, "has_room", lambda plan, loopback: True)
    members["router-0"] = RouterMember("router-0")
    for name in ("prefill-0", "decode-0"):
        start(name)
    launched.append(launch)
    yield created
    launched.clear()


launched: list[Callable[[WorkerPlan], None]] = []  # of the fixture above


def wanted(**decode: Any) -> dict[str, Any]:
    pools = [{"role": "prefill", "replicas": 1}, {"role": "decode", "replicas": 1, **decode}]
    return {"model": "m", "pools": pools, "router": {"host": "127.0.0.1", "max_calls": 7}}


async def settled(controller: Controller) -> dict[str, Any]:
    await until(lambda: not controller._running.is_rolling)
    return dict((await controller.spec())["rollout"])


async def test_another_spec_is_taken_by_routers_and_workers(
    members: dict[str, Member], served: list[WorkerPlan]
) -> None:
    router: Any = members["router-0"]
    async with running(launched[0]) as controller:
        await until(lambda: len(router.told[-1:] and router.told[-1]) == 2)
        looked = await controller.apply_spec(wanted(watermark=0.5), {}, None, True)
        assert [change["how"] for change in looked["changes"]] == ["now", "rolling"]
        assert not router.specs, "it was only looked at"
        done = await controller.apply_spec(wanted(watermark=0.5), {"router.max_calls": "c:3"}, None, False)
        assert done == looked
        assert router.specs[-1].router.max_calls == 7
        assert await settled(controller) == {"running": False, "reason": "", "current": 2, "total": 2}
        assert [(plan.name, plan.options.policy.watermark) for plan in served] == [("decode-1", 0.5), ("decode-0", 0.5)]
        assert (await controller.pools())["decode"] == ["decode-0"]
        assert await controller.apply_spec(wanted(watermark=0.5), {}, None, True) == {"why_not": "", "changes": []}
        rows = {key: (value, source) for key, value, source in (await controller.spec())["rows"]}
        assert rows["router.max_calls"] == (7, "c:3")
        assert await controller.roll(["decode"], 1) == ""
        await settled(controller)
        assert [plan.name for plan in served[2:]] == ["decode-1", "decode-0"]


async def test_a_pool_goes_whose_worker_waits_for_its_place(
    members: dict[str, Member], served: list[WorkerPlan], caplog: pytest.LogCaptureFixture
) -> None:
    """`kvrelay up`, which watches, would end the cluster if it got no answer."""
    router: Any = members["router-0"]
    pools = [*wanted()["pools"], {"role": "mixed", "replicas": 1}]
    asked = asyncio.Event()

    async def hang() -> None:
        asked.set()
        await asyncio.sleep(3600)

    async with running(lambda plan: None) as controller:
        await until(lambda: len(router.told[-1:] and router.told[-1]) == 2)
        await controller.apply_spec({**wanted(), "pools": pools}, {}, None, False)
        await until(lambda: "mixed-0" in controller._roster)
        assert await controller.pending("mixed") == [("mixed-0", "waiting", "wants CPU 1 of Ray")]
        router.standing = SimpleNamespace(remote=hang)
        await until(asked.is_set)  # no step is under way that would let somebody go
        await controller.apply_spec(wanted(), {}, None, False)
        snapshot = await controller.wait_change((0, 0), 0.0)
        assert [(each["name"], each["reason"]) for each in snapshot["members"]][-1] == ("mixed-0", "")
        assert await controller.pending("mixed") == [("mixed-0", "waiting", "")]
        await asyncio.sleep(0.05)  # looks after it
        assert "the watch over" not in caplog.text


async def test_routers_go_by_a_spec_that_is_taken_whoever_had_them_told(
    members: dict[str, Member], served: list[WorkerPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sign of life while it is saved has them told of it, which takes a while."""
    router: Any = members["router-0"]

    async def take_spec(spec: ClusterSpec) -> None:
        await asyncio.sleep(0.05)
        router.specs.append(spec)

    router.take_spec = SimpleNamespace(remote=take_spec)
    async with running(launched[0]) as controller:
        await until(lambda: len(router.told[-1:] and router.told[-1]) == 2)

        async def save(_: object) -> None:
            await controller.on_event(router.event)

        monkeypatch.setattr(controller._checkpoint, "save", save)
        await controller.apply_spec(wanted(), {}, None, False)
        assert [spec.router.max_calls for spec in router.specs] == [7]


async def test_what_one_router_cannot_take_nobody_is_told(members: dict[str, Member], served: list[WorkerPlan]) -> None:
    router: Any = members["router-0"]
    async with running(launched[0]) as controller:
        await until(lambda: router.told)
        for spec, why in (
            (wanted(watermark=5), "pools[1].watermark is 5; give a number below 1"),
            ({**wanted(), "page_size": 8}, "page_size is null, and 8 cannot replace it while the cluster runs"),
            ({**wanted(), "replan": "act", "router": {"slo_ttft_ms": 5}}, "replan is act, and no `kvrelay up` stays"),
        ):
            assert (await controller.apply_spec(spec, {}, None, False))["why_not"].startswith(why)
        router.why = "no such file"
        assert (await controller.apply_spec(wanted(), {}, None, False))["why_not"] == "router-0: no such file"
        assert await controller.roll(["chat"], None) == "there is no pool 'chat'; there are prefill, decode"
        assert (router.specs, controller._running.number, controller._running.is_rolling) == ([], 0, False)


async def test_a_router_that_says_nothing_while_it_looks_at_a_change_is_no_consent(
    members: dict[str, Member], served: list[WorkerPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is not there is not asked."""
    monkeypatch.setattr(changes, "CHECK_TIMEOUT_S", 0.02)
    router: Any = members["router-0"]

    def die(_: ClusterSpec) -> str:
        raise ActorUnavailableError("its process ended", None)

    adapter = {"a": "/adapters/a"}
    async with running(launched[0]) as controller:
        await until(lambda: router.told)
        for why_not in (remote(die), SimpleNamespace(remote=lambda _: asyncio.sleep(3600))):
            router.why_not = why_not
            assert (await controller.set_adapters(adapter, [])).startswith("router-0: it did not answer, and nothing")
            assert "did not answer" in (await controller.apply_spec(wanted(), {}, None, False))["why_not"]
        assert (router.specs, controller._running.number) == ([], 0)
        controller._roster.member("router-0").stage = "started"
        assert await controller.set_adapters(adapter, []) == ""
        assert controller._running.number == 1


async def test_who_is_taken_back_while_others_are_replaced_stays(
    members: dict[str, Member], served: list[WorkerPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(launched[0]) as controller:
        await until(lambda: members["router-0"].told)
        await controller.scale("decode", 2, None)
        monkeypatch.setattr(controller._changes._rolling, "step", lambda routers: asyncio.sleep(0))
        await controller.roll(["decode"], None)
        assert await controller.remove("decode-1", None) == ""
        assert await controller.size("decode") == 1
        assert await controller.take_back("decode-1")
        assert await controller.size("decode") == 2
        await controller.let_go("decode-0")  # another is to have its place
        controller._running.settle("decode-2 does not become ready")
        assert await controller.take_back("decode-0")
        assert await controller.size("decode") == 2


async def test_the_next_controller_goes_on_with_what_was_begun(
    members: dict[str, Member], served: list[WorkerPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(launched[0]) as first:
        await until(lambda: members["router-0"].told)
        await until(lambda: all(first._roster.member(name).is_ready for name in members))
        monkeypatch.setattr(first, "let_go", lambda name: asyncio.sleep(3600))  # it dies here
        await first.apply_spec(wanted(watermark=0.5), {}, None, False)
        await until(lambda: served)
        saved = first._roster.saved | {"spec": first._running.saved}
    monkeypatch.setattr(controllers, "_restored", lambda: (Checkpoint(), json.loads(json.dumps(saved))))
    async with running(launched[0]) as following:
        assert following._running.is_rolling
        assert (await settled(following))["reason"] == ""
        assert [plan.name for plan in served] == ["decode-1", "decode-0"]
        assert (await following.pools())["decode"] == ["decode-0"]
        router: Any = members["router-0"]
        assert router.specs[-1].router.max_calls == 7


async def test_a_stand_in_that_does_not_become_ready_ends_it(
    members: dict[str, Member], served: list[WorkerPlan]
) -> None:
    def launch(plan: WorkerPlan) -> None:
        launched[0](plan)
        members[plan.name].event |= {"stage": "failed", "reason": "no memory"}

    async with running(launch) as controller:
        await until(lambda: len(members["router-0"].told[-1:] and members["router-0"].told[-1]) == 2)
        await controller.apply_spec(wanted(watermark=0.5), {}, None, False)
        why = (await settled(controller))["reason"]
        assert why.startswith("decode-1 does not become ready: ")
        assert "no memory" in why
        await until(lambda: "decode-1" not in controller._roster)
        assert (await controller.pools())["decode"] == ["decode-0"]
        assert controller._roster.member("decode-0").is_ready


async def test_who_stands_in_is_no_reason_to_leave_a_pool_to_nobody(
    members: dict[str, Member], served: list[WorkerPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By force nobody is left there, and what was being replaced comes to a good end."""
    takers = {"decode": {"decode-0": True, "decode-1": True}}
    async with running(launched[0]) as controller:
        await until(lambda: len(members["router-0"].told[-1:] and members["router-0"].told[-1]) == 2)
        monkeypatch.setattr(controller, "let_go", lambda name: asyncio.sleep(0.01))
        assert await controller.roll(["decode"], 1) == ""
        await until(lambda: "decode-1" in controller._roster and controller._roster.member("decode-1").is_ready)
        why = "decode-0 and decode-1 are the only workers for decode that take requests"
        assert (await controller.scale("decode", 0, takers)).startswith(why)
        assert str(await controller.remove("decode-0", takers)).startswith(why)
        assert await controller.scale("decode", 0, None) == ""
        assert [name for name, *_ in await controller.pending("decode")] == ["decode-0", "decode-1"]
        assert (await settled(controller))["reason"] == ""
        assert [name for name in controller._roster.worker_names() if name.startswith("decode")] == []
        assert await controller.scale("decode", 1, None) == ""
        assert (await controller.pools())["decode"] == ["decode-0"]
