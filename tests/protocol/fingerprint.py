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
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any

import numpy as np
from google.protobuf.message import Message

from cluster.router.explaining.kept import Kept
from cluster.router.explaining.notes import Notes
from cluster.router.live.requests import LiveRequest
from cluster.router.live.timeline import Timeline
from cluster.router.monitoring.metrics import RouterMetrics
from cluster.router.options import RouterOptions
from cluster.router.served_model import ServedModel
from engine.pages.layout import KvLayout
from engine.pages.memory import KvMemory
from engine.pages.rows import PageRows
from engine.types import ModelInfo, SamplingParams
from kv_transfer.options import TransferOptions
from kv_transfer.prefill_side.trail import Trail
from kvrelay.v1 import worker_pb2 as pb
from tests.protocol.cluster import Cluster
from tests.protocol.loop import ModelLoop
from tests.protocol.process import Process
from tests.protocol.setting import Setting
from worker.awake import AwakeClock
from worker.options import WorkerOptions
from worker.steps.slow import StepClock, Took
from worker.tracing import RequestTrace

SCALARS = frozenset((str, bytes, int, float, bool, type(None)))
OPAQUE = (
    *(type, types.ModuleType, types.BuiltinFunctionType, types.SimpleNamespace, np.ndarray),
    *(AwakeClock, Cluster, KvLayout, KvMemory, PageRows, ModelInfo, ModelLoop, SamplingParams, ServedModel, Setting),
    *(RouterOptions, TransferOptions, WorkerOptions),
    # they say how one came here
    *(Counter, RouterMetrics, Timeline, Notes, Kept, RequestTrace, StepClock, Took, Trail, pb.Trace),
)
COUNTED = frozenset(  # of a LiveRequest: so do these
    ("cached_tokens", "recomputed_tokens", "drafted_tokens", "accepted_tokens", "_computed_len")
)
Reader = Callable[[Any], Iterable[Any]]


def fingerprint(root: object) -> bytes:
    said: list[Any] = []
    numbers = {id(root): 0}
    things = [root]  # all of them, so that no address is used twice
    for thing in things:
        said.append(type(thing).__qualname__)
        for part in _parts(thing, numbers):
            if type(part) in SCALARS:
                said.append(part)
                continue
            number = numbers.get(id(part))
            if number is None:
                number = numbers[id(part)] = len(things)
                things.append(part)
            said += (..., number)
    return hashlib.blake2b(repr(said).encode(), digest_size=16).digest()


def _parts(thing: Any, numbers: dict[int, int]) -> Iterable[Any]:
    kind: Any = type(thing)
    return _in_order(thing, numbers) if kind in (set, frozenset) else _reader_of(kind)(thing)


def _in_order(things: set[Any], numbers: dict[int, int]) -> list[Any]:
    """Of a set: those met before as they were met, then the others by their names."""
    return [len(things), *sorted(things, key=lambda part: (numbers.get(id(part), len(numbers)), _name(part)))]


def _name(part: Any) -> str:
    if isinstance(part, asyncio.Task):
        return part.get_name().rpartition("-")[2].zfill(9)  # its number
    return repr(part) if type(part) in SCALARS else f"{type(part).__name__} {getattr(part, 'id', '')}"


@functools.cache
def _reader_of(kind: Any) -> Reader:
    """What a thing of this kind is made of."""
    if issubclass(kind, OPAQUE):
        return lambda _: ()
    if issubclass(kind, Enum):
        return lambda thing: [thing.name]
    for base, reader in READERS.items():
        if issubclass(kind, base):
            return reader
    return _fields(kind)


def _fields(kind: type) -> Reader:
    names = [name for base in kind.__mro__ for name in getattr(base, "__slots__", ()) if isinstance(name, str)]
    names = [name for name in names if name not in ("__weakref__", "__dict__")]
    if not names:
        return lambda thing: getattr(thing, "__dict__", {}).values()
    return lambda thing: [*(getattr(thing, name, None) for name in names), *getattr(thing, "__dict__", {}).values()]


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


def _without_traces(message: Message) -> Message:
    """What is told beside what happened."""
    if isinstance(message, pb.WorkerMessage) and any(event.HasField("trace") for event in message.outputs.events):
        told, message = message, pb.WorkerMessage()
        message.CopyFrom(told)
        for event in message.outputs.events:
            event.ClearField("trace")
    return message


READERS: dict[Any, Reader] = {
    LiveRequest: lambda thing: [getattr(thing, name) for name in LiveRequest.__slots__ if name not in COUNTED],
    Process: lambda thing: thing.__dict__.values() if thing.is_alive else (),  # a dead one is as any other
    Message: lambda thing: [_without_traces(thing).SerializeToString(deterministic=True)],
    Mapping: lambda thing: [len(thing), *thing.keys(), *thing.values()],
    (list, tuple, deque, range): lambda thing: [len(thing), *thing],
    types.MethodType: lambda thing: [thing.__func__.__qualname__, thing.__self__],
    types.FunctionType: _function,
    types.CoroutineType: lambda thing: _frame(thing.cr_frame, thing.cr_await),
    types.AsyncGeneratorType: lambda thing: _frame(thing.ag_frame, thing.ag_await),
    asyncio.Queue: lambda thing: [thing._queue, thing._getters],  # and not what was in it
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
