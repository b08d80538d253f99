"""How workers are brought to what a spec wants: examples, and a random walk over what may happen meanwhile."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest

from cluster.deploy.changes.steps import Done, Drain, Standing, Start, Step, Stop, Wait, next_step
from worker.roles import PHASES, kind_of

pytestmark = pytest.mark.unit


POOLS = (("prefill", "decode"), ("mixed",), ("mixed", "decode"))


class World:
    """Workers as they stand. A worker that is started is current, and used some time later."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = dict(sizes)
        self.workers: dict[str, Standing] = {}
        self.surges: dict[str, bool | None] = {}
        self.alone: dict[str, str] = {}
        for pool, size in sizes.items():
            for _ in range(size):
                self.start(pool, is_stand_in=False, is_used=True)
        self.log: list[Step] = []

    def start(self, pool: str, *, is_stand_in: bool, is_used: bool = False) -> None:
        name = next(name for i in range(99) if (name := f"{pool}-{i}") not in self.workers)
        self.workers[name] = Standing(
            name=name,
            pool=pool,
            role=pool,
            is_current=True,
            is_used=is_used,
            is_stand_in=is_stand_in,
            trouble="at weights",
        )

    def change(self, name: str, **fields: bool | str) -> None:
        self.workers[name] = replace(self.workers[name], **fields)  # type: ignore[arg-type]

    def outdate(self, *pools: str) -> None:
        for name, worker in self.workers.items():
            if worker.pool in pools:
                self.change(name, is_current=False)

    def step(self) -> Step:
        step = next_step(self.sizes, list(self.workers.values()), self.surges, self.alone)
        self.log.append(step)
        match step:
            case Start(pool, is_stand_in):
                self.start(pool, is_stand_in=is_stand_in)
            case Drain(name):
                self.change(name, is_leaving=True)
        return step

    def settle(self) -> None:
        """All that is on its way arrives."""
        for name, worker in list(self.workers.items()):
            if worker.is_leaving:
                del self.workers[name]
            elif not worker.failure:
                self.change(name, is_used=True)

    def run(self) -> list[Step]:
        """To the end, each thing arriving at once."""
        while not isinstance(self.step(), Done | Stop):
            self.settle()
        return self.log

    def takers(self, phase: str) -> int:
        staying = (each for each in self.workers.values() if each.is_used and not each.is_leaving)
        return sum(phase in kind_of(each.role).phases for each in staying)


def test_where_there_is_room_a_stand_in_comes_first_and_names_stay() -> None:
    world = World({"prefill": 1, "decode": 2})
    world.outdate("decode")
    world.surges = {"decode": True}
    assert world.run() == [
        Start("decode", is_stand_in=True),
        Drain("decode-0"),
        Start("decode"),
        Drain("decode-1"),
        Start("decode"),
        Drain("decode-2"),
        Done(),
    ]
    assert sorted(world.workers) == ["decode-0", "decode-1", "prefill-0"]


def test_without_room_the_old_one_goes_first_unless_it_is_the_only_one() -> None:
    world = World({"prefill": 1, "decode": 2})
    world.outdate("decode", "prefill")
    world.sizes = {"decode": 2, "prefill": 1}
    *steps, last = world.run()
    assert steps == [Drain("decode-0"), Start("decode"), Drain("decode-1"), Start("decode")]
    assert isinstance(last, Stop)
    assert last.reason.startswith("prefill-0 is the only worker for prefill, and there is no room for another one")
    assert world.workers["prefill-0"].is_used


def test_a_pool_that_cannot_go_on_holds_no_other_up_and_room_is_waited_for() -> None:
    world = World({"prefill": 1, "decode": 2})
    world.outdate("prefill", "decode")
    world.surges = {"decode": None}
    assert world.step() == Wait("looking for room for one more in decode")
    world.surges = {"decode": False}
    assert world.step() == Drain("decode-0")


def test_a_new_worker_that_does_not_become_ready_ends_it_and_nothing_old_is_touched() -> None:
    world = World({"prefill": 1, "decode": 2})
    world.outdate("prefill", "decode")
    world.surges = {"prefill": True, "decode": True}
    assert world.step() == Start("prefill", is_stand_in=True)
    assert world.step() == Wait("prefill-1 is at weights")
    world.change("prefill-1", failure="no memory")
    why = "prefill-1 does not become ready: no memory; the others stay as they are"
    assert world.step() == Stop(why, ("prefill-1",))
    assert all(worker.is_used for name, worker in world.workers.items() if name != "prefill-1")


def test_what_a_spec_made_fail_is_replaced_by_the_next_before_anybody_else_goes() -> None:
    world = World({"prefill": 1, "mixed": 1, "decode": 1})
    del world.sizes["mixed"]
    world.alone["mixed-0"] = "mixed-0 is the only worker for decode that takes requests"
    world.change("decode-0", is_used=False, failure="less than one page")
    why = "decode-0 does not become ready: less than one page; the others stay as they are"
    assert world.step() == Stop(why)
    world.outdate("decode")
    assert world.step() == Drain("decode-0")
    world.settle()
    assert world.step() == Start("decode")
    world.settle()
    world.alone.clear()
    assert world.run()[-2:] == [Drain("mixed-0"), Done()]


def test_an_old_worker_that_is_down_is_replaced_and_not_waited_for() -> None:
    world = World({"prefill": 1, "decode": 1})
    world.outdate("decode")
    world.change("decode-0", is_used=False)
    assert world.run() == [Drain("decode-0"), Start("decode"), Done()]


