"""ServiceThread runs one service (a worker, a router) in a thread and an event loop of its own, and says how it goes.

    started -> progress ... -> ready -> ended | failed

It knows no Ray and no role: `build` makes the service (slow: it may load a model), `tell` carries the events away.

A service that is broken ends its process at once, from inside the loop: what hangs would keep the loop from ending. A
loop that does not turn any more (its thread is held, or another one holds the interpreter's lock and never lets go) can
do nothing; faulthandler's own thread, which needs no lock, ends the process then and writes where each thread stood.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import os
import secrets
import threading
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass
from typing import Any, NoReturn, Protocol, TypeVar

from engine.process import sentence_of
from worker.heap import give_memory_back

logger = logging.getLogger(__name__)
T = TypeVar("T")
OUR_PACKAGES = ("engine.", "kv_transfer.", "worker.", "prefill_worker.", "decode_worker.", "cluster.")
Progress = Callable[[str, float], None]

BROKEN_EXIT_CODE = 70  # EX_SOFTWARE
DEAD_LOOP_S = 600.0  # that a loop may stand still; then the process ends, with exit code 1. The controller sees it
# sooner; here one that was stopped itself (Ctrl-Z, a frozen container) counts as hung, and may end when it is woken.
TURN_S = 0.5  # how often a loop says that it turns
STDERR = 2


class Service(Protocol):
    async def start(self) -> Any:
        """Listen; returns an object with `.address`, and `.http` where it has one, or the address as text."""

    async def stop(self, grace_s: float) -> None: ...

    async def wait_broken(self) -> None:
        """Raises what broke the service, if ever: then its process ends, and whoever keeps it starts another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceEvent:
    """Where a service stands. Sent whenever that changes; the newest one says all."""

    name: str
    incarnation: str  # random for each start of the process
    pid: int
    host: str
    stage: str  # started, then the engine's stages, then ready, failed or ended
    fraction: float = 0.0  # of the stage
    address: str = ""  # host:port, once ready
    http: str = ""  # likewise, where it serves that, too
    reason: str = ""  # failed: one sentence

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


Tell = Callable[[ServiceEvent], None]


class ServiceThread:
    """`build(incarnation, progress)` runs in the thread and returns the service; then it is started and serves."""

    def __init__(
        self,
        name: str,
        host: str,
        build: Callable[[str, Progress], Service],
        tell: Tell,
        crash: Callable[[int], object] = os._exit,
    ) -> None:
        self._build = build
        self._tell = tell
        self._crash = crash
        self._service: Service | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._ended = threading.Event()
        self.turns = 0  # of the event loop that serves
        self._event = ServiceEvent(
            name=name, incarnation=secrets.token_hex(8), pid=os.getpid(), host=host, stage="started"
        )
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    def begin(self) -> None:
        self._send()
        self._thread.start()

    @property
    def event(self) -> ServiceEvent:
        return self._event

    @property
    def service(self) -> Any:
        return self._service

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine in the service's loop, from another thread."""
        if self._loop is None:
            coroutine.close()
            raise RuntimeError(f"{self._event.name} does not serve yet")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)

    def stop(self, grace_s: float) -> None:
        """Stop serving; returns when it has ended, or after `grace_s` and some seconds. A second call waits too."""
        if self._loop is not None and self._service is not None and not self._ended.is_set():
            self.call(self._service.stop(grace_s), grace_s + 5.0)
            self._loop.call_soon_threadsafe(self._stop.set)
            self._ended.wait(5.0)

    def wait_end(self) -> str:
        """Block until it has ended; the reason, or nothing if it was asked to."""
        self._ended.wait()
        return self._event.reason

    def _say(self, stage: str, fraction: float = 0.0, **changes: str) -> None:
        fields = asdict(self._event) | {"stage": stage, "fraction": fraction} | changes
        self._event = ServiceEvent(**fields)
        self._send()

    def _on_progress(self, stage: str, fraction: float) -> None:
        """An engine that is ready does not listen yet."""
        self._say("loaded" if stage == "ready" else stage, fraction)

    def _send(self) -> None:
        try:
            self._tell(self._event)
        except Exception:  # who listens may be restarting; it asks for the event when it is back
            logger.warning("%s could not tell that it is %s", self._event.name, self._event.stage, exc_info=True)

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
            self._say("ended", 1.0)
        except Exception as error:
            logger.exception("%s failed", self._event.name)
            self._say("failed", reason=sentence_of(error, OUR_PACKAGES))
        finally:
            self._ended.set()

    async def _serve(self) -> None:
        service = self._build(self._event.incarnation, self._on_progress)  # blocks a loop with nothing else to do
        started = await service.start()
        self._service, self._loop = service, asyncio.get_running_loop()
        give_memory_back()  # 50 MB of a small model's load
        gc.freeze()  # all that loading made stays; to look through it again would stop every request for 0.25 s
        gc.collect()  # else CPython looks through the oldest again only when they are a quarter more than all that was
        address, http = getattr(started, "address", started), getattr(started, "http", "")
        self._say("ready", 1.0, address=str(address), http=http)
        turning = asyncio.ensure_future(self._say_that_it_turns())
        broken = asyncio.ensure_future(service.wait_broken())
        stopped = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait((broken, stopped), return_when=asyncio.FIRST_COMPLETED)
        if broken.done() and (error := broken.exception()) is not None:
            self._end_broken(error)
        broken.cancel()
        turning.cancel()

    async def _say_that_it_turns(self) -> None:
        try:
            while True:
                self.turns += 1
                faulthandler.dump_traceback_later(DEAD_LOOP_S, exit=True, file=STDERR)
                await asyncio.sleep(TURN_S)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _end_broken(self, error: BaseException) -> NoReturn:
        """A bug, or a lost device or process, not a bad model: a new process may serve again."""
        logger.error("%s is broken: %s", self._event.name, error, exc_info=error)
        faulthandler.dump_traceback(STDERR)
        self._crash(BROKEN_EXIT_CODE)
        raise error
