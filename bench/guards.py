"""What tokens, accounts and TLS cost a router: five routers, with and without, over the same workers, asked in turns.

    python -m bench.guards [--quick] [--before CHECKOUT]

Beside them, with --before, the router of another version, from its folder, over the same workers: "before", and
"before, token", to which all are compared then. Tokens are paced, one in 20 ms for each stream. Writes
bench/results/guards.json. The processes and what they are asked are those of bench/router.py.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.router import Child, Side, latencies_ms, many_requests, measured, percentiles, streams, write
from tests.certificates import write_tls
from worker.wire.rpc import open_channel
from worker.wire.tls import TlsFiles

STEP_S = "0.02"  # of the workers' decoding
LAUNCHES, ROUNDS = 5, 8
UNGUARDED = "before"
BEFORE = "before, token"  # to which others are compared, round by round; where it is not, to the router without guards
GUARDS = ("none", "token", "token and accounts", "token and accounts, none explained", "TLS", "token and TLS")
LIMITS = {"requests_per_minute": 1 << 30, "tokens_per_minute": 1 << 40, "max_concurrent": 1 << 20}  # that nobody meets


@dataclass(frozen=True, slots=True)
class Rounds:
    """Of one router, round by round."""

    times_ms: list[float] = field(default_factory=list)
    connects_ms: list[float] = field(default_factory=list)
    request_us: list[float] = field(default_factory=list)
    token_us: list[float] = field(default_factory=list)


async def bench_guards(quick: bool, before: str = "") -> dict[str, Any]:
    """The routers, asked in turns, so that other load hits all; started anew several times, since two processes of one
    program differ by some percent."""
    names = [*GUARDS, *([UNGUARDED, BEFORE] if before else [])]
    found = {name: Rounds() for name in names}
    for _ in range(1 if quick else LAUNCHES):
        await _launch(found, before)
    to = found[BEFORE if before else GUARDS[0]]
    return {
        "guards": {
            name: {
                "latency_ms": percentiles(each.times_ms),
                "connect_ms_p50": round(statistics.median(each.connects_ms), 3),
                "request_cpu_us": round(statistics.median(each.request_us), 1),
                "token_cpu_us": round(statistics.median(each.token_us), 2),
                "request_ratio": _ratio(each.request_us, to.request_us),
                "token_ratio": _ratio(each.token_us, to.token_us),
            }
            for name, each in found.items()
        }
    }


async def _launch(found: dict[str, Rounds], before: str) -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        workers = Child("workers", STEP_S)
        stack.callback(workers.stop)
        sides = {}
        for name in found:
            is_before = name in (UNGUARDED, BEFORE)
            sides[name] = _guarded(Path(folder), workers, name, before if is_before else "")
        try:
            for side in sides.values():
                await many_requests(side.stub, 50, 8)
            await _in_turns(sides, found)
        finally:
            for side in sides.values():
                await side.close()


def _guarded(folder: Path, workers: Child, name: str, checkout: str = "") -> Side:
    token = "bench-0123456789abcdef" if "token" in name else ""
    settings: dict[str, Any] = {"auth": True, "tokens": f"bench:{token}"} if token else {}
    if "accounts" in name:
        settings |= {"accounts": {"bench": LIMITS}, "usage_db": [str(folder / f"{name}.db"), ""]}
    if "none explained" in name:
        settings["explained_requests"] = 0
    tls = None
    if "TLS" in name:
        files = write_tls(folder, trustme.CA(), "127.0.0.1", stem=name.replace(" ", "-"))
        settings["tls"] = {"cert": files.cert, "key": files.key}
        tls = TlsFiles(ca=files.ca)
    child = Child("router", json.dumps(workers.ready["workers"]), json.dumps(settings), checkout=checkout)
    return Side(child, tls=tls, token=token)


async def _in_turns(sides: dict[str, Side], found: dict[str, Rounds]) -> None:
    names = [*sides]
    for number in range(ROUNDS):
        for name in names[number % len(names) :] + names[: number % len(names)]:  # nobody is always behind the same
            side, each = sides[name], found[name]
            each.times_ms.extend(await latencies_ms(side.stub, 20))
            each.connects_ms.extend([await connect_ms(side) for _ in range(5)])
            work = partial(many_requests, side.stub, 300, 32)
            each.request_us.append((await measured(side.child, work)).cpu_us)
            work = partial(streams, side.stub, 64, 40)
            each.token_us.append((await measured(side.child, work)).cpu_us)


def _ratio(values: Sequence[float], to: Sequence[float]) -> dict[str, float]:
    """The median, and the quarters beside it."""
    cuts = statistics.quantiles([value / each for value, each in zip(values, to, strict=True)], n=4)
    return {key: round(cut, 3) for key, cut in zip(("low", "median", "high"), cuts, strict=True)}


async def connect_ms(side: Side) -> float:
    """A channel of its own, to its first answer: without a token health is what answers."""
    began = time.perf_counter()
    async with open_channel(side.address, side.tls) as channel:
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        return (time.perf_counter() - began) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a fifth of the work; writes no file")
    parser.add_argument("--before", default="", metavar="CHECKOUT", help="a folder with another version, beside these")
    arguments = parser.parse_args()
    results = asyncio.run(bench_guards(arguments.quick, arguments.before))
    print(json.dumps(results, indent=2))
    if not arguments.quick:
        write("guards", results)


if __name__ == "__main__":
    main()
