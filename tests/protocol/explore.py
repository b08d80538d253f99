"""explore visits every state that a setting's choices lead to, by playing histories anew from the beginning.

A state that was met before is not gone on from. What breaks is told with its history, which `replay` plays again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from tests.protocol.commuting import lesser
from tests.protocol.process import Watch
from tests.protocol.setting import Setting
from tests.protocol.threads import ModelReceiveThread, ModelSendThread
from tests.protocol.world import MAX_CHOICES, World


@dataclass
class Explored:
    states: int = 0
    histories: int = 0
    longest: int = 0
    left: int = 0  # histories that were not followed; 0: that is all there is
    turns: int = 0  # whatever turns from the first choice fewer times is explored


@dataclass(frozen=True, slots=True)
class History:
    """Its last choice, and how it came there."""

    before: History | None = None
    choice: str = ""

    def choices(self) -> list[str]:
        found, at = [], self
        while at.before is not None:
            found.append(at.choice)
            at = at.before
        return found[::-1]


class Broken(AssertionError):
    """What must hold does not, after this history."""


@contextmanager
def _no_clock_no_chance(worlds: list[World]) -> Iterator[None]:
    def token_hex(num_bytes: int = 8) -> str:
        return worlds[0].cluster.token()

    def dial(secret: str, *_: object, **__: object) -> Any:
        return worlds[0].cluster.dial(secret)  # each process has its name for a secret

    def watch(pid: int) -> Watch:
        return worlds[0].cluster.watch()

    def monotonic() -> float:
        return worlds[0].cluster.loop.now_s

    def monotonic_ns() -> int:
        return int(worlds[0].cluster.loop.now_s * 1e9)

    with (
        mock.patch("time.monotonic", monotonic),
        mock.patch("time.monotonic_ns", monotonic_ns),
        mock.patch("secrets.token_hex", token_hex),
        mock.patch("kv_transfer.transports.loopback._offers", {}),  # whenever the collector comes
        mock.patch("kv_transfer.prefill_side.pair.SendThread", ModelSendThread),
        mock.patch("kv_transfer.decode_side.pair.ReceiveThread", ModelReceiveThread),
        mock.patch("kv_transfer.decode_side.pair.ProcessWatch", watch),
        mock.patch("kv_transfer.prefill_side.connect.asyncio.to_thread", _at_once),
        mock.patch("worker.peers.peers.handoff_dial", dial),
    ):
        yield


async def _at_once(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    return function(*args, **named)


def replay(setting: Setting, history: Sequence[str]) -> World:
    worlds: list[World] = []
    with _no_clock_no_chance(worlds):
        world = _begin(setting, worlds)
        for choice in history:
            world.do(choice)
    return world


def walk(setting: Setting, seed: int, fault_share: float = 0.1) -> World:
    """One history by chance, to its end."""
    chance = random.Random(seed)
    worlds: list[World] = []
    history: list[str] = []
    with _no_clock_no_chance(worlds):
        world = _begin(setting, worlds)
        try:
            while len(history) < MAX_CHOICES and (choices := world.choices() or _time(world)):
                faults = world.faults()
                choice = chance.choice(faults if faults and chance.random() < fault_share else choices)
                for each in world.and_reports(choice):
                    history.append(each)
                    world.do(each)
            world.finish()
        except Exception as error:
            raise Broken(f"{type(error).__name__}: {error}\nafter {history}") from error
        finally:
            world.cluster.loop.close()
    return world


def _time(world: World) -> list[str]:
    return ["tick"] if world.waits_for_time else []


class Explorer:
    """Visits every state, each from the first world that came there; of two choices that commute it plays one order.

    They do when they touch nobody in common (commuting.py) and both may happen before: either leaves the other as it
    was. Choices have an order; after one comes none that commutes with it and is less. No state is lost: take the least
    of the shortest words of choices that lead to it. Nowhere in it does a choice follow a greater one that it commutes
    with, for the word with these two exchanged would be less; and each of its beginnings is the least word of where it
    leads, for a lesser one would make a lesser whole. So every step of it is played, whoever came to its state first:
    what an arrival may not go on with stays `held` until another one may. (Edge lean search: Bosnacki, Elkind, Genest
    and Peled, "On commutativity based edge lean search", 2009, after the sleep sets of Godefroid, LNCS 1032, 1996.)
    What must hold is asked in every state: nothing of that is lost either. Faults and timers commute with nothing.
    """

    def __init__(self, setting: Setting, *, every_order: bool = False) -> None:
        self.setting = setting
        self.explored = Explored()
        self.seen: set[bytes] = set()
        self._held: dict[bytes, set[str]] = {}
        self._frontiers: list[list[History]] = [[History()], []]  # by the number of turns, from `explored.turns` on
        self._every_order = every_order

    def explore(self, is_enough: Callable[[Explored], bool] = lambda _: False) -> Explored:
        """Unless it `is_enough` before: first what is on the way of the first choice everywhere, with every fault at
        every place, then that to which one other choice leads, then two, and so on."""
        worlds: list[World] = []
        with _no_clock_no_chance(worlds):
            while any(self._frontiers) and not is_enough(self.explored):
                if not self._frontiers[0]:
                    self._frontiers = [*self._frontiers[1:], []]
                    self.explored.turns += 1
                    continue
                history = self._frontiers[0].pop()
                self.explored.histories += 1
                self._follow(_begin(self.setting, worlds), history)
            worlds[0].cluster.loop.close()
        self.explored.left = sum(map(len, self._frontiers))
        return self.explored

    def _follow(self, world: World, history: History) -> None:
        """Play the history, then go on by the first choice as long as states are new; the others are kept for later."""
        at = history
        try:
            *before, last = history.choices() or [""]
            for choice in before:
                world.do(choice, is_new=False)
            while True:
                held = self._lesser(world, last)
                if last:
                    world.do(last)
                if not (last := self._arrive(world, at, held)):
                    return
                at = History(at, last)
        except Exception as error:
            raise Broken(f"{type(error).__name__}: {error}\nafter {at.choices()}") from error

    def _lesser(self, world: World, choice: str) -> set[str]:
        """What commutes with it and is less."""
        return set() if self._every_order or not choice else lesser(world.cluster, choice, world.choices())

    def _arrive(self, world: World, at: History, held: set[str]) -> str:
        """The choice by which to go on, if any."""
        key = world.key
        if key in self.seen:
            again = sorted(self._held.get(key, set()) - held)
            self._held.get(key, set()).difference_update(again)
            self._frontiers[1].extend(History(at, choice) for choice in again)
            return ""
        self.seen.add(key)
        self.explored.states += 1
        self.explored.longest = max(self.explored.longest, world.num_choices)
        choices = world.choices() or (world.num_ticks < self.setting.max_ticks and _time(world)) or []
        if not choices:
            world.finish()
        if held := held.intersection(choices):
            self._held[key] = held
        first, *others = [choice for choice in choices if choice not in held] or [""]
        self._frontiers[0].extend(History(at, fault) for fault in world.faults())
        self._frontiers[1].extend(History(at, other) for other in others)
        return first


def _begin(setting: Setting, worlds: list[World]) -> World:
    """What is mocked asks the world that is being made, too."""
    for last in worlds:
        last.cluster.loop.close()
    world = World.__new__(World)
    worlds[:] = [world]
    world.__init__(setting)  # type: ignore[misc]
    return world
