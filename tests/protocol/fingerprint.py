"""fingerprint names a state: two worlds with the same one behave alike from here on.

It walks everything that can be reached, objects by their fields, waiting coroutines by the line at which they wait and
their variables, and numbers each object by the order in which it is met, so that identity counts and addresses do not.
"""

from __future__ import annotations

import hashlib
import types
from collections import Counter, deque
from collections.abc import Mapping
from enum import Enum
from typing import Any

from google.protobuf.message import Message

SCALARS = (str, bytes, int, float, bool, type(None))
HISTORY = frozenset(("_unfinished_tasks", "_finished"))  # of asyncio.Queue: what was, not what is
OPAQUE = (type, types.ModuleType, types.BuiltinFunctionType, Counter)  # counters say how one came here


def fingerprint(root: object, opaque: tuple[type, ...] = ()) -> bytes:
    """`opaque`: types whose insides do not matter."""
    walk = _Walk((*OPAQUE, *opaque))
    walk.see(root)
    return walk.digest.digest()


class _Walk:
    def __init__(self, opaque: tuple[type, ...]) -> None:
        self.digest = hashlib.blake2b(digest_size=16)
        self._opaque = opaque
        self._numbers: dict[int, int] = {}
        self._alive: list[object] = []  # so that no address is used twice

    def see(self, root: object) -> None:
        stack = [root]
        while stack:
            stack.extend(reversed(self._one(stack.pop())))

    def _say(self, text: str) -> None:
        self.digest.update(text.encode())
        self.digest.update(b"\0")

    def _one(self, thing: Any) -> list[Any]:
        """Say what it is; returns what it is made of."""
        if isinstance(thing, (*SCALARS, Enum)):
            self._say(repr(thing))
            return []
        if isinstance(thing, self._opaque):
            self._say(type(thing).__name__)
            return []
        number = self._numbers.get(id(thing))
        if number is not None:
            self._say(f"#{number}")
            return []
        self._numbers[id(thing)] = len(self._numbers)
        self._alive.append(thing)
        self._say(type(thing).__qualname__)
        return self._parts(thing)

    def _order(self, part: Any) -> tuple[int, str]:
        """In a set: those met before as they were met, then the others by their kind."""
        is_scalar = isinstance(part, SCALARS)
        return self._numbers.get(id(part), len(self._numbers)), repr(part) if is_scalar else type(part).__name__

    def _parts(self, thing: Any) -> list[Any]:
        if isinstance(thing, Message):
            return [thing.SerializeToString(deterministic=True)]
        if isinstance(thing, Mapping):
            return [len(thing), *(part for item in thing.items() for part in item)]
        if isinstance(thing, (set, frozenset)):
            return [len(thing), *sorted(thing, key=self._order)]
        if isinstance(thing, (list, tuple, deque, range)):
            return [len(thing), *thing]
        if isinstance(thing, types.MethodType):
            return [thing.__func__.__qualname__, thing.__self__]
        if isinstance(thing, types.FunctionType):
            return [thing.__qualname__, *(cell.cell_contents for cell in thing.__closure__ or () if _is_set(cell))]
        if isinstance(thing, types.CoroutineType):
            return _frame(thing.cr_frame, thing.cr_await)
        if isinstance(thing, types.AsyncGeneratorType):
            return _frame(thing.ag_frame, thing.ag_await)
        return _fields(thing)


def _frame(frame: types.FrameType | None, awaited: object) -> list[Any]:
    if frame is None:
        return ["over"]
    variables = {name: value for name, value in frame.f_locals.items() if name != "f"}  # asyncio.wait's, of its loop
    return [frame.f_code.co_qualname, frame.f_lasti, variables, awaited]


def _fields(thing: Any) -> list[Any]:
    if hasattr(thing, "get_coro"):  # a task
        return [thing.done(), None if thing.done() else thing.get_coro()]
    if hasattr(thing, "_asyncio_future_blocking"):
        outcome = None
        if thing.done() and not thing.cancelled():
            outcome = repr(thing.exception()) if thing.exception() else thing.result()
        return [thing.done(), outcome]
    if hasattr(thing, "func") and hasattr(thing, "keywords"):  # functools.partial
        return [thing.func, thing.args, thing.keywords]
    names = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
    slots = {name: getattr(thing, name) for name in names if isinstance(name, str) and hasattr(thing, name)}
    slots.pop("__weakref__", None)
    slots.pop("__dict__", None)
    everything = slots | getattr(thing, "__dict__", {})
    return [{name: value for name, value in everything.items() if name not in HISTORY}]


def _is_set(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
