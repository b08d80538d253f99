"""What OpenAI's API costs a router beside gRPC: requests and tokens over both, and over a bare server of its stack.

    python -m bench.http [--quick]

The processes of bench.router: a router with workers that do no work, asked over gRPC and over HTTP in turns; and a bare
FastAPI and uvicorn server that streams the same events with nothing behind it. CPU time is the server process's. The
page's stream (/watch) is watched by one while nothing runs: what it costs. Writes bench/results/http.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import aiohttp
from fastapi import FastAPI
from starlette.responses import JSONResponse, StreamingResponse

from bench.common import about, save
from bench.router import Child, Measured, Side, answer, latencies_ms, many_requests, measured, percentiles, streams
from cluster.front.http.listening import HttpListener
from cluster.front.http.schemas import CompletionRequest
from cluster.front.http.streams import event
from kvrelay.v1 import generate_pb2

PATH = "/v1/completions"
IDLE_S = 5.0


class HttpStub:
    """Asks over HTTP what Generate's stub asks over gRPC."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url + PATH

    async def GenerateOnce(self, request: generate_pb2.GenerateRequest) -> Any:
        async with self._session.post(self._url, json=_body(request)) as response:
            return await response.json()

    async def Generate(self, request: generate_pb2.GenerateRequest) -> AsyncIterator[SimpleNamespace]:
        async with self._session.post(self._url, json=_body(request) | {"stream": True}) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    [choice] = json.loads(line[len("data: ") :])["choices"]
                    yield SimpleNamespace(token_ids=choice["token_ids"])


def _body(request: generate_pb2.GenerateRequest) -> dict[str, Any]:
    sampling = request.sampling
    return {
        "prompt": list(request.token_ids.ids),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "ignore_eos": sampling.ignore_eos,
        "return_token_ids": True,
    }


async def serve_bare(step_s: str) -> None:
    """A token to every call at each step, as bench.router's bare server: what HTTP itself costs."""
    app = FastAPI()
    head = {"id": "cmpl-0123456789abcdef", "object": "text_completion", "created": 0, "model": "bare"}

    def told(index: int) -> dict[str, Any]:
        choice = {"index": 0, "text": "", "logprobs": None, "finish_reason": None, "stop_reason": None}
        return {**head, "choices": [{**choice, "token_ids": [index]}]}

    @app.post(PATH)
    async def complete(asked: CompletionRequest) -> Any:
        if not asked.stream:
            return JSONResponse(told(0))

        async def events() -> AsyncIterator[bytes]:
            for index in range(asked.max_tokens or 16):
                if index:
                    await asyncio.sleep(float(step_s))
                yield event(told(index))

        return StreamingResponse(events(), media_type="text/event-stream")

    listener = HttpListener(app, max_connections=4096, max_stall_s=30.0, tls=None)
    port = await listener.start("127.0.0.1", 0)
    await answer({"port": port})
    await listener.stop()


def _figures(sides: dict[str, Measured]) -> dict[str, Any]:
    return {
        name: {"cpu_us": round(one.cpu_us, 1), "per_cpu_s": round(1e6 / one.cpu_us), "per_s": round(one.per_s)}
        for name, one in sides.items()
    }


async def bench(scale: float) -> dict[str, Any]:
    workers = Child("workers", "0.001")
    grpc_side = Side(Child("router", json.dumps(workers.ready["workers"]), json.dumps({"http_ports": [0]})))
    bare = Child("--serve", "0.001", module="bench.http")
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    router = grpc_side.child
    sides: dict[str, tuple[Any, Child]] = {
        "grpc": (grpc_side.stub, router),
        "http": (HttpStub(session, f"http://127.0.0.1:{router.ready['http_port']}"), router),
        "bare http": (HttpStub(session, f"http://127.0.0.1:{bare.ready['port']}"), bare),
    }
    try:
        for stub, _ in sides.values():
            await many_requests(stub, 50, 8)
            await streams(stub, 4, 16)
        idle = await measured(router, _nothing)
        watched = await _watched(session, f"http://127.0.0.1:{router.ready['http_port']}/watch", router)
        times: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(max(2, int(8 * scale))):
            for name, (stub, _) in sides.items():
                times[name] += await latencies_ms(stub, 40)
        count, length = int(2000 * scale), int(1000 * scale)
        requests = {n: await measured(c, lambda s=s: many_requests(s, count, 64)) for n, (s, c) in sides.items()}  # type: ignore[misc]
        tokens = {n: await measured(c, lambda s=s: streams(s, 64, length)) for n, (s, c) in sides.items()}  # type: ignore[misc]
        return {
            "latency_ms": {name: percentiles(values) for name, values in times.items()},
            "requests": _figures(requests),
            "tokens": _figures(tokens),
            "tokens_per_message": {name: round(one.count / one.messages, 1) for name, one in tokens.items()},
            "idle_cores": round(idle.cpu_s / idle.wall_s, 4),
            "watched_cores": round(watched.cpu_s / watched.wall_s, 4),
        }
    finally:
        await session.close()
        await grpc_side.close()
        bare.stop()
        workers.stop()


async def _nothing() -> tuple[int, int]:
    await asyncio.sleep(IDLE_S)
    return 1, 1


async def _watched(session: aiohttp.ClientSession, url: str, router: Child) -> Measured:
    async with session.get(url) as response:

        async def read() -> tuple[int, int]:
            ends = time.monotonic() + IDLE_S
            async for _ in response.content:
                if time.monotonic() > ends:
                    break
            return 1, 1

        return await measured(router, read)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a fifth of the work; writes no file")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    if arguments.serve:
        asyncio.run(serve_bare(arguments.serve))
        return
    results = asyncio.run(bench(0.2 if arguments.quick else 1.0))
    print(json.dumps(results, indent=2))
    if not arguments.quick:
        save("http", about() | results)


if __name__ == "__main__":
    main()
