"""A service whose step loop breaks is ended with its process, so that whoever keeps it starts it again."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

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


def test_a_service_that_is_stopped_ends_without_a_reason() -> None:
    thread, events, crashes = run(breaks=False)
    thread.stop(0.0)
    assert thread.wait_end() == ""
    assert events[-1].stage == "ended"
    assert crashes == []
