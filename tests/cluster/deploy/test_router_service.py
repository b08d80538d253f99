"""A router as its process runs it. No Ray."""

from __future__ import annotations

import asyncio
import threading

import pytest

from cluster.deploy.roster import Version
from cluster.deploy.router_service import RouterService
from cluster.front.server import server_options
from tests.fakes import FakeDecodeWorker, FakePrefillWorker
from tests.serving.harness import until


async def test_one_that_does_not_serve_says_whom_it_has_not_reached_and_why() -> None:
    prefill, stranger = FakePrefillWorker(name="prefill-0", decodes=[]), FakeDecodeWorker(name="decode-0", secret="s")
    service = RouterService(server_options(port=0), "127.0.0.1")
    await service.start()
    try:
        there = [await prefill.start(), await stranger.start()]
        await service.set_workers(Version(1, 1), [(e.name, e.role, e.address, "") for e in there])
        why = await service.wait_serving(1.0)
        assert why.startswith("decode-0: UNAUTHENTICATED: ")
    finally:
        await service.stop(0.0)
        await prefill.kill()
        await stranger.kill()


async def test_an_adapter_whose_files_do_not_come_keeps_nobody_from_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr("cluster.front.models.adapters.stamp_of", lambda _: goes_on.wait() and ())
    monkeypatch.setattr("cluster.front.server.ADAPTERS_S", 0.01)
    service = RouterService(server_options(port=0, adapters={"a": "/nowhere"}), "127.0.0.1")
    try:
        await asyncio.wait_for(service.start(), 5.0)
        goes_on.set()
        await until(lambda: "a" in service._server.catalog.first.adapters.known, "its files have been looked at")
    finally:
        goes_on.set()
        await service.stop(0.0)
