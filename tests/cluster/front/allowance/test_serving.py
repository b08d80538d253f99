"""A router serves each name by its account, and charges it for what it was given."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from cluster.front.allowance.options import Account
from cluster.front.server import server_options
from tests.cluster.harness import Harness, collect, request, serving

pytestmark = pytest.mark.unit


def noted(h: Harness, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []

    def on_generated(owner: str, num_tokens: int, *, priority: int = 0, weight: float = 1.0) -> None:
        calls.append((owner, num_tokens, priority, weight))

    monkeypatch.setattr(h.router.policy, "on_generated", on_generated)
    return calls


async def test_answers_are_charged_as_they_end_whole_or_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    options = server_options(port=0, accounts={"default": Account(weight=2, tokens_per_minute=1)})
    async with serving(options=options) as h:
        calls = noted(h, monkeypatch)
        await h.generate.GenerateOnce(request(max_tokens=4, n=2))
        assert calls == [("", 4, 0, 2.0)] * 2
        assert h.server._generation is not None
        assert 10 < h.server._generation.allowances._tokens[""].spent <= 3 + 8
        h.server.take_options(h.server.options.router, server_options().front, "")
        stream = h.generate.Generate(request(max_tokens=100_000))
        await anext(aiter(stream))
        stream.cancel()
        await h.until(lambda: len(calls) == 3)
        assert calls[2][1] > 0


async def test_over_grpc_a_key_that_has_had_its_requests_is_told_when_to_come_again() -> None:
    options = server_options(port=0, accounts={"default": Account(requests_per_minute=1)})
    async with serving(options=options) as h:
        await collect(h.generate.Generate(request(max_tokens=2)))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await h.generate.GenerateOnce(request(max_tokens=2))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert int(dict(refused.value.trailing_metadata())["retry-after-ms"]) > 50_000
        h.server.take_options(h.server.options.router, server_options().front, "")
        await h.generate.GenerateOnce(request(max_tokens=2))
