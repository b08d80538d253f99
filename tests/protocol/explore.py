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

from tests.protocol.process import Watch
from tests.protocol.setting import Setting
from tests.protocol.threads import ModelReceiveThread, ModelSendThread
from tests.protocol.world import MAX_CHOICES, SETTLED_S, World


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
        return f"{next(worlds[0].cluster.numbers)}"

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
        mock.patch("kv_transfer.prefill_side.pair.SendThread", ModelSendThread),
        mock.patch("kv_transfer.decode_side.pair.ReceiveThread", ModelReceiveThread),
        mock.patch("kv_transfer.decode_side.pair.ProcessWatch", watch),
        mock.patch("kv_transfer.prefill_side.connect.asyncio.to_thread", _at_once),
        mock.patch("prefill_worker.peers.handoff_dial", dial),
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
                history.append(chance.choice(faults if faults and chance.random() < fault_share else choices))
                world.do(history[-1])
            world.finish()
        except Exception as error:
            raise Broken(f"{type(error).__name__}: {error}\nafter {history}") from error
        finally:
            world.close()
    return world


def _time(world: World) -> list[str]:
    is_waiting = not world.is_over and world.cluster.loop.timers and world.cluster.loop.now_s < SETTLED_S
    return ["tick"] if is_waiting else []


def explore(setting: Setting, is_enough: Callable[[Explored], bool] = lambda _: False) -> Explored:
    """Every state, unless it `is_enough` before: first those on the way of the first choice everywhere, with every
    fault at every place, then those to which one other choice leads, then two, and so on."""
    explored, seen = Explored(), set[bytes]()
    frontiers: list[list[History]] = [[History()]]  # by the number of turns
    worlds: list[World] = []
    with _no_clock_no_chance(worlds):
        while any(frontiers) and not is_enough(explored):
            if not frontiers[explored.turns]:
                explored.turns += 1
                continue
            if len(frontiers) < explored.turns + 2:
                frontiers.append([])
            history = frontiers[explored.turns].pop()
            explored.histories += 1
            _follow(_begin(setting, worlds), history, seen, frontiers[explored.turns :], explored)
        worlds[0].close()
    explored.left = sum(map(len, frontiers))
    return explored


def _begin(setting: Setting, worlds: list[World]) -> World:
    """What is mocked asks the world that is being made, too."""
    for last in worlds:
        last.close()
    world = World.__new__(World)
    worlds[:] = [world]
    world.__init__(setting)  # type: ignore[misc]
    return world


def _follow(
    world: World, history: History, seen: set[bytes], frontiers: list[list[History]], explored: Explored
) -> None:
    """Play the history, then go on by the first choice as long as states are new; the others are kept for later."""
    at = history
    try:
        choices = history.choices()
        for i, choice in enumerate(choices, 1):
            world.do(choice, is_new=i == len(choices))
        while (key := world.key) not in seen:
            seen.add(key)
            explored.states += 1
            explored.longest = max(explored.longest, world.num_choices)
            frontiers[0].extend(History(at, fault) for fault in world.faults())
            may_tick = world.num_ticks < world.setting.max_ticks
            first, *others = world.choices() or (may_tick and _time(world)) or [""]
            frontiers[1].extend(History(at, other) for other in others)
            if not first:
                world.finish()
                return
            at = History(at, first)
            world.do(first)
    except Exception as error:
        raise Broken(f"{type(error).__name__}: {error}\nafter {at.choices()}") from error
