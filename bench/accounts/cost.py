"""What counting costs a router: CPU time a request and a token, with and without, in turns over the same workers.

    python -m bench.accounts.cost [--quick]

Routers that differ in nothing but `usage_db`; one without is there twice, so that its ratio to itself says what chance
makes. Writes bench/results/accounts_cost.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from bench.accounts.processes import MODULE
from bench.common import about, save
from bench.router import Child, Side, many_requests, measured, streams
from tests import postgres as programs
from tests.postgres import postgres

TOKEN = "bench-0123456789abcdef"
OFF, AGAIN = "off", "off, again"
WORK = {
    "request": partial(many_requests, count=300, concurrency=32),
    "token": partial(streams, num_streams=32, max_tokens=200),
}


def started(workers: Child, ledgers: str, url: str = "") -> Side:
    settings = {"workers": workers.ready["workers"], "usage_db": [ledgers, url], "tokens": f"bench:{TOKEN}"}
    return Side(Child("router", json.dumps(settings), module=MODULE), token=TOKEN)


async def bench(rounds: int) -> dict[str, Any]:
    with ExitStack() as stack:
        workers = Child("workers", "0.0")
        stack.callback(workers.stop)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvrelay-accounts-")))
        sides = {OFF: started(workers, ""), "SQLite": started(workers, str(folder / "usage.db"))}
        if not programs.why_not:
            sides["PostgreSQL"] = started(workers, str(folder / "postgresql"), stack.enter_context(postgres()).url)
        sides[AGAIN] = started(workers, "")
        try:
            for side in sides.values():
                await many_requests(side.stub, 100, 8)
            return figures([await in_turn(sides) for _ in range(rounds)])
        finally:
            for side in sides.values():
                await side.close()


async def in_turn(sides: Mapping[str, Side]) -> dict[str, dict[str, float]]:
    """CPU us of each."""
    found: dict[str, dict[str, float]] = {}
    for name, side in sides.items():
        found[name] = {of: (await measured(side.child, partial(work, side.stub))).cpu_us for of, work in WORK.items()}
    return found


def figures(found: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    """Medians over the rounds, and each round's ratio to the router without."""
    return {
        name: {
            of: {
                "cpu_us": round(statistics.median(each[name][of] for each in found), 2),
                "ratio": _spread([each[name][of] / each[OFF][of] for each in found]),
            }
            for of in WORK
        }
        for name in found[0]
    }


def _spread(ratios: Sequence[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"low": round(low, 3), "median": round(middle, 3), "high": round(high, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.accounts.cost", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="4 rounds; writes no file")
    rounds = 4 if (quick := parser.parse_args().quick) else 30
    result = asyncio.run(bench(rounds))
    print(json.dumps(result, indent=2))
    if not quick:
        save("accounts_cost", {**about(), "rounds": rounds, "routers": result})


if __name__ == "__main__":
    main()
