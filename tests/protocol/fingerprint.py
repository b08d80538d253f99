"""fingerprint names a state: two worlds with the same one behave alike from here on.

It walks everything that can be reached, objects by their fields, waiting coroutines by the line at which they wait and
their variables, and numbers each object by the order in which it is met, so that identity counts and addresses do not.
What does not change, or nothing goes by, is opaque; so are the bytes of pages, which follow from who has written them.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import types
from collections import Counter, deque
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import numpy as np
from google.protobuf.message import Message

from cluster.router.live.timeline import Timeline
from cluster.router.monitoring.metrics import RouterMetrics
from cluster.router.options import RouterOptions
from cluster.router.served_model import ServedModel
from engine.pages.layout import KvLayout
from engine.pages.memory import KvMemory
from engine.pages.rows import PageRows
from engine.types import ModelInfo, SamplingParams
from kv_transfer.options import TransferOptions
from tests.protocol.cluster import Cluster
from tests.protocol.loop import ModelLoop
from tests.protocol.setting import Setting
from worker.awake import AwakeClock
from worker.options import WorkerOptions

SCALARS = frozenset((str, bytes, int, float, bool, type(None)))
HISTORY = frozenset(("_unfinished_tasks", "_finished", "_post"))  # of asyncio.Queue: what was, not what is; the world
OPAQUE = (
    *(type, types.ModuleType, types.BuiltinFunctionType, types.SimpleNamespace, np.ndarray),
    *(AwakeClock, Cluster, KvLayout, KvMemory, PageRows, ModelInfo, ModelLoop, SamplingParams, ServedModel, Setting),
    *(RouterOptions, TransferOptions, WorkerOptions),
    *(Counter, RouterMetrics, Timeline),  # they say how one came here
)
Reader = Callable[[Any], list[Any]]


def fingerprint(root: object) -> bytes:
    said: list[str] = []
    numbers: dict[int, int] = {}
    alive: list[object] = []  # so that no address is used twice
    stack: list[Any] = [root]
    while stack:
        thing = stack.pop()
        kind: Any = type(thing)
        if kind in SCALARS:
            said.append(repr(thing))
            continue
        number = numbers.get(id(thing))
        if number is not None:
            said.append(f"#{number}")
            continue
        numbers[id(thing)] = len(numbers)
        alive.append(thing)
        said.append(kind.__qualname__)
        if kind in (set, frozenset):
            stack.extend(reversed(_in_order(thing, numbers)))
        else:
            stack.extend(reversed(_reader_of(kind)(thing)))
    return hashlib.blake2b("\0".join(said).encode(), digest_size=16).digest()


def _in_order(things: set[Any], numbers: dict[int, int]) -> list[Any]:
    """Of a set: those met before as they were met, then the others by their kind."""

    def order(part: Any) -> tuple[int, str]:
        is_scalar = type(part) in SCALARS
        return numbers.get(id(part), len(numbers)), repr(part) if is_scalar else type(part).__name__

    return [len(things), *sorted(things, key=order)]


@functools.cache
def _reader_of(kind: Any) -> Reader:
    """What a thing of this kind is made of."""
    if issubclass(kind, OPAQUE):
        return lambda _: []
    if issubclass(kind, Enum):
        return lambda thing: [thing.name]
    for base, reader in READERS.items():
        if issubclass(kind, base):
            return reader
    return functools.partial(_fields, tuple(_slots(kind)))


def _slots(kind: type) -> list[str]:
    names = [name for base in kind.__mro__ for name in getattr(base, "__slots__", ()) if isinstance(name, str)]
    return [name for name in names if name not in ("__weakref__", "__dict__")]


def _fields(slots: tuple[str, ...], thing: Any) -> list[Any]:
    parts: list[Any] = [getattr(thing, name, None) for name in slots]
    for name, value in getattr(thing, "__dict__", {}).items():
        if name not in HISTORY:
            parts += (name, value)
    return parts


def _function(thing: types.FunctionType) -> list[Any]:
    return [thing.__qualname__, *(cell.cell_contents for cell in thing.__closure__ or () if _is_set(cell))]


def _frame(frame: types.FrameType | None, awaited: object) -> list[Any]:
    if frame is None:
        return ["over"]
    variables = {name: value for name, value in frame.f_locals.items() if name != "f"}  # asyncio.wait's, of its loop
    return [frame.f_code.co_qualname, frame.f_lasti, variables, awaited]


def _future(thing: asyncio.Future[Any]) -> list[Any]:
    outcome = None
    if thing.done() and not thing.cancelled():
        outcome = repr(thing.exception()) if thing.exception() else thing.result()
    return [thing.done(), outcome]


READERS: dict[Any, Reader] = {
    Message: lambda thing: [thing.SerializeToString(deterministic=True)],
    Mapping: lambda thing: [len(thing), *(part for item in thing.items() for part in item)],
    (list, tuple, deque, range): lambda thing: [len(thing), *thing],
    types.MethodType: lambda thing: [thing.__func__.__qualname__, thing.__self__],
    types.FunctionType: _function,
    types.CoroutineType: lambda thing: _frame(thing.cr_frame, thing.cr_await),
    types.AsyncGeneratorType: lambda thing: _frame(thing.ag_frame, thing.ag_await),
    asyncio.Task: lambda thing: [thing.done(), None if thing.done() else thing.get_coro()],
    asyncio.Future: _future,
    functools.partial: lambda thing: [thing.func, thing.args, thing.keywords],
    (str, bytes, int, float): lambda thing: [repr(thing)],
}


def _is_set(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
