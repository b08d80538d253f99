"""What the page costs a router: its CPU with 200 requests in flight, watched by nobody, by one and by ten.

    python -m bench.page [--quick]

The processes of bench.router: a router, workers that do no work (five of each kind), and this client, which keeps 200
streams of a token each 20 ms open. Watchers read /watch as a browser does. Rounds of each number of watchers come in
turns, and the differences of rounds side by side are told, so that other load hits all alike. Writes
bench/results/page.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
from contextlib import AsyncExitStack
from statistics import median
from typing import Any

import aiohttp

from bench.common import about, save
from bench.router import Child, Measured, Side, ask, measured

IN_FLIGHT = 200
WATCHERS = (0, 1, 10)
STEP_S = "0.02"
ROUND_S = 10.0
LENGTH = 500  # tokens of a stream: ten seconds


async def _kept_busy(stub: Any) -> None:
    """One stream after another."""
    while True:
        async for _ in stub.Generate(ask(LENGTH)):
            pass


async def _read(session: aiohttp.ClientSession, url: str) -> None:
    async with session.get(url) as response:
        async for _ in response.content.iter_any():
            pass


async def _watched(router: Child, url: str, watchers: int) -> Measured:
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        reading = [asyncio.create_task(_read(session, url)) for _ in range(watchers)]
        await asyncio.sleep(1.5)  # what ended before is told first, once

        async def rest() -> tuple[int, int]:
            await asyncio.sleep(ROUND_S)
            return 1, 1

        found = await measured(router, rest)
        for each in reading:
            if each.done():
                each.result()  # it was to go on
            each.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        return found


async def bench(rounds: int) -> dict[str, Any]:
    workers = Child("workers", STEP_S, "10")
    side = Side(Child("router", json.dumps(workers.ready["workers"]), json.dumps({"http_ports": [0]})))
    url = f"http://127.0.0.1:{side.child.ready['http_port']}/watch"
    busy = [asyncio.create_task(_kept_busy(side.stub)) for _ in range(IN_FLIGHT)]
    try:
        await asyncio.sleep(3.0)
        cores: dict[int, list[float]] = {number: [] for number in WATCHERS}
        for _ in range(rounds):
            for number in WATCHERS:
                one = await _watched(side.child, url, number)
                cores[number].append(one.cpu_s / one.wall_s)
        return {"in_flight": IN_FLIGHT, "rounds": rounds, "watchers": [_figures(cores, number) for number in WATCHERS]}
    finally:
        for each in busy:
            each.cancel()
        await asyncio.gather(*busy, return_exceptions=True)
        await side.close()
        workers.stop()


def _figures(cores: dict[int, list[float]], number: int) -> dict[str, Any]:
    added = [with_them - without for with_them, without in zip(cores[number], cores[0], strict=True)]
    return {
        "watchers": number,
        "cores": round(median(cores[number]), 4),
        "added_cores": round(median(added), 4),
        "ratio": round(median(cores[number]) / median(cores[0]), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round; writes no file")
    logging.basicConfig(level=logging.WARNING)
    quick = parser.parse_args().quick
    results = asyncio.run(bench(1 if quick else 5))
    print(json.dumps(results, indent=2))
    if not quick:
        save("page", about() | results)


if __name__ == "__main__":
    main()
