"""Are the tokens that were counted those that were delivered? With cancels, faults, and routers that are killed.

    python -m bench.accounts [--quick] [--requests 10000] [--kills 16] [--usage-db sqlite|postgresql|URL]

Two routers, each a process with a ledger of its own, count into one database: an SQLite file and then a PostgreSQL
server, which is started here where it is installed. Clients ask over gRPC and HTTP, streams and answers in one message,
some with two choices, some leave in the middle, some are refused. Meanwhile one router after the other is killed by
SIGKILL and started again, workers die one at a time and all at once, and the database is away twice. Then each key's
usage is held against what its client has read (sessions.py), and again after both routers were killed once more. Kept
in bench/results/accounts.json; exit code 1 where anything is not as it should be.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sqlite3
import sys
import tempfile
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from bench.accounts.processes import Router, Workers
from bench.accounts.sessions import Key, Load
from bench.common import about, save
from kvrelay.client.client import Client
from kvrelay.client.usage import KeyUsage, grouped_by, of_all
from tests import postgres as programs
from tests.postgres import Postgres, postgres

SESSIONS = 40
STEP_S = 0.005
KEYS = 990  # a tokens file has 1,000 at most
LIMITED = {"requests_per_minute": 4}  # of every tenth key
LOCKED_S = 12.0  # longer than a router waits for SQLite
AWAY_S = 3.0
OPERATOR = Key("operator")
NAMES = [f"{'limited' if i % 10 == 9 else 'key'}-{i}" for i in range(KEYS)]

Fault = Callable[[], Awaitable[None]]
NUMBERS = ("requests", "prompt_tokens", "generated_tokens")


def routers_at(folder: Path, workers: Workers, url: str) -> list[Router]:
    tokens = folder / "tokens"
    tokens.touch(mode=0o600)
    tokens.write_text("\n".join(f"{key.name}:{key.token}" for key in (OPERATOR, *map(Key, NAMES))))
    settings: dict[str, Any] = {
        "usage_db": [str(folder / "usage.db"), url],
        "tokens_file": str(tokens),
        "num_routers": 2,
        "workers": workers.endpoints,
        "accounts": {name: LIMITED for name in NAMES if name.startswith("limited")},
    }
    return [Router({**settings, "name": f"router-{i}"}) for i in range(2)]


def database_away(folder: Path, url: str, server: Postgres | None) -> Fault | None:
    """None: it is somebody else's."""

    def lock() -> sqlite3.Connection:
        db = sqlite3.connect(folder / "usage.db", timeout=60, isolation_level=None, check_same_thread=False)
        db.execute("BEGIN EXCLUSIVE")
        return db

    async def locked() -> None:
        with closing(await asyncio.to_thread(lock)):
            await asyncio.sleep(LOCKED_S)

    async def stopped() -> None:
        assert server is not None
        await asyncio.to_thread(server.stop)
        await asyncio.sleep(AWAY_S)
        await asyncio.to_thread(server.start)

    return stopped if server is not None else None if url else locked


async def disturb(load: Load, faults: Sequence[Fault]) -> None:
    """One after the other, spread over the requests."""
    for number, fault in enumerate(faults, 1):
        while load.begun < load.most * number / (len(faults) + 1):
            await asyncio.sleep(0.005)
        await fault()


async def kill_and_start(router: Router, pause_s: float) -> None:
    await router.kill()
    await asyncio.sleep(pause_s)
    await router.start()


