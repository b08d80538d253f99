"""What `kvrelay chat` says of a server that answers in another shape than OpenAI's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from kvrelay.cli.chat import Place, _answer, _first_model
from kvrelay.client.types import KvrelayError

pytestmark = pytest.mark.unit


@asynccontextmanager
async def answering(models: Any, event: Any = None) -> AsyncIterator[Place]:
    async def tell(_: web.Request) -> web.Response:
        return web.json_response(models)

    async def stream(_: web.Request) -> web.Response:
        return web.Response(text=f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n")

    app = web.Application()
    app.add_routes([web.get("/v1/models", tell), web.post("/v1/chat/completions", stream)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield Place(f"http://127.0.0.1:{runner.addresses[0][1]}", key="k")
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("models", [{}, {"data": [{}]}, [], {"data": {"x": 1}}, {"data": 7}, "text"], ids=repr)
async def test_models_in_another_shape_are_told(models: Any) -> None:
    async with answering(models) as place:
        with pytest.raises(KvrelayError, match=r"UNAVAILABLE: .* answers otherwise"):
            await _first_model(place)


@pytest.mark.parametrize("event", [{"choices": [7]}, {"choices": 7}, {"choices": [{"delta": 3}]}, [1]], ids=repr)
async def test_so_is_an_event(event: Any) -> None:
    async with answering({}, event) as place:
        with pytest.raises(KvrelayError, match=r"UNAVAILABLE: .* answers otherwise"):
            await _answer(place, {}, [])


async def test_one_that_says_nothing_is_passed_over() -> None:
    async with answering({}, {"choices": [{}]}) as place:
        assert (await _answer(place, {}, [])).startswith("0 tokens, no text")


async def hung_up_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.close()


async def speaking_http2(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(bytes.fromhex("000000040000000000"))  # SETTINGS, as a gRPC port begins
    await hung_up_on(reader, writer)


@pytest.mark.parametrize(
    ("serve", "sentence"),
    [
        (speaking_http2, "http://127.0.0.1:{} does not answer as HTTP servers do; is it the gRPC port?"),
        (hung_up_on, "the connection to http://127.0.0.1:{} was lost"),
    ],
)
async def test_one_that_is_no_http_server_is_told_without_the_key_that_it_was_sent(serve: Any, sentence: str) -> None:
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        with pytest.raises(KvrelayError) as refused:
            await _first_model(Place(f"http://127.0.0.1:{port}", key="sk-secret"))
    assert refused.value.message == sentence.format(port)
