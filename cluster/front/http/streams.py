"""EventStream writes an answer as server-sent events while it is made, WholeBody one that is made, and gather runs
several answers as one.

What fails before the first event has a status of its own; what fails later is told in an event, as OpenAI's clients
read it. Nothing is so large that the event loop is held up by its encoding, or by who does not take it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.front.bounds.stalls import Stalls
from cluster.front.http.errors import told
from cluster.router.live.requests import RequestFailed
from engine.types import InvalidRequest

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
AT_ONCE = 64  # of a list, which may be a token's log-probabilities each: encoded in one go
WRITE_BYTES = 64 * 1024
NESTED = 4  # body, choices, choice, log-probabilities: below them nothing is long but lists
LINE_ENDS = {end: f"\\u{ord(end):04x}" for end in "\u0085\u2028\u2029"}  # where httpx ends a line; JSON has them raw
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def event(body: Any) -> bytes:
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    for end, escaped in LINE_ENDS.items():
        text = text.replace(end, escaped)
    return b"data: " + text.encode() + b"\n\n"


class _Bounded(Response):
    """One that is written part by part, to a client that takes them."""

    def __init__(self, stalls: Stalls) -> None:
        self.status_code = 200
        self.background = None
        self._stalls = stalls

    async def _write(self, send: Send, limit: asyncio.Timeout, body: bytes, *, more: bool = True) -> None:
        await self._stalls.bounded(limit, send({"type": "http.response.body", "body": body, "more_body": more}))


class EventStream(_Bounded):
    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], stalls: Stalls) -> None:
        super().__init__(stalls)
        self.init_headers(HEADERS)
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events) as events:
            first = await anext(events, b"")
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            with suppress(TimeoutError):  # it takes nothing: its connection is closed
                async with asyncio.timeout(None) as limit:
                    last = DONE
                    try:
                        await self._write(send, limit, first)
                        async for each in events:
                            await self._write(send, limit, each)
                    except (RequestFailed, InvalidRequest) as error:
                        last = event(told(error)[1]) + DONE
                    await self._write(send, limit, last, more=False)


class WholeBody(_Bounded):
    media_type = "application/json"

    def __init__(self, body: Any, stalls: Stalls) -> None:
        super().__init__(stalls)
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts = [b""]
        for piece in json_pieces(self._body, NESTED):
            parts[-1] += piece
            if len(parts[-1]) >= WRITE_BYTES:
                parts.append(b"")
                await asyncio.sleep(0)
        del self._body
        self.init_headers({"Content-Length": str(sum(map(len, parts)))})
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        with suppress(TimeoutError):  # it takes nothing: its connection is closed
            async with asyncio.timeout(None) as limit:
                for number, part in enumerate(parts, start=1):
                    await self._write(send, limit, part, more=number < len(parts))


def json_pieces(value: Any, depth: int) -> Iterator[bytes]:
    """The JSON of it, long lists piece by piece; `depth`: of what has such in it."""
    if depth and isinstance(value, Mapping):
        yield b"{"
        for number, (key, of) in enumerate(value.items()):
            yield (b"," if number else b"") + _json(key) + b":"
            yield from json_pieces(of, depth - 1)
        yield b"}"
    elif depth and isinstance(value, list) and value and isinstance(value[0], Mapping):
        for number, each in enumerate(value):
            yield b"," if number else b"["
            yield from json_pieces(each, depth - 1)
        yield b"]"
    elif isinstance(value, list) and len(value) > AT_ONCE:
        for start in range(0, len(value), AT_ONCE):
            yield (b"," if start else b"[") + _json(value[start : start + AT_ONCE])[1:-1]
        yield b"]"
    else:
        yield _json(value)


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


async def gather(streams: Sequence[Callable[[], AsyncGenerator[T, None]]]) -> AsyncGenerator[T, None]:
    """What they bring, as it comes; each in a task of its own. The first that fails ends all."""
    if len(streams) == 1:
        async with aclosing(streams[0]()) as only:
            async for part in only:
                yield part
        return
    came: asyncio.Queue[T | BaseException | None] = asyncio.Queue(len(streams))
    tasks = [asyncio.create_task(_into(came, stream)) for stream in streams]
    try:
        async for part in _until_all_end(came, len(tasks)):
            yield part
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _into(came: asyncio.Queue[T | BaseException | None], stream: Callable[[], AsyncGenerator[T, None]]) -> None:
    """None comes last, or what the stream failed with."""
    try:
        async with aclosing(stream()) as parts:
            async for part in parts:
                await came.put(part)
    except Exception as error:
        await came.put(error)
    else:
        await came.put(None)


async def _until_all_end(came: asyncio.Queue[T | BaseException | None], running: int) -> AsyncIterator[T]:
    while running:
        part = await came.get()
        if isinstance(part, BaseException):
            raise part
        if part is None:
            running -= 1
        else:
            yield part
