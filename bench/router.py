"""What the router costs: latency it adds, requests and tokens through one router process, with workers that do no work.

    python -m bench.router [--quick]

Four processes: this client, the router, the fake workers, and a bare grpc.aio server that streams the same messages
with nothing behind it. Wall-clock figures on a loaded machine mean little; the ratios to the bare server and the CPU
time of the router process do. Writes bench/results/router.json and draws docs/plots/router.svg: what a request and a
token cost by how many workers there are.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc.aio

from kvrelay.v1 import generate_pb2, generate_pb2_grpc
from worker.options import report_gap_s
from worker.wire.rpc import bind, make_server, open_channel
from worker.wire.tls import TlsFiles

RESULTS = Path(__file__).parent / "results"
NUM_WORKERS = (2, 16, 64, 256)
IDLE_REPORT_S = 1.0  # QUIET_INTERVALS of worker/streams/router_streams.py
HALF_LOAD_ROUNDS = 12  # of 25 requests through the router, and 25 to the bare server
PROMPT = list(range(3, 259))
START_TIMEOUT_S = 60.0


# the processes that are measured: each prints one line when ready, and its CPU seconds for each line it reads


async def serve_workers(step_s: str, number: str = "2", report_s: str = "") -> None:
    """So many, half of them prefill workers, each of which hands over to any of the others. They report as often as
    workers do to which something happens all the time, or every `report_s`."""
    from tests.fakes import FakeDecodeWorker, FakePrefillWorker

    limits: dict[str, Any] = {
        "num_pages": 1 << 20,
        "max_model_len": 1 << 16,
        "report_interval_s": float(report_s or report_gap_s(int(number))),
    }
    half = range(int(number) // 2)
    decodes = [FakeDecodeWorker(name=f"decode-{i}", step_s=float(step_s), max_unsent=8, **limits) for i in half]
    prefills = [FakePrefillWorker(name=f"prefill-{i}", decodes=decodes, **limits) for i in half]
    endpoints = [await worker.start() for worker in (*decodes, *prefills)]
    await answer({"workers": [[e.name, e.role, e.address] for e in endpoints]})
    for worker in (*prefills, *decodes):
        await worker.kill()


async def serve_router(workers: str, guard: str = "{}") -> None:
    from cluster.front.allowance.options import Account
    from cluster.front.bounds.memory import put_off_collections
    from cluster.front.server import RouterServer, server_options
    from cluster.router.links.worker_link import WorkerEndpoint
    from cluster.usage.options import UsageUrl

    settings = json.loads(guard)
    tls = TlsFiles(**settings.pop("tls")) if "tls" in settings else None
    ledgers, url = settings.pop("usage_db", ["", ""])  # an SQLite file, or where ledgers are with a URL
    usage_db = UsageUrl(url, Path(ledgers)) if url else Path(ledgers) if ledgers else None
    if "accounts" in settings:
        settings["accounts"] = {name: Account(**limits) for name, limits in settings["accounts"].items()}
    server = RouterServer(server_options(port=0, tls=tls, usage_db=usage_db, **settings))
    port = await server.start()
    server.set_workers(WorkerEndpoint(name=n, role=r, address=a) for n, r, a in json.loads(workers))
    while not server.router.is_ready:
        await asyncio.sleep(0.01)
    put_off_collections()  # as a router's own process does, and the next line, as worker/process.py
    gc.freeze()
    await answer({"port": port, "http_port": server.http_port})
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


async def serve_bare(step_s: str) -> None:
    server = make_server()
    bare = Bare(float(step_s))
    generate_pb2_grpc.add_GenerateServicer_to_server(bare, server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    ticking = asyncio.create_task(bare.run())
    await answer({"port": port})
    ticking.cancel()
    await server.stop(0)


async def answer(ready: dict[str, Any]) -> None:
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
        self.ready = self.read()

    @property
    def pid(self) -> int:
        return self._process.pid

    def read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args!r} ended with {self._process.wait()}")
        value: dict[str, Any] = json.loads(line)
        return value

    def usage(self) -> dict[str, float]:
        return self.asked()

    def asked(self, line: str = "") -> dict[str, Any]:
        self.send(line)
        return self.read()

    def send(self, line: str = "") -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

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


@asynccontextmanager
async def started(step_s: float, number: int = 2, report_s: str = "") -> AsyncIterator[tuple[Side, Side]]:
    """So many workers, a router with its metrics, and a bare server, all warm."""
    workers = Child("workers", str(step_s), str(number), report_s)
    router = Side(Child("router", json.dumps(workers.ready["workers"]), json.dumps({"metrics_port": 0})))
    bare = Side(Child("bare", str(step_s)))
    try:
        for side in (router, bare):
            await many_requests(side.stub, 50, 8)
            await streams(side.stub, 4, 16)
        yield router, bare
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


async def compared_latency(router: Side, bare: Side, rounds: int, count: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {"router": [], "bare": []}
    for _ in range(rounds):  # in turns, so that other load hits both
        times["router"] += await latencies_ms(router.stub, count)
        times["bare"] += await latencies_ms(bare.stub, count)
    through, plain = percentiles(times["router"]), percentiles(times["bare"])
    added = {key: round(through[key] - plain[key], 3) for key in through}
    return {"latency_ms": {"router": through, "bare": plain}, "added_ms": added}


async def requests_and_latency(router: Side, bare: Side, scale: float) -> dict[str, Any]:
    latency = await compared_latency(router, bare, max(2, int(10 * scale)), 50)
    count = int(4000 * scale)
    measured_router = await measured(router.child, lambda: many_requests(router.stub, count, 64))
    measured_bare = await measured(bare.child, lambda: many_requests(bare.stub, count, 64))
    return {
        **latency,
        "requests": ratio(measured_router, measured_bare),
        "router_rss_mb": round(router.child.usage()["rss_mb"]),
    }


async def tokens(router: Side, bare: Side, num_streams: int, max_tokens: int, rounds: int) -> dict[str, Any]:
    """The median round, by what a token costs the router."""
    found = []
    for _ in range(rounds):
        measured_router = await measured(router.child, lambda: streams(router.stub, num_streams, max_tokens))
        measured_bare = await measured(bare.child, lambda: streams(bare.stub, num_streams, max_tokens // 4))
        found.append(ratio(measured_router, measured_bare))
    return sorted(found, key=lambda each: each["router_cpu_us"])[rounds // 2]


async def half_load(router: Side, bare: Side, num_streams: int, max_tokens: int) -> dict[str, Any]:
    """One request of one token after another, beside streams that take about half of what the router can do. Their
    client is a process of its own, and the workers are the same that serve the others."""
    client = Child("client", router.address, str(num_streams), str(max_tokens))
    busy_before, began = router.child.usage()["cpu_s"], time.perf_counter()
    client.send()
    latency = await compared_latency(router, bare, HALF_LOAD_ROUNDS, 25)
    busy = (router.child.usage()["cpu_s"] - busy_before) / (time.perf_counter() - began)
    told = await asyncio.to_thread(client.read)
    client.stop()
    return {
        "streams": num_streams,
        "tokens_per_s": round(told["tokens"] / told["wall_s"]),
        "tokens_per_message": round(told["tokens"] / told["messages"], 1),
        "router_cores": round(busy, 2),
        **latency,
    }


async def grown(number: int, scale: float) -> dict[str, Any]:
    """What a request and a token cost, with so many workers."""
    async with started(0.0, number) as (router, _):
        many = await measured(router.child, lambda: many_requests(router.stub, int(2000 * scale), 64))
        told = await measured(router.child, lambda: streams(router.stub, 64, int(2000 * scale)))
    async with started(0.0, number, str(IDLE_REPORT_S)) as (router, _):
        idle = await measured(router.child, lambda: _nothing(5.0))
    shares = {"request_cpu_us": round(many.cpu_us, 1), "token_cpu_us": round(told.cpu_us, 2)}
    return {"workers": number, **shares, "idle_cores": round(idle.cpu_s / idle.wall_s, 3)}


async def _nothing(seconds: float) -> tuple[int, int]:
    await asyncio.sleep(seconds)
    return 1, 1


async def bench(quick: bool) -> dict[str, Any]:
    scale, rounds = (0.2, 1) if quick else (1.0, 3)
    async with started(0.0) as sides:
        results = await requests_and_latency(*sides, scale)
        results["tokens_flood_64"] = await tokens(*sides, 64, int(2000 * scale), rounds)
    async with started(0.0) as sides:
        results["tokens_flood_1024"] = await tokens(*sides, 1024, int(300 * scale), rounds)
    async with started(0.02) as sides:
        results["tokens_paced"] = await tokens(*sides, 64, int(500 * scale), rounds)
    async with started(0.001) as sides:
        results["half_load"] = await half_load(*sides, 64, int(3000 * scale))
    results["growth"] = [await grown(number, scale) for number in ((2, 64) if quick else NUM_WORKERS)]
    return results


async def serve_client(address: str, num_streams: str, max_tokens: str) -> None:
    """For a line, plays the streams and answers with what they took."""
    print("{}", flush=True)
    async with open_channel(address) as channel:
        stub = generate_pb2_grpc.GenerateStub(channel)
        while await asyncio.to_thread(sys.stdin.readline):
            began = time.perf_counter()
            count, messages = await streams(stub, int(num_streams), int(max_tokens))
            told = {"tokens": count, "messages": messages, "wall_s": time.perf_counter() - began}
            print(json.dumps(told), flush=True)


def write(name: str, results: dict[str, Any]) -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    RESULTS.mkdir(exist_ok=True)
    machine = {"cpu": cpu[0].split(": ")[1] if cpu else "unknown", "cores": len(cpu), "python": sys.version.split()[0]}
    about = {"commit": commit.stdout.strip(), "machine": machine, "grpcio": grpc.__version__}
    (RESULTS / f"{name}.json").write_text(json.dumps({**about, **results}, indent=2) + "\n")


SERVES: dict[str, Callable[..., Coroutine[Any, Any, None]]] = {
    "workers": serve_workers,
    "router": serve_router,
    "bare": serve_bare,
    "client": serve_client,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a fifth of the work; writes no file")
    parser.add_argument("--serve", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    if arguments.serve:
        what, *values = arguments.serve
        asyncio.run(SERVES[what](*values))
        return
    results = asyncio.run(bench(arguments.quick))
    print(json.dumps(results, indent=2))
    if not arguments.quick:
        write("router", results)
        from bench.plots import draw  # with matplotlib, which the processes that are measured do not load

        draw("router", results)


if __name__ == "__main__":
    main()
