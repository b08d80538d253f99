"""What is asked of gRPC is waited for to its end: gRPC frees its note of a read (execute_batch of grpc's
callback_common.pyx.pxi, 1.85) only when the coroutine that began it goes on. Cancelled, some 100 bytes stay for each,
and with them the page of memory that they lie in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def read_whole(read: Awaitable[T]) -> T:
    """What was read. Cancelled, the read itself goes on, to the end of its call."""
    reading = asyncio.ensure_future(read)
    try:
        return await asyncio.shield(reading)
    except asyncio.CancelledError:
        reading.add_done_callback(_let_go)
        raise


def _let_go(reading: asyncio.Future[T]) -> None:
    if not reading.cancelled():
        reading.exception()
