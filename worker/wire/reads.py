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
    loop = asyncio.get_running_loop()
    whole: asyncio.Future[T] = loop.create_future()
    reading = loop.create_task(_read_into(whole, read))
    try:
        return await whole
    finally:
        del reading  # until here somebody holds it


async def _read_into(whole: asyncio.Future[T], read: Awaitable[T]) -> None:
    try:
        result = await read
    except asyncio.CancelledError:
        whole.cancel()
        raise
    except Exception as error:
        if not whole.done():  # else nobody waits for it
            whole.set_exception(error)
    else:
        if not whole.done():
            whole.set_result(result)
