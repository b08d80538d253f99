"""What a router keeps of a flood: its memory, how soon health answers meanwhile, and what is left a minute later.

    python -m bench.flood [--quick]

The router and its workers, which do no work, are processes of their own. One after another: messages of 100 MiB,
watches of health, streams that nobody reads with 64 choices and 20 log-probabilities a token, requests all at once.
--quick is a tenth of it. Health is asked by the process that floods: on a busy machine its own delays count, too.
Writes bench/results/flood.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.common import about, save
from bench.router import Child, ask
from kvrelay.v1 import generate_pb2_grpc

MOST_RSS_MB = 1000
MOST_CHECK_MS = 100
SETTLE_S = 60.0
CHECK_GAP_S = 0.05
STREAMS_S = 20.0  # that streams are left unread
CALLS_A_CHANNEL = 500
UNBOUNDED = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]


class Look:
    """Asks for health and looks at the router's memory again and again, while something else goes on."""

    def __init__(self, pid: int, address: str) -> None:
        self._process = psutil.Process(pid)
        self._address = address
        self.rss_mb: list[float] = []
        self.check_ms: list[float] = []

    @asynccontextmanager
    async def during(self) -> AsyncIterator[None]:
        async with grpc.aio.insecure_channel(self._address, options=UNBOUNDED) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            await stub.Check(health_pb2.HealthCheckRequest())
            task = asyncio.create_task(self._look(stub))
            try:
                yield
            finally:
                task.cancel()

    async def _look(self, stub: Any) -> None:
        while True:
            began = time.perf_counter()
            await stub.Check(health_pb2.HealthCheckRequest())
            self.check_ms.append((time.perf_counter() - began) * 1e3)
            self.rss_mb.append(self.rss())
            await asyncio.sleep(CHECK_GAP_S)

    def rss(self) -> float:
        return float(self._process.memory_info().rss) / 2**20

    def files(self) -> int:
        return int(self._process.num_fds())


async def code_of(call: Awaitable[Any]) -> str:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return "OK"


async def large_messages(address: str, count: int) -> Counter[str]:
    codes: Counter[str] = Counter()
    data = bytes(100 * 2**20)
    for _ in range(count):
        async with grpc.aio.insecure_channel(address, options=UNBOUNDED) as channel:
            codes[await code_of(channel.unary_unary("/kvrelay.v1.Generate/GenerateOnce")(data))] += 1
    return codes


async def on_channels(address: str, count: int, start: Any, work: Any) -> Counter[str]:
    """`count` calls, some hundred to a connection: each made by `start`, then `work` is made of all of them."""
    channels = [grpc.aio.insecure_channel(address, options=UNBOUNDED) for _ in range(-(-count // CALLS_A_CHANNEL))]
    calls = [start(channels[i % len(channels)]) for i in range(count)]
    codes = await work(calls)
    for call in calls:
        call.cancel()
    for channel in channels:
        await channel.close()
    return Counter(codes)


async def watches(address: str, count: int) -> Counter[str]:
    async def read_all(calls: list[Any]) -> list[str]:
        return await asyncio.gather(*(code_of(call.read()) for call in calls))

    watch = health_pb2.HealthCheckRequest()
    return await on_channels(address, count, lambda channel: health_pb2_grpc.HealthStub(channel).Watch(watch), read_all)


async def unread_streams(address: str, count: int) -> Counter[str]:
    async def read_nothing(calls: list[Any]) -> list[str]:
        await asyncio.sleep(STREAMS_S)
        return [(await call.code()).name if call.done() else "still open" for call in calls]

    request = ask(4000)
    request.sampling.n, request.sampling.logprobs = 64, 20
    return await on_channels(address, count, lambda channel: _stub(channel).Generate(request), read_nothing)


async def requests_at_once(address: str, count: int) -> Counter[str]:
    async def answers(calls: list[Any]) -> list[str]:
        return await asyncio.gather(*map(code_of, calls))

    return await on_channels(address, count, lambda channel: _stub(channel).GenerateOnce(ask(16)), answers)


def _stub(channel: grpc.aio.Channel) -> Any:
    stub: Any = generate_pb2_grpc.GenerateStub
    return stub(channel)


async def flood(router: Child, share: float) -> dict[str, Any]:
    address = f"127.0.0.1:{router.ready['port']}"
    look = Look(router.pid, address)
    await requests_at_once(address, 20)  # what is made at first use
    before = {"rss_mb": look.rss(), "files": look.files()}
    parts: dict[str, Any] = {}
    floods = (large_messages, 50), (watches, 10_000), (unread_streams, 500), (requests_at_once, 10_000)
    for work, count in floods:
        look.rss_mb, look.check_ms = [], []
        async with look.during():
            codes = await work(address, round(count * share))
        parts[work.__name__] = {
            "count": round(count * share),
            "codes": codes,
            "most_rss_mb": round(max(look.rss_mb, default=look.rss()), 1),
            "check_ms": {"median": round(statistics.median(look.check_ms), 1), "max": round(max(look.check_ms), 1)},
        }
        print(f"{work.__name__}: {json.dumps(parts[work.__name__])}", flush=True)
    await asyncio.sleep(SETTLE_S)
    after = {"rss_mb": look.rss(), "files": look.files()}
    return {
        "parts": parts,
        "before": before,
        "after": after,
        "kept": {
            f"below {MOST_RSS_MB} MB": max(part["most_rss_mb"] for part in parts.values()) < MOST_RSS_MB,
            f"health within {MOST_CHECK_MS} ms": max(part["check_ms"]["max"] for part in parts.values())
            < MOST_CHECK_MS,
            "documented codes only": not any({"INTERNAL", "UNKNOWN"} & set(part["codes"]) for part in parts.values()),
            "back within a minute": after["rss_mb"] < before["rss_mb"] + 100 and after["files"] <= before["files"] + 2,
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.flood", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of it")
    share = 0.1 if parser.parse_args().quick else 1.0
    workers = Child("workers", "0.05")
    router = Child("router", json.dumps(workers.ready["workers"]))
    try:
        result = about() | {"share": share} | asyncio.run(flood(router, share))
    finally:
        router.stop()
        workers.stop()
    print(json.dumps(result["kept"], indent=1), "before", result["before"], "after", result["after"])
    print(save("flood", result))
    return 0 if all(result["kept"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
