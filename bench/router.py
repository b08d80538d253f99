"""What the router costs: latency it adds, requests and tokens through one router process, with workers that do no work.

    python -m bench.router [--quick]

Four processes: this client, the router, the fake workers, and a bare grpc.aio server that streams the same messages
with nothing behind it. Wall-clock figures on a loaded machine mean little; the ratios to the bare server and the CPU
time of the router process do. Writes bench/results/router.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc.aio

from kvrelay.v1 import generate_pb2, generate_pb2_grpc
from worker.wire.rpc import bind, make_server, open_channel
from worker.wire.tls import TlsFiles

RESULTS = Path(__file__).parent / "results"
PROMPT = list(range(3, 259))
START_TIMEOUT_S = 60.0


# the processes that are measured: each prints one line when ready, and its CPU seconds for each line it reads


async def serve_workers(step_s: float) -> None:
    from tests.fakes import FakeDecodeWorker, FakePrefillWorker

    limits: dict[str, Any] = {"num_pages": 1 << 20, "max_model_len": 1 << 16, "report_interval_s": 0.2}
    decode = FakeDecodeWorker(name="decode-0", step_s=step_s, max_unsent=8, **limits)
    prefill = FakePrefillWorker(name="prefill-0", decodes=[decode], **limits)
    endpoints = [await decode.start(), await prefill.start()]
    await _answer({"workers": [[e.name, e.role, e.address] for e in endpoints]})
    for worker in (prefill, decode):
        await worker.kill()


async def serve_router(workers: str, guard: str = "{}") -> None:
    from cluster.front.server import RouterServer, server_options
    from cluster.router.links.worker_link import WorkerEndpoint

    settings = json.loads(guard)
    tls = TlsFiles(**settings.pop("tls")) if "tls" in settings else None
    server = RouterServer(server_options(port=0, tls=tls, **settings))
    port = await server.start()
    server.set_workers(WorkerEndpoint(name=n, role=r, address=a) for n, r, a in json.loads(workers))
    while not server.router.is_ready:
        await asyncio.sleep(0.01)
    await _answer({"port": port})
    await server.stop()


class Bare(generate_pb2_grpc.GenerateServicer):
    """Streams one token to every call at each step: what a router would be if nothing had to be done."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._tick: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._step_s)
            tick, self._tick = self._tick, asyncio.get_running_loop().create_future()
            tick.set_result(None)

    async def Generate(self, request: generate_pb2.GenerateRequest, context: Any) -> None:
        for index in range(request.sampling.max_tokens):
            if index:
                await self._tick
            await context.write(generate_pb2.GenerateResponse(request_id="0123456789abcdef", token_ids=[index]))

    async def GenerateOnce(self, request: generate_pb2.GenerateRequest, _: Any) -> generate_pb2.GenerateOnceResponse:
        return generate_pb2.GenerateOnceResponse(request_id="0123456789abcdef", choices=[{"token_ids": [1]}])


