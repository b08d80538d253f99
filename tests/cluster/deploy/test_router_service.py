"""A router as its process runs it. No Ray."""

from __future__ import annotations

from cluster.deploy.roster import Version
from cluster.deploy.router_service import RouterService
from cluster.front.server import server_options
from tests.fakes import FakeDecodeWorker, FakePrefillWorker


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
