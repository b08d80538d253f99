"""Floods: each is a process of its own, of low priority, that tells how its calls ended.

    python -m bench.flood.attacks NAME ADDRESS TOKEN COUNT

On a few cores the clients of a flood would take the processor from the router that they flood, as they could not from
their own machines: so they are nice.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.flood import frames
from bench.router import ask
from kvrelay.v1 import generate_pb2_grpc

NICE = 15
CALLS_A_CHANNEL = 500
MESSAGES_AT_ONCE = 5
UNREAD_S = 60.0  # by when a router has given up whom it writes to in vain
READ_S = 60.0  # what is left of a stream, with its code
QUICK_S = 5.0  # within which one that goes on has brought something
OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
]
# Else gRPC itself reads megabytes ahead for who does not read.
SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_535)]


class Target:
    def __init__(self, address: str, token: str) -> None:
        self.address = address
        self.metadata = (("authorization", f"Bearer {token}"),)

    def channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self.address, options=[*OPTIONS, *SMALL_WINDOW])


async def code_of(call: Awaitable[Any]) -> str:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return "OK"


async def codes_of(calls: list[Any]) -> list[str]:
    return await asyncio.gather(*map(code_of, calls))


async def end_of(call: Any) -> str:
    """A stream that began late may still be worth its tokens to the router, and is read like any other."""
    read_s = time.monotonic()
    try:
        async with asyncio.timeout(READ_S):
            while await call.read() is not grpc.aio.EOF:
                read_s = time.monotonic()
            return str((await call.code()).name)
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    except TimeoutError:
        return "goes on" if time.monotonic() < read_s + QUICK_S else "hangs"


async def large_messages(target: Target, count: int) -> Counter[str]:
    data = bytes(100 * 2**20)
    turns = asyncio.Semaphore(MESSAGES_AT_ONCE)

    async def send() -> str:
        async with turns, target.channel() as channel:
            method = channel.unary_unary("/kvrelay.v1.Generate/GenerateOnce")
            return await code_of(method(data, metadata=target.metadata))

    return Counter(await asyncio.gather(*(send() for _ in range(count))))


async def on_channels(target: Target, count: int, start: Any, work: Any) -> Counter[str]:
    """`count` calls, some hundred to a connection: each made by `start`, then `work` is made of all of them."""
    channels = [target.channel() for _ in range(-(-count // CALLS_A_CHANNEL))]
    calls = [start(channels[i % len(channels)]) for i in range(count)]
    codes = await work(calls)
    for call in calls:
        call.cancel()
    for channel in channels:
        await channel.close()
    return Counter(codes)


async def watches(target: Target, count: int) -> Counter[str]:
    """Until each has its first answer."""

    async def read_all(calls: list[Any]) -> list[str]:
        return await codes_of([call.read() for call in calls])

    watch = health_pb2.HealthCheckRequest()
    return await on_channels(target, count, lambda channel: health_pb2_grpc.HealthStub(channel).Watch(watch), read_all)


async def unread_streams(target: Target, count: int) -> Counter[str]:
    """Until the router must have ended all of them. Then what gRPC holds of each is read, and how it ended."""
    request = ask(60_000)
    request.sampling.n, request.sampling.logprobs = 64, 20

    async def read_late(calls: list[Any]) -> list[str]:
        await asyncio.sleep(UNREAD_S)
        return await asyncio.gather(*map(end_of, calls))

    def start(channel: grpc.aio.Channel) -> Any:
        return _stub(channel).Generate(request, metadata=target.metadata)

    return await on_channels(target, count, start, read_late)


async def requests_at_once(target: Target, count: int) -> Counter[str]:
    def start(channel: grpc.aio.Channel) -> Any:
        return _stub(channel).GenerateOnce(ask(16), metadata=target.metadata)

    return await on_channels(target, count, start, codes_of)


def _stub(channel: grpc.aio.Channel) -> Any:
    stub: Any = generate_pb2_grpc.GenerateStub
    return stub(channel)


async def wrong_tokens(target: Target, count: int) -> Counter[str]:
    return await requests_at_once(Target(target.address, "nobody-0123456789abcdef"), count)


async def messages_that_never_come(target: Target, count: int) -> Counter[str]:
    """Calls with a token and no message."""

    def start(channel: grpc.aio.Channel) -> Any:
        return channel.stream_unary("/kvrelay.v1.Generate/GenerateOnce")(metadata=target.metadata)

    return await on_channels(target, count, start, codes_of)


def by_hand(
    flood: Callable[[str, int], Coroutine[Any, Any, Counter[str]]],
) -> Callable[[Target, int], Coroutine[Any, Any, Counter[str]]]:
    return lambda target, count: flood(target.address, count)


# in this order, with their size
FLOODS: dict[str, tuple[Callable[[Target, int], Coroutine[Any, Any, Counter[str]]], int]] = {
    "large_messages": (large_messages, 50),
    "watches": (watches, 10_000),
    "unread_streams": (unread_streams, 500),
    "requests_at_once": (requests_at_once, 10_000),
    "messages_that_never_come": (messages_that_never_come, 10_000),
    "wrong_tokens": (wrong_tokens, 10_000),
    "rapid_reset": (by_hand(frames.rapid_reset), 50_000),
    "pings_and_settings": (by_hand(frames.pings_and_settings), 500_000),
    "endless_headers": (by_hand(frames.endless_headers), 100),
    "silent_connections": (by_hand(frames.silent_connections), 1000),
}


def main() -> None:
    name, address, token, count = sys.argv[1:]
    os.nice(NICE)
    codes = asyncio.run(FLOODS[name][0](Target(address, token), int(count)))
    print(json.dumps(codes), flush=True)


if __name__ == "__main__":
    main()
