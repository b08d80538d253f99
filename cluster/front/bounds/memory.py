"""What a router's process keeps though nobody needs it, and when it lets go of it: garbage of Python's that refers to
itself, and what is free in glibc's heap.

To collect all garbage is to look through every object of every call: 0.07 s for 200,000 of them, in which nobody is
answered. Python does so whenever their number has grown by a quarter, as in a flood. A router's process does it while
few calls run, and often then, since gRPC leaves some garbage of every call; but for a small part of the time only, or
where a process keeps much else, or gets little of a processor, it would do nothing else. Garbage of late is collected
as ever.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
from collections.abc import Callable

from worker.heap import give_memory_back

INTERVAL_S = 1.0
MOST_SHARE = 0.1  # of the time
FEW_CALLS = 100
MOST_PUT_OFF = 300  # times: under load without a pause it is done all the same
HEAP_INTERVALS = 20  # glibc's heap less often: what it gives back it must ask for again
KEPT_AWAITS = 255  # FI_FREELIST_MAXLEN of CPython's _asynciomodule.c
YOUNG_OBJECTS = 10_000  # Python's own 700 took a tenth of what a token costs
NEVER = 2**31 - 1


def put_off_collections() -> None:
    """In a process that is a router's alone: the oldest garbage is left to `let_go_forever`, and the youngest is looked
    for less often, as what comes and goes with each token would have it all day."""
    _, middle, _ = gc.get_threshold()
    gc.set_threshold(YOUNG_OBJECTS, middle, NEVER)


async def let_go_forever(num_calls: Callable[[], int]) -> None:
    """`num_calls`: how many run, each choice for one."""
    put_off, took_s = 0, 0.0
    for beat in itertools.count(1):
        await asyncio.sleep(max(INTERVAL_S, took_s / MOST_SHARE))
        put_off = 0 if may_collect(num_calls(), put_off) else put_off + 1
        took_s = 0.0 if put_off else collect()
        if not beat % HEAP_INTERVALS:
            renew_awaits()
            await asyncio.to_thread(give_memory_back)


def collect() -> float:
    """Returns how long it took, in seconds of the clock's: a process that has to wait for a processor needs more."""
    began_s = time.monotonic()
    gc.collect()
    return time.monotonic() - began_s


def may_collect(num_calls: int, put_off: int) -> bool:
    return num_calls <= FEW_CALLS or put_off >= MOST_PUT_OFF


def renew_awaits() -> None:
    """asyncio keeps 255 of what awaits a future for the next ones. After a flood they lie far apart, each in a megabyte
    that Python could give back otherwise. New ones lie together: they are kept in place of the old."""
    future = asyncio.get_running_loop().create_future()
    old = [future.__await__() for _ in range(KEPT_AWAITS)]
    new = [future.__await__() for _ in range(KEPT_AWAITS)]
    new.clear()
    old.clear()  # there is no room for these any more
