"""Who is there during a flood and no part of it: a probe of health, and a client with a token of its own.

    python -m bench.flood.onlookers probe|client ADDRESS TOKEN

Each is a process of its own, asks again and again, and answers each line that it reads with what it has seen since the
last one. The probe has high priority, where it may: what it measures is the router's delay, and not its own.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.router import ask
from kvrelay.v1 import generate_pb2_grpc

NICE = -10
GAP_S = 0.05
CLIENT_GAP_S = 0.2
TIMEOUT_S = 10.0


def percentiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {"count": 0, "p50": 0.0, "p99": 0.0, "max": 0.0}
    cuts = statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else [*values] * 99
    figures = {"count": len(values), "p50": cuts[49], "p99": cuts[98], "max": max(values)}
    return {name: round(figure, 1) for name, figure in figures.items()}


class Asking:
    """Asks without end, in a thread."""

    def __init__(self, ask: Callable[[], None], gap_s: float) -> None:
        self._ask = ask
        self._gap_s = gap_s
        self._ms: list[float] = []
        self._codes: Counter[str] = Counter()
        threading.Thread(target=self._forever, daemon=True).start()

    def _forever(self) -> None:
        while True:
            began_s = time.perf_counter()
            try:
                self._ask()
                self._ms.append((time.perf_counter() - began_s) * 1e3)
                self._codes["OK"] += 1
            except grpc.RpcError as error:
                self._codes[error.code().name] += 1
            time.sleep(self._gap_s)

    def seen(self) -> dict[str, Any]:
        (ms, self._ms), (codes, self._codes) = (self._ms, []), (self._codes, Counter())
        return {"ms": percentiles(ms), "codes": codes}


def probe(channel: grpc.Channel) -> Callable[[], None]:
    stub = health_pb2_grpc.HealthStub(channel)
    return lambda: stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)


def client(channel: grpc.Channel, token: str) -> Callable[[], None]:
    """To the first token of a stream; the rest is not waited for."""
    stub: Any = generate_pb2_grpc.GenerateStub
    generate = stub(channel).Generate
    metadata = (("authorization", f"Bearer {token}"),)

    def first_token() -> None:
        call = generate(ask(4), metadata=metadata, timeout=TIMEOUT_S)
        next(iter(call))
        call.cancel()

    return first_token


def main() -> None:
    name, address, token = sys.argv[1:]
    channel = grpc.insecure_channel(address)
    if name == "probe":
        with suppress(PermissionError):
            os.nice(NICE)
        asking = Asking(probe(channel), GAP_S)
    else:
        asking = Asking(client(channel, token), CLIENT_GAP_S)
    print("{}", flush=True)
    for _ in sys.stdin:
        print(json.dumps(asking.seen()), flush=True)


if __name__ == "__main__":
    main()
