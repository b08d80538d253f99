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
from tests.protocol.threads import ModelReceiveThread, ModelSendThread
from tests.protocol.world import MAX_CHOICES, Setting, World


@dataclass
class Explored:
    states: int = 0
    histories: int = 0
    longest: int = 0
    left: int = 0  # histories that were not followed; 0: that is all there is


class Broken(AssertionError):
    """What must hold does not, after this history."""


@contextmanager
def _no_clock_no_chance(worlds: list[World]) -> Iterator[None]:
    def token_hex(num_bytes: int = 8) -> str:
        return f"{next(worlds[0].numbers)}"

    def dial(secret: str, *_: object, **__: object) -> Any:
        return worlds[0].dial(secret)  # each process has its name for a secret

    def watch(pid: int) -> Watch:
        return worlds[0].watch()

    with (
        mock.patch("time.monotonic", float),
        mock.patch("time.monotonic_ns", int),
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
            for _ in range(MAX_CHOICES):
                choices, faults = world.choices(), world.faults()
                if not choices:
                    break
                use = faults if faults and chance.random() < fault_share else choices
                history.append(chance.choice(use))
                world.do(history[-1])
            world.finish()
        except Exception as error:
            raise Broken(f"{type(error).__name__}: {error}\nafter {history}") from error
        finally:
            world.close()
    return world


def explore(setting: Setting, is_enough: Callable[[Explored], bool] = lambda _: False) -> Explored:
    """Every state, unless it `is_enough` before."""
    explored, seen = Explored(), set[bytes]()
    frontier: list[tuple[str, ...]] = [()]
    worlds: list[World] = []
    with _no_clock_no_chance(worlds):
        while frontier and not is_enough(explored):
            history = frontier.pop()
            explored.histories += 1
            try:
                _follow(setting, history, worlds, seen, frontier, explored)
            except Exception as error:
                raise Broken(f"{type(error).__name__}: {error}\nafter {_LAST}") from error
        worlds[0].close()
    explored.left = len(frontier)
    return explored


def _begin(setting: Setting, worlds: list[World]) -> World:
    """What is mocked asks the world that is being made, too."""
    for last in worlds:
        last.close()
    world = World.__new__(World)
    worlds[:] = [world]
    world.__init__(setting)  # type: ignore[misc]
    return world


_LAST: list[str] = []


def _follow(
    setting: Setting,
    history: tuple[str, ...],
    worlds: list[World],
    seen: set[bytes],
    frontier: list[tuple[str, ...]],
    explored: Explored,
) -> None:
    """Play the history, then go on by the first choice as long as states are new; the others are kept for later."""
    world = _begin(setting, worlds)
    _LAST[:] = []
    for choice in history:
        _LAST.append(choice)
        world.do(choice, is_new=len(_LAST) == len(history))
    while True:
        key = world.key
        if key in seen:
            return
        seen.add(key)
        explored.states += 1
        explored.longest = max(explored.longest, len(_LAST))
        choices = world.choices()
        everything = [*choices, *world.faults()]
        at = tuple(_LAST)
        if not choices:
            frontier.extend((*at, other) for other in everything)
            _LAST.append("finish")
            world.finish()
            return
        frontier.extend((*at, other) for other in everything[1:])
        _LAST.append(everything[0])
        world.do(everything[0])
