"""ModelLoop is an asyncio loop that does nothing by itself: callbacks run when the explorer says so, time is a number.

`settle` runs what is ready until nothing is; `fire_next` lets the next timer ring. Nothing here knows threads or
sockets, so that the same choices always lead to the same state. Each timer and task belongs to who has made it
(`owner`, which callbacks inherit): what a process leaves behind when it dies never runs.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

MAX_CALLBACKS = 100_000

owner: ContextVar[object] = ContextVar("owner", default=None)  # of what is made now


class ModelLoop:
    def __init__(self) -> None:
        self._myself = cast(asyncio.AbstractEventLoop, self)  # it has what is asked of a loop here, and no more
        self.now_s = 0.0
        self.errors: list[dict[str, Any]] = []
        self.tasks: dict[asyncio.Task[Any], object] = {}  # with their owners, in the order they were made
        self._left: list[asyncio.Task[Any]] = []
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, str, int, asyncio.TimerHandle]] = []  # of one time: by their owners
        self._num_timers = 0

    @contextmanager
    def entered(self) -> Iterator[None]:
        before = asyncio.events._get_running_loop()
        asyncio.events._set_running_loop(self._myself)
        try:
            yield
        finally:
            asyncio.events._set_running_loop(before)

    def settle(self) -> None:
        for _ in range(MAX_CALLBACKS):
            if not self._ready:
                return
            handle = self._ready.popleft()
            if not handle.cancelled():
                handle._run()
        raise AssertionError("callbacks call each other without end")

    def bury(self, dead: object) -> None:
        """Nothing that belongs to it goes on."""
        for *_, timer in self._timers:
            if owner_of(timer) is dead:
                timer.cancel()
        mine = [task for task, its_owner in self.tasks.items() if its_owner is dead]
        self._left += mine
        for task in mine:
            del self.tasks[task]

    def close(self) -> None:
        """End what waits, here: left to the garbage collector it would end in another world's loop."""
        with self.entered():
            for task in [*self.tasks, *self._left]:
                task.cancel()
            self.settle()

    @property
    def waiting(self) -> list[asyncio.Task[Any]]:
        """The tasks, each owner's in the order they were made."""
        return sorted(self.tasks, key=lambda task: name_of(self.tasks[task]))

    @property
    def timers(self) -> list[asyncio.TimerHandle]:
        """Those that will ring, the next one first."""
        return [timer for *_, timer in sorted(self._timers) if not timer.cancelled()]

    def ring(self, timer: asyncio.TimerHandle) -> None:
        """Now, whatever its time is."""
        call, callback, args = timer._context.run, timer._callback, timer._args  # type: ignore[attr-defined]
        timer.cancel()
        call(callback, *args)

    def fire_next(self) -> bool:
        """Let time pass until the next timer rings; False if there is none."""
        while self._timers:
            when, *_, timer = heapq.heappop(self._timers)
            if not timer.cancelled():
                self.now_s = max(self.now_s, when)
                timer._run()
                self.settle()
                return True
        return False

    # what asyncio asks of a loop

    def time(self) -> float:
        return self.now_s

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Any = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self._myself, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # there are no threads

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.now_s + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self._myself, context)
        self._num_timers += 1
        heapq.heappush(self._timers, (when, name_of(owner_of(timer)), self._num_timers, timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self._myself)

    def create_task(self, coro: Coroutine[Any, Any, Any], **named: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self._myself, **named)
        self.tasks[task] = owner.get()
        task.add_done_callback(lambda done: self.tasks.pop(done, None))
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def get_debug(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.errors.append(context)


def owner_of(handle: asyncio.Handle) -> object:
    return cast(Any, handle)._context.get(owner)


def name_of(its_owner: object) -> str:
    return getattr(its_owner, "name", "")