def faults_of(workers: Workers, routers: Sequence[Router], away: Fault | None, kills: int, requests: int) -> Any:
    """Three kinds, each of which goes its own way beside the others; and how many of each."""
    rng = random.Random(0)

    async def kill_worker() -> None:
        workers.kill_one(rng.randrange(6))

    def kill_router(number: int) -> Fault:
        return lambda: kill_and_start(routers[number % 2], rng.random() * 0.2)

    of_workers: list[Fault] = [kill_worker] * (requests // 100)
    for number in range(3):
        of_workers[len(of_workers) * (number + 1) // 4] = workers.kill_all
    of_databases = [away] * 2 if away is not None else []
    faults = [[kill_router(number) for number in range(kills)], of_workers, of_databases]
    told = ("routers killed", "workers killed", "all workers killed", "the database away")
    return faults, dict(zip(told, (kills, len(of_workers) - 3, 3, len(of_databases)), strict=True))


def ask_usage(routers: Sequence[Router]) -> dict[str, KeyUsage]:
    told = []
    for router in routers:
        client = Client(router.address, token=OPERATOR.token)
        told.append(client.usage())
        client.close()
    return grouped_by(of_all(told), lambda used: used.key)


async def counted(routers: Sequence[Router]) -> dict[str, KeyUsage]:
    """Once nothing is counted any more: that a client has left reaches a router a moment later."""
    before: dict[str, KeyUsage] = {}
    while (now := await asyncio.to_thread(ask_usage, routers)) != before:
        before = now
        await asyncio.sleep(2.0)
    return now


def compare(keys: Sequence[Key], usage: Mapping[str, KeyUsage]) -> tuple[dict[str, Any], list[str]]:
    """What was counted beside what was read, in all and by how the disturbed ended; and what is not as it should be."""
    beyond, errors = defaultdict[str, list[int]](list), []
    undisturbed = [key for key in keys if not key.ended]
    for key in keys:
        found = usage.get(key.name)
        more = [(getattr(found, name) if found is not None else 0) - getattr(key, name) for name in NUMBERS]
        if key.ended:
            beyond[key.ended].append(more[2])
        allowed = [[0, 0, more[2]], [1, key.unread_prompt, more[2]]][: 1 + bool(key.unread_prompt)]
        if more not in allowed or not 0 <= more[2] <= key.unread:
            errors.append(f"{key.name} ({key.ended or 'undisturbed'}) has {more} more than its client read")
    row = {
        "keys": len(keys),
        "undisturbed": {"keys": len(undisturbed), **{n: sum(getattr(k, n) for k in undisturbed) for n in NUMBERS}},
        "read": {name: sum(getattr(key, name) for key in keys) for name in NUMBERS},
        "counted": {name: sum(getattr(each, name) for each in usage.values()) for name in NUMBERS},
        "beyond": {
            how: {"requests": len(more), "none": more.count(0), "tokens": sum(more), "most": max(more)}
            for how, more in sorted(beyond.items())
        },
    }
    return row, errors


async def play(folder: Path, requests: int, kills: int, url: str, server: Postgres | None) -> dict[str, Any]:
    errors: list[str] = []
    workers = Workers(STEP_S)
    await workers.start()
    routers = routers_at(folder, workers, url)
    try:
        await asyncio.gather(*(router.start() for router in routers))
        load = Load(routers, requests, map(Key, NAMES), errors.append)
        faults, told = faults_of(workers, routers, database_away(folder, url, server), kills, requests)
        await asyncio.gather(load.play(SESSIONS), *(disturb(load, kind) for kind in faults))
        usage = await counted(routers)
        await asyncio.gather(*(kill_and_start(router, 0.0) for router in routers))
        if await counted(routers) != usage:
            errors.append("after both routers were killed the usage is another")
    finally:
        for router in routers:
            await router.stop()
        await workers.stop()
    row, wrong = compare(load.used, usage)
    return {"requests": load.begun, **load.outcomes, "faults": told, **row, "errors": errors + wrong}


def databases(wanted: str, stack: ExitStack) -> Iterator[tuple[str, str, Postgres | None]]:
    """Each one's name, its URL (empty: a file), and its server if that is ours."""
    if wanted in ("all", "sqlite"):
        yield "SQLite", "", None
    if wanted in ("all", "postgresql"):
        if programs.why_not:
            print(f"PostgreSQL is left out: {programs.why_not}")
            return
        server = stack.enter_context(postgres())
        yield "PostgreSQL", server.url, server
    if "://" in wanted:
        yield "PostgreSQL", wanted, None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.accounts", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="600 requests and 4 kills; writes no file")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=16, help="of routers")
    parser.add_argument("--usage-db", default="all", help="sqlite, postgresql, or the URL of an empty database")
    args = parser.parse_args()
    requests, kills = (600, 4) if args.quick else (args.requests, args.kills)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # of processes that see others killed
    rows = {}
    with ExitStack() as stack:
        for name, url, server in databases(args.usage_db, stack):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvrelay-accounts-"))
            rows[name] = asyncio.run(play(Path(folder), requests, kills, url, server))
            print(name, rows[name], flush=True)
    if not args.quick:
        save("accounts", {**about(), "sessions": SESSIONS, "databases": rows})
    return any(row["errors"] for row in rows.values())


if __name__ == "__main__":
    sys.exit(main())