async def serve_bare(step_s: float) -> None:
    server = make_server()
    bare = Bare(step_s)
    generate_pb2_grpc.add_GenerateServicer_to_server(bare, server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    ticking = asyncio.create_task(bare.run())
    await _answer({"port": port})
    ticking.cancel()
    await server.stop(0)


async def _answer(ready: dict[str, Any]) -> None:
    print(json.dumps(ready), flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        usage = resource.getrusage(resource.RUSAGE_SELF)
        print(json.dumps({"cpu_s": usage.ru_utime + usage.ru_stime, "rss_mb": usage.ru_maxrss / 1024}), flush=True)


class Child:
    def __init__(self, *arguments: str, module: str = "", checkout: str = "") -> None:
        """A role of this program's own, or another module that answers lines with lines. `checkout`: a folder with
        another version of all this."""
        command = [sys.executable, "-m", *([module] if module else ["bench.router", "--serve"]), *arguments]
        others: dict[str, Any] = {"cwd": checkout, "env": os.environ | {"PYTHONPATH": checkout}} if checkout else {}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **others)
        self.ready = self._read()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args!r} ended with {self._process.wait()}")
        value: dict[str, Any] = json.loads(line)
        return value

    def usage(self) -> dict[str, float]:
        return self.asked()

    def asked(self, line: str = "") -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._read()

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(START_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()


# what is measured


@dataclass(frozen=True)
class Measured:
    count: int  # requests, or tokens
    wall_s: float
    cpu_s: float  # of the server process
    messages: int = 0

    @property
    def per_s(self) -> float:
        return self.count / self.wall_s

    @property
    def cpu_us(self) -> float:
        return self.cpu_s / self.count * 1e6


def ask(max_tokens: int) -> generate_pb2.GenerateRequest:
    sampling = generate_pb2.SamplingParams(max_tokens=max_tokens, temperature=0, seed=1, ignore_eos=True)
    return generate_pb2.GenerateRequest(token_ids=generate_pb2.TokenIds(ids=PROMPT), sampling=sampling)


async def measured(server: Child, work: Callable[[], Awaitable[tuple[int, int]]]) -> Measured:
    cpu_before, began = server.usage()["cpu_s"], time.perf_counter()
    count, messages = await work()
    wall_s = time.perf_counter() - began
    return Measured(count, wall_s, server.usage()["cpu_s"] - cpu_before, messages)


async def latencies_ms(stub: Any, count: int) -> list[float]:
    """One request of one token after another."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        await stub.GenerateOnce(ask(1))
        times.append((time.perf_counter() - began) * 1e3)
    return times


async def many_requests(stub: Any, count: int, concurrency: int) -> tuple[int, int]:
    left = iter(range(count))

    async def one_after_another() -> None:
        for _ in left:
            await stub.GenerateOnce(ask(1))

    await asyncio.gather(*(one_after_another() for _ in range(concurrency)))
    return count, count


async def streams(stub: Any, num_streams: int, max_tokens: int) -> tuple[int, int]:
    """So many streams at once; returns tokens and messages."""

    async def read() -> tuple[int, int]:
        tokens = messages = 0
        async for response in stub.Generate(ask(max_tokens)):
            tokens += len(response.token_ids)
            messages += 1
        assert tokens == max_tokens, f"{tokens} tokens of {max_tokens}"
        return tokens, messages

    results = await asyncio.gather(*(read() for _ in range(num_streams)))
    return sum(r[0] for r in results), sum(r[1] for r in results)


class Side:
    """A server (router or bare) and a client's stub to it."""

    def __init__(self, child: Child, *, tls: TlsFiles | None = None, token: str = "") -> None:
        self.child = child
        self.tls = tls
        self.address = f"127.0.0.1:{child.ready['port']}"
        self.channel: grpc.aio.Channel = open_channel(self.address, tls)
        stub = generate_pb2_grpc.GenerateStub(self.channel)
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self.stub = SimpleNamespace(
            Generate=partial(stub.Generate, metadata=metadata),
            GenerateOnce=partial(stub.GenerateOnce, metadata=metadata),
        )

    async def close(self) -> None:
        await self.channel.close()
        self.child.stop()


def percentiles(values: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=100)
    return {"p50": round(cuts[49], 3), "p99": round(cuts[98], 3)}


async def compare(step_s: float, run: Callable[[Side, Side], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
    """Start workers, router and bare server, run, stop them."""
    workers = Child("workers", str(step_s))
    router = Side(Child("router", json.dumps(workers.ready["workers"])))
    bare = Side(Child("bare", str(step_s)))
    try:
        for side in (router, bare):
            await many_requests(side.stub, 50, 8)
            await streams(side.stub, 4, 16)
        return await run(router, bare)
    finally:
        await router.close()
        await bare.close()
        workers.stop()


def ratio(router: Measured, bare: Measured) -> dict[str, float]:
    return {
        "router_per_s": round(router.per_s),
        "bare_per_s": round(bare.per_s),
        "share_of_bare": round(router.per_s / bare.per_s, 2),
        "router_cpu_us": round(router.cpu_us, 1),
        "bare_cpu_us": round(bare.cpu_us, 1),
        "router_per_cpu_s": round(1e6 / router.cpu_us),
        "router_tokens_per_message": round(router.count / router.messages, 1),
    }


async def requests_and_latency(router: Side, bare: Side, scale: float) -> dict[str, Any]:
    rounds = max(2, int(10 * scale))
    times: dict[str, list[float]] = {"router": [], "bare": []}
    for _ in range(rounds):  # in turns, so that other load hits both
        times["router"] += await latencies_ms(router.stub, 50)
        times["bare"] += await latencies_ms(bare.stub, 50)
    through, plain = percentiles(times["router"]), percentiles(times["bare"])
    count = int(4000 * scale)
    measured_router = await measured(router.child, lambda: many_requests(router.stub, count, 64))
    measured_bare = await measured(bare.child, lambda: many_requests(bare.stub, count, 64))
    return {
        "latency_ms": {"router": through, "bare": plain},
        "added_ms": {key: round(through[key] - plain[key], 3) for key in through},
        "requests": ratio(measured_router, measured_bare),
        "router_rss_mb": round(router.child.usage()["rss_mb"]),
    }


async def tokens(router: Side, bare: Side, num_streams: int, max_tokens: int) -> dict[str, Any]:
    measured_router = await measured(router.child, lambda: streams(router.stub, num_streams, max_tokens))
    measured_bare = await measured(bare.child, lambda: streams(bare.stub, num_streams, max_tokens))
    return ratio(measured_router, measured_bare)


async def bench(quick: bool) -> dict[str, Any]:
    scale = 0.2 if quick else 1.0
    results = await compare(0.0, lambda router, bare: requests_and_latency(router, bare, scale))
    for name, step_s in (("tokens_paced", 0.02), ("tokens_flood", 0.0)):
        results[name] = await compare(step_s, lambda router, bare: tokens(router, bare, 64, int(500 * scale)))
    return results


def write(name: str, results: dict[str, Any]) -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    RESULTS.mkdir(exist_ok=True)
    machine = {"cpu": cpu[0].split(": ")[1] if cpu else "unknown", "cores": len(cpu), "python": sys.version.split()[0]}
    about = {"commit": commit.stdout.strip(), "machine": machine, "grpcio": grpc.__version__}
    (RESULTS / f"{name}.json").write_text(json.dumps({**about, **results}, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a fifth of the work; writes no file")
    parser.add_argument("--serve", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    if arguments.serve:
        what, *values = arguments.serve
        serve = {"workers": serve_workers, "bare": serve_bare}.get(what)
        asyncio.run(serve_router(*values) if serve is None else serve(float(values[0])))
        return
    results = asyncio.run(bench(arguments.quick))
    print(json.dumps(results, indent=2))
    if not arguments.quick:
        write("router", results)


if __name__ == "__main__":
    main()