def test_pools_that_come_serve_before_others_go() -> None:
    world = World({"prefill": 1, "decode": 1})
    world.sizes = {"mixed": 2}
    assert world.run() == [
        Start("mixed"),
        Start("mixed"),
        Drain("prefill-0"),
        Drain("decode-0"),
        Done(),
    ]


def test_of_too_many_the_old_ones_go_and_one_that_routers_need_is_waited_with() -> None:
    world = World({"prefill": 1, "decode": 3})
    world.sizes["decode"] = 2
    world.change("decode-1", is_current=False)
    world.alone["decode-1"] = "the others are silent"
    assert world.step() == Wait("the others are silent")
    world.alone.clear()
    assert world.step() == Drain("decode-1")


@pytest.mark.parametrize("seed", range(200))
def test_a_walk_ends_as_it_was_wanted_and_no_phase_is_ever_without_a_taker(seed: int) -> None:
    rng = random.Random(seed)
    world = World({"prefill": rng.randint(1, 3), "decode": rng.randint(1, 3)})
    has_room = rng.random() < 0.5
    for _ in range(rng.randint(1, 3)):  # specs, the next one taken amid the last one's changes
        world.sizes = {pool: rng.randint(1, 3) for pool in rng.choice(POOLS)}
        world.outdate(*(pool for pool in ("prefill", "decode", "mixed") if rng.random() < 0.7))
        world.surges = dict.fromkeys(world.sizes, has_room)
        ticks = rng.choice((3, 10, 400))
        for _ in range(ticks):
            before = {phase: world.takers(phase) for phase in PHASES}
            world.alone = alone_as_routers_see_it(world)
            step = world.step()
            for phase in PHASES:
                assert world.takers(phase) >= min(1, before[phase]), (step, world.workers)
            if isinstance(step, Done):
                assert all(each.is_current and each.is_used for each in world.workers.values())
                staying = [each.pool for each in world.workers.values()]
                assert {pool: staying.count(pool) for pool in staying} == world.sizes
                break
            if isinstance(step, Stop):
                assert not has_room
                break
            happens(world, rng)
        else:
            assert ticks < 400, "it comes to an end"


def alone_as_routers_see_it(world: World) -> dict[str, str]:
    return {
        name: "it is alone"
        for name, worker in world.workers.items()
        if worker.is_used and any(world.takers(phase) < 2 for phase in kind_of(worker.role).phases)
    }


def happens(world: World, rng: random.Random) -> None:
    for name, worker in list(world.workers.items()):
        if rng.random() < 0.4:
            if worker.is_leaving:
                del world.workers[name]
            else:
                world.change(name, is_used=True)


def test_the_last_workers_of_a_model_leave_when_it_is_served_no_more_and_its_requests_have_ended() -> None:
    world = World({"prefill": 1, "decode": 1, "mixed": 1})
    world.change("mixed-0", model="qwen")
    del world.sizes["mixed"]
    assert isinstance(step := world.step(), Stop), "it is the only one of its model"
    assert step.reason.startswith("mixed-0 is the only worker for prefill")
    world.change("mixed-0", is_unserved=True)
    world.alone["mixed-0"] = "requests of qwen run at router-0"
    assert world.step() == Wait("requests of qwen run at router-0")
    world.alone.clear()
    assert world.step() == Drain("mixed-0")


def test_another_models_worker_stands_in_for_nobody() -> None:
    world = World({"decode": 1, "mixed": 1})
    world.change("mixed-0", model="qwen")
    del world.sizes["decode"]
    assert isinstance(step := world.step(), Stop)
    assert step.reason.startswith("decode-0 is the only worker for decode")


def test_a_worker_that_cannot_load_goes_with_its_model_and_one_that_a_router_does_not_know_waits_for_its_calls() -> (
    None
):
    world = World({"prefill": 1, "decode": 1, "mixed": 1})
    world.change("mixed-0", model="qwen", is_unserved=True, is_used=False, failure="too large", is_current=False)
    del world.sizes["mixed"]
    world.alone["mixed-0"] = "requests of qwen run at router-0"
    assert world.step() == Wait("requests of qwen run at router-0")
    world.alone.clear()
    assert world.step() == Drain("mixed-0")


def test_in_a_pool_that_was_scaled_to_none_nobody_stands_in() -> None:
    """Though it is the only worker for its phase by now, or has yet to load."""
    for is_used in (True, False):
        world = World({"prefill": 1, "decode": 2})
        world.outdate("decode")
        world.surges = {"decode": True}
        assert world.step() == Start("decode", is_stand_in=True)
        world.change("decode-2", is_used=is_used)
        world.sizes["decode"] = 0
        world.alone["decode-2"] = "it is alone"
        for name in ("decode-0", "decode-1"):
            world.change(name, is_leaving=True)
        assert world.step() == Drain("decode-2")
        world.settle()
        assert world.step() == Done()


def test_one_that_stands_in_and_is_the_only_one_for_a_phase_is_waited_with() -> None:
    world = World({"prefill": 1, "decode": 1})
    world.start("decode", is_stand_in=True, is_used=True)
    world.change("decode-0", role="prefill")
    assert world.step() == Wait("decode-1 stands in, and is the only worker for decode")
    world.change("decode-0", role="decode")
    assert world.step() == Drain("decode-1")
