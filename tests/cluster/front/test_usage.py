"""What keys used: counted as it is delivered, whoever leaves, fails or is refused; each sees its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from cluster.front.server import RouterServer, ServerOptions, server_options
from cluster.usage.options import Prices
from kvrelay.v1 import cluster_pb2, cluster_pb2_grpc
from tests.cluster.front.http.harness import http, words
from tests.cluster.harness import Harness, collect, request, serving, tokens_of

TOKENS = "anna:token-of-anna-01\nbert:token-of-bert-01\noperator:token-of-oper-01"


def counting(folder: Path, **settings: Any) -> ServerOptions:
    return server_options(port=0, usage_db=folder / "usage.db", **settings)


def entering(name: str) -> dict[str, Any]:
    return {"metadata": (("authorization", f"Bearer token-of-{name}-01"),)}


async def used(h: Harness, name: str = "", **asked: float) -> dict[str, cluster_pb2.KeyUsage]:
    stub = cluster_pb2_grpc.ClusterStub(h.channel)
    answer = await stub.GetUsage(cluster_pb2.GetUsageRequest(**asked), **(entering(name) if name else {}))
    sums: dict[str, cluster_pb2.KeyUsage] = {}
    for each in answer.usage:  # two hours, where one ended meanwhile
        total = sums.setdefault(each.key, cluster_pb2.KeyUsage(key=each.key))
        for number in ("requests", "prompt_tokens", "cached_tokens", "generated_tokens"):
            setattr(total, number, getattr(total, number) + getattr(each, number))
        for seconds in ("prefill_s", "handoff_s", "decode_s"):
            setattr(total, seconds, getattr(total, seconds) + getattr(each, seconds))
    return sums


async def until_used(h: Harness, is_so: Callable[[cluster_pb2.KeyUsage], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_so((await used(h)).get("", cluster_pb2.KeyUsage())):
            await asyncio.sleep(0.01)


async def test_an_answer_counts_its_prompt_once_and_all_its_tokens(tmp_path: Path) -> None:
    async with serving(options=counting(tmp_path)) as h:
        responses = await collect(h.generate.Generate(request((5, 6, 7, 8), max_tokens=8, n=3)))
        delivered = sum(len(tokens_of(responses, choice)) for choice in range(3))
        total = (await used(h))[""]
        assert (total.requests, total.prompt_tokens, total.generated_tokens) == (1, 4, delivered)
        assert delivered == responses[-1].usage.completion_tokens == 24
        assert total.decode_s > 0


async def test_it_is_counted_over_http_too(tmp_path: Path) -> None:
    async with http(codec=words(), usage_db=tmp_path / "usage.db") as client:
        status, answer = await client.post("/v1/completions", prompt=[5, 6, 7], max_tokens=6)
        assert status == 200, answer
        total = (await used(client.harness))[""]
        assert (total.requests, total.prompt_tokens) == (1, 3)
        assert total.generated_tokens == answer["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize("streams", [False, True])
async def test_of_an_echo_alone_the_prompt_is_counted(streams: bool, tmp_path: Path) -> None:
    async with http(codec=words(), usage_db=tmp_path / "usage.db") as client:
        asked = {"prompt": [5, 6, 7], "max_tokens": 0, "echo": True, "n": 2}
        if streams:
            events = await client.events("/v1/completions", **asked, stream_options={"include_usage": True})
            usage = events[-1]["usage"]
        else:
            _, answer = await client.post("/v1/completions", **asked)
            usage = answer["usage"]
        total = (await used(client.harness))[""]
        assert (total.requests, total.prompt_tokens, total.generated_tokens) == (1, 3, 0)
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 0)


async def test_one_that_is_left_counts_what_was_handed_over_and_its_prompt(tmp_path: Path) -> None:
    async with serving(options=counting(tmp_path)) as h:
        h.decode().max_steps = 2
        call = h.generate.Generate(request((5, 6, 7), max_tokens=50))
        read = 0
        async for response in call:
            read += len(response.token_ids)
            if read == 3:
                break
        assert (await used(h))[""].generated_tokens == 3, "told while it runs"
        call.cancel()
        await until_used(h, lambda total: total.decode_s > 0)
        total = (await used(h))[""]
        assert (total.requests, total.prompt_tokens, total.generated_tokens) == (1, 3, 3)


async def test_one_that_was_refused_counts_nothing(tmp_path: Path) -> None:
    async with serving(options=counting(tmp_path)) as h:
        for bad in (request((), max_tokens=3), request((5,), max_tokens=3, temperature=-1)):
            with pytest.raises(grpc.aio.AioRpcError):
                await collect(h.generate.Generate(bad))
        assert await used(h) == {}


async def test_what_a_lost_worker_wrote_is_delivered_and_counted_once(tmp_path: Path) -> None:
    async with serving(1, 2, options=counting(tmp_path, dead_after_s=0.5)) as h:
        for decode in (h.decode(0), h.decode(1)):
            decode.max_steps = 2
        reading = asyncio.create_task(collect(h.generate.Generate(request((5, 6, 7), max_tokens=8))))
        await h.until(lambda: any(each.steps for each in (h.decode(0), h.decode(1))))
        lost = next(each for each in (h.decode(0), h.decode(1)) if each.steps)
        for decode in (h.decode(0), h.decode(1)):
            decode.max_steps = 100
        await lost.kill()
        responses = await reading
        total = (await used(h))[""]
        assert len(tokens_of(responses)) == 8
        assert (total.requests, total.prompt_tokens, total.generated_tokens) == (1, 3, 8)


async def test_each_sees_its_own_and_operators_all_with_the_prices(tmp_path: Path) -> None:
    prices = Prices(currency="EUR", prompt=1.0, cached=0.5, generated=2.0)
    options = counting(tmp_path, auth=True, tokens=TOKENS, prices=prices)
    async with serving(options=options) as h:
        for name, size in (("anna", 2), ("bert", 3)):
            await collect(h.generate.Generate(request((5,) * size, max_tokens=size), **entering(name)))
        assert {key: each.generated_tokens for key, each in (await used(h, "oper")).items()} == {"anna": 2, "bert": 3}
        assert [*await used(h, "anna")] == ["anna"]
        assert [*await used(h, "bert")] == ["bert"]
        assert await used(h, "oper", since_s=1.0, until_s=3600.0) == {}
        with pytest.raises(grpc.aio.AioRpcError) as none:
            await used(h)
        assert none.value.code() == grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError, match="since_s is -1; give seconds since 1970"):
            await used(h, "oper", since_s=-1.0)
        answer = await cluster_pb2_grpc.ClusterStub(h.channel).GetUsage(
            cluster_pb2.GetUsageRequest(), **entering("anna")
        )
        assert (answer.prices.currency, answer.prices.generated) == ("EUR", 2.0)


async def test_a_router_that_comes_again_goes_on_counting(tmp_path: Path) -> None:
    for times in (1, 2):
        async with serving(options=counting(tmp_path)) as h:
            await collect(h.generate.Generate(request((5, 6), max_tokens=4)))
            assert (await used(h))[""].generated_tokens == 4 * times


async def test_where_nothing_is_counted_it_says_so() -> None:
    async with serving() as h:
        with pytest.raises(grpc.aio.AioRpcError, match=r"router\.usage_db is off; give a file") as none:
            await used(h)
        assert none.value.code() == grpc.StatusCode.FAILED_PRECONDITION


async def test_a_place_that_cannot_be_written_keeps_a_router_from_starting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    server = RouterServer(server_options(port=0, usage_db=tmp_path / "file" / "usage.db"))
    with pytest.raises(OSError, match=r"usage_db '.*' cannot be used: not a directory; give another, or off"):
        await server.start()
    await server.router.close()
