"""Every worker replaced while requests run: what their streams show.

    python -m bench.rolling [--quick]

`kvrelay up` with one prefill and two decode workers serves IN_FLIGHT streams at a time, sampled with seeds. First all
requests are played undisturbed. Then they are played again, over and over, while another spec is applied that changes
limits and targets at once and a knob of every worker, so that all are replaced one after another, a stand-in beside
them; and then while the decode workers are replaced without one (`--max-surge 0`). Every answer must be what it was
undisturbed, token for token; no request may fail or be sent again, no token be computed twice, nothing stay held. Kept
in bench/results/rolling.json. Exit code 1 when anything of this does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from bench.common import about, demo_model, save
from bench.e2e import cluster, spec
from bench.moves import Played, gaps_of, leaks, play
from kvrelay.client.client import AsyncClient

IN_FLIGHT = 200
POLL_S = 0.2
ROLL_TIMEOUT_S = 600.0


def wanted_spec() -> dict[str, Any]:
    pools: list[dict[str, Any]] = [{"role": "prefill"}, {"role": "decode", "replicas": 2}]
    made: dict[str, Any] = spec(demo_model("tiny"))
    return made | {"pools": [pool | {"threads": 1, "kv_memory": "256MiB"} for pool in pools]}


def changed(before: dict[str, Any]) -> dict[str, Any]:
    pools = [pool | {"kv_memory": "192MiB"} for pool in before["pools"]]
    router = before["router"] | {"max_queued_requests": 900, "slo_ttft_ms": 5000.0}
    return before | {"pools": pools, "router": router}


async def roll(client: AsyncClient, begin: Callable[[], Awaitable[object]]) -> float:
    """Until it is done; returns the seconds that it took."""
    began_s = time.monotonic()
    await begin()
    while (rollout := (await client.spec()).rollout).running:
        if time.monotonic() > began_s + ROLL_TIMEOUT_S:
            raise TimeoutError(f"{rollout.current} of {rollout.total} workers: {rollout.reason}")
        await asyncio.sleep(POLL_S)
    if rollout.reason:
        raise RuntimeError(rollout.reason)
    return time.monotonic() - began_s


async def play_while(client: AsyncClient, calm: Played, begin: Callable[[], Awaitable[object]]) -> tuple[Played, float]:
    """The same requests again and again, until all are replaced."""
    played = Played(answers=dict(calm.answers))
    rolling = asyncio.create_task(roll(client, begin))
    while not rolling.done():
        await play(client, range(IN_FLIGHT), played, IN_FLIGHT)
        played.rounds += 1
    return played, await rolling


def row_of(played: Played, took_s: float) -> dict[str, Any]:
    return {
        "requests": played.rounds * IN_FLIGHT,
        "wrong": len(played.errors),
        "seconds": round(took_s, 1),
        "moves": played.moves,
        "sent_again": played.attempts,
        "recomputed_tokens": played.recomputed,
        "gaps_ms": gaps_of(played, played.moves),
    }


async def measure(endpoint: str, before: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    async with AsyncClient(endpoint) as client:
        calm = Played(rounds=1)
        began_s = time.monotonic()
        await play(client, range(IN_FLIGHT), calm, IN_FLIGHT)
        rows, wrong = {"undisturbed": row_of(calm, time.monotonic() - began_s)}, list(calm.errors)
        ways: dict[str, Callable[[], Awaitable[object]]] = {
            "all, with a stand-in": lambda: client.apply_spec(json.dumps(changed(before)), {}),
            "decode, without": lambda: client.roll("decode", max_surge=0),
        }
        for name, begin in ways.items():
            played, took_s = await play_while(client, calm, begin)
            rows[name] = row_of(played, took_s)
            wrong += [*played.errors, *await leaks(client)]
            wrong += [f"{name}: {played.attempts} requests were sent again"] * bool(played.attempts)
            wrong += [f"{name}: {played.recomputed} tokens were computed twice"] * bool(played.recomputed)
        return rows, wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.rolling", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="writes no file")
    args = parser.parse_args()
    before = wanted_spec()
    with cluster(before) as served:
        rows, wrong = asyncio.run(measure(served.endpoint, before))
    for name, row in rows.items():
        print(name, row)
    for line in wrong:
        print(f"error: {line}")
    if not args.quick:
        save("rolling", {**about(), "in_flight": IN_FLIGHT, "rows": rows, "errors": wrong})
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
