"""A service whose step loop breaks is ended with its process, so that whoever keeps it starts it again."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from worker import process
from worker.process import BROKEN_EXIT_CODE, ServiceEvent, ServiceThread

pytestmark = pytest.mark.unit


class Service:
    def __init__(self, breaks: bool) -> None:
        self._breaks = breaks

    async def start(self) -> SimpleNamespace:
        return SimpleNamespace(address="127.0.0.1:1")

    async def stop(self, grace_s: float) -> None: ...

    async def wait_broken(self) -> None:
        if self._breaks:
            raise RuntimeError("the step loop met a bug")
        await asyncio.Event().wait()


def run(breaks: bool) -> tuple[ServiceThread, list[ServiceEvent], list[int]]:
    events: list[ServiceEvent] = []
    crashes: list[int] = []
    ready = threading.Event()

    def tell(event: ServiceEvent) -> None:
        events.append(event)
        if event.stage == "ready":
            ready.set()

    thread = ServiceThread("decode-0", "127.0.0.1", lambda *_: Service(breaks), tell, crashes.append)
    thread.begin()
    assert ready.wait(10)
    return thread, events, crashes


def test_a_broken_service_ends_its_process() -> None:
    thread, _, crashes = run(breaks=True)
    assert "the step loop met a bug" in thread.wait_end()
    assert crashes == [BROKEN_EXIT_CODE]


class Stuck(Service):
    """Its tasks do not end when they are asked to, as with a thread that hangs."""

    async def start(self) -> SimpleNamespace:
        self.tasks = [asyncio.create_task(self._cling())]
        return await super().start()

    async def _cling(self) -> None:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                continue


def test_a_broken_service_ends_its_process_though_its_tasks_do_not_end() -> None:
    crashed = threading.Event()
    thread = ServiceThread(
        "decode-0", "127.0.0.1", lambda *_: Stuck(breaks=True), lambda _: None, lambda _: crashed.set()
    )
    thread.begin()
    assert crashed.wait(10)


def test_a_loop_that_turns_puts_the_end_of_its_process_off(monkeypatch: pytest.MonkeyPatch) -> None:
    put_off_s: list[float] = []
    turned = threading.Event()

    def later(seconds: float, **_: object) -> None:
        put_off_s.append(seconds)
        if len(put_off_s) == 3:
            turned.set()

    watch = SimpleNamespace(dump_traceback_later=later, cancel_dump_traceback_later=lambda: put_off_s.append(0.0))
    monkeypatch.setattr(process, "faulthandler", watch)
    monkeypatch.setattr(process, "TURN_S", 0.001)
    thread, _, _ = run(breaks=False)
    assert turned.wait(20)
    thread.stop(0.0)
    assert thread.wait_end() == ""
    assert set(put_off_s) == {process.DEAD_LOOP_S, 0.0}  # 0: not any more


HELD = """
import ctypes
from types import SimpleNamespace
from worker import process
process.DEAD_LOOP_S, process.TURN_S = 3.0, 0.1

class Service:
    async def start(self): return SimpleNamespace(address="127.0.0.1:1")
    async def stop(self, grace_s): ...
    async def wait_broken(self):
        ctypes.PyDLL(None).sleep(600)  # a PyDLL's calls keep the interpreter's lock

thread = process.ServiceThread("decode-0", "127.0.0.1", lambda *_: Service(), lambda _: None)
thread.begin()
thread.wait_end()
"""


def test_a_process_whose_interpreter_is_held_for_good_ends_and_says_where() -> None:
    held = subprocess.run([sys.executable, "-c", HELD], capture_output=True, text=True, timeout=60, check=False)
    assert held.returncode == 1
    assert "in wait_broken" in held.stderr


def test_a_service_that_is_stopped_ends_without_a_reason() -> None:
    thread, events, crashes = run(breaks=False)
    thread.stop(0.0)
    assert thread.wait_end() == ""
    assert events[-1].stage == "ended"
    assert crashes == []
