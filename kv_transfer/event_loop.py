"""Between a pair's thread and the event loop of the worker that owns the pair."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


def start_thread(thread: threading.Thread, give_back: Callable[[], object]) -> None:
    """Or `give_back` what it was to own, and raise RuntimeError: the kernel, or a cgroup, allows no more of them."""
    try:
        thread.start()
    except RuntimeError:
        give_back()
        raise


def call_in_loop(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *args: Any) -> None:
    """From any thread. Dropped when the loop is closed: nobody is left to tell."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *args)


def quiet_future() -> asyncio.Future[Any]:
    """A future whose exception nobody has to fetch."""
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


def set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
