"""What gRPC keeps of a call that was aborted: its error, and by the error's traceback all that the call had, in a cycle
that only a full collection finds. Thousands of those at once would hold up the event loop for half a second.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc.aio

T = TypeVar("T")


async def without_traces(call: Awaitable[T], before: Callable[[], Awaitable[None]] | None = None) -> T | None:
    """What a handler answers. gRPC raises an abort again by itself, when its handler has ended.

    `before`: awaited before what the call had is let go of, which takes some ms of one with many choices.
    """
    try:
        return await call
    except grpc.aio.AbortError as error:
        try:
            if before is not None:
                await before()
        finally:
            _forget_traces(error)
        return None


def _forget_traces(error: BaseException | None) -> None:
    """Of the error, and of those that it was raised for."""
    while error is not None:
        error.__traceback__ = None
        before, error.__context__ = error.__context__, None
        error = before
