"""A thousand moves of running requests between decode workers, in a cluster of real processes: what their streams show.

    python -m bench.moves [--quick] [--moves 1000] [--kills 20]

`kvrelay up` with one prefill and two decode workers serves `STREAMS` streams at a time, sampled with seeds. First all
requests are played undisturbed. Then they are played again, over and over, while one decode worker after another is
drained at random moments and taken back, or made a mixed one and back, and while it is one the prefill worker is
drained amid a handful of long prompts, and passes on what it has not read to its end; until there were so many moves;
then for `--kills`, with SIGKILL of a random decode worker in the middle of moves. Every answer must be what it was
undisturbed, token for token; nothing may stay held; without kills no request may be sent again and no token computed
twice; each answer comes with a good receipt for each of its moves. The table shows gaps between tokens, as a client
sees them: all of them, and the largest k, k being the number of moves, beside the largest k of the run without moves.
Kept in bench/results/moves.json. Exit code 1 when anything of this does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from bench.common import about, demo_model, save
from bench.e2e import cluster, spec
from cluster.deploy.roster import SERVED_WELL_S
from kvrelay.client.client import AsyncClient
from kvrelay.client.types import KvrelayError, WorkerState

STREAMS = 16  # at a time
REQUESTS = 64
PROMPT, OUTPUT = (16, 200), (150, 350)  # tokens
LONG_PROMPT, SHORT_OUTPUT = (500, 700), (8, 32)
LONG = range(REQUESTS, REQUESTS + 12)  # that come at once
PREFILL, DECODE = "prefill-0", ("decode-0", "decode-1")
BACK_S = 60.0  # for a worker to be there again


@dataclass
class Played:
    answers: dict[int, tuple[int, ...]] = field(default_factory=dict)
    gaps_s: list[float] = field(default_factory=list)
    moves: int = 0
    kills: int = 0
    rounds: int = 0  # of all requests
    roles: int = 0  # changes of them
    attempts: int = 0
    recomputed: int = 0
    errors: list[str] = field(default_factory=list)


async def ask(client: AsyncClient, number: int, played: Played) -> None:
    rng = random.Random(number)
    lengths = (LONG_PROMPT, SHORT_OUTPUT) if number in LONG else (PROMPT, OUTPUT)
    prompt = [rng.randrange(5, 4000) for _ in range(rng.randint(*lengths[0]))]
    wanted: dict[str, Any] = {"temperature": 0.8, "seed": number, "max_tokens": rng.randint(*lengths[1])}
    tokens: list[int] = []
    last_s = 0.0
    try:
        async with client.stream(prompt, **wanted, ignore_eos=True, timeout_s=120) as stream:
            async for delta in stream:
                now = time.perf_counter()
                if last_s and delta.token_ids:
                    played.gaps_s.append(now - last_s)
                last_s = now
                tokens.extend(delta.token_ids)
            result = stream.completion()
    except KvrelayError as error:
        played.errors.append(f"request {number}: {error.code} {error.message}")
        return
    if number in played.answers and played.answers[number] != tuple(tokens):
        played.errors.append(f"request {number} has another answer than before")
    played.answers[number] = tuple(tokens)
    if result.timeline is not None:
        played.moves += result.timeline.moves
        if sum(receipt.checksums_ok for receipt in result.moved) != result.timeline.moves:
            played.errors.append(f"request {number}: {result.timeline.moves} moves, and the receipts {result.moved}")
        played.attempts += result.timeline.attempts - 1
    played.recomputed += 0 if result.receipt is None else result.receipt.recomputed_tokens


async def play(client: AsyncClient, numbers: Sequence[int], played: Played, streams: int = STREAMS) -> None:
    waiting = list(numbers)

    async def stream() -> None:
        while waiting:
            await ask(client, waiting.pop(), played)

    await asyncio.gather(*(stream() for _ in range(streams)))


async def play_long(client: AsyncClient, played: Played) -> None:
    await asyncio.gather(*(ask(client, number, played) for number in LONG))


async def disturb(client: AsyncClient, played: Played, kills: int, seed: int) -> None:
    """Drain one decode worker after the other, until cancelled; or make it one of both phases for a while. SIGKILL one
    now and then, so many times."""
    rng = random.Random(seed)
    while True:
        name = rng.choice(DECODE)
        await client.drain(name, force=True)
        if kills and rng.random() < 0.5:
            await asyncio.sleep(rng.random() * 0.1)
            await kill(client, rng.choice(DECODE))
            kills, played.kills = kills - 1, played.kills + 1
        elif not kills and rng.random() < 0.2:
            await become(client, name, "mixed")
            reading = asyncio.create_task(play_long(client, played))
            await asyncio.sleep(rng.random() * 0.05)
            await client.drain(PREFILL)
            await until(client, PREFILL, lambda worker: worker.state == "drained")
            await client.drain(PREFILL, undo=True)
            await reading
            await become(client, name, "decode")
            played.roles += 2
        else:
            await until(client, name, lambda worker: worker.state == "drained")
        await client.drain(name, undo=True)
        await asyncio.sleep(rng.random() * 0.2)


async def become(client: AsyncClient, name: str, role: str) -> None:
    await client.set_role(name, role, force=True)
    await until(client, name, lambda worker: (worker.role, worker.state) == (role, "ready"))


async def kill(client: AsyncClient, name: str) -> None:
    """The process that listens for it; and wait for its successor, and for the other."""
    worker = next(each for each in (await client.status()).workers if each.name == name)
    port = int(worker.address.rpartition(":")[2])
    listening = psutil.net_connections("tcp")
    pid = next(each.pid for each in listening if each.status == psutil.CONN_LISTEN and each.laddr.port == port)
    os.kill(pid, signal.SIGKILL)
    await until(client, name, lambda each: each.losses > worker.losses)
    for each in DECODE:
        await until(client, each, lambda worker: worker.state in ("ready", "draining", "drained"))
    await asyncio.sleep(SERVED_WELL_S + 1)  # else the next one would wait ever longer before it loads


async def passed_by(client: AsyncClient) -> int:
    """Prompts, among all that moved."""
    workers = (await client.status()).workers
    return next(worker.counters.get("prompts_passed", 0) for worker in workers if worker.name == PREFILL)


def held(worker: WorkerState) -> int:
    return worker.num_waiting + worker.num_running


async def until(client: AsyncClient, name: str, holds: Callable[[WorkerState], bool]) -> None:
    deadline = time.monotonic() + BACK_S
    while time.monotonic() < deadline:
        if any(each.name == name and holds(each) for each in (await client.status()).workers):
            return
        await asyncio.sleep(0.02)
    raise TimeoutError(f"{name}: what was waited for did not come in {BACK_S:g} s")


async def play_disturbed(client: AsyncClient, calm: Played, *, moves: int, kills: int, seed: int) -> Played:
    """The same requests again and again, until there were so many moves, and so many kills."""
    played = Played(answers=dict(calm.answers))
    trouble = asyncio.create_task(disturb(client, played, kills, seed))
    while not trouble.done() and (played.moves < moves or played.kills < kills):
        await play(client, range(REQUESTS), played)
        print(f"  {played.moves} moves, {played.kills} kills, {len(played.errors)} errors", flush=True)
    trouble.cancel()
    outcome = (await asyncio.gather(trouble, return_exceptions=True))[0]
    if not isinstance(outcome, asyncio.CancelledError):
        played.errors.append(f"the drains ended: {outcome!r}")
    for name in (PREFILL, *DECODE):
        await client.drain(name, undo=True)
    return played


async def leaks(client: AsyncClient) -> list[str]:
    """What is still held when all is over."""
    for worker in (await client.status()).workers:
        try:
            await until(client, worker.name, lambda each: each.available_pages == each.total_pages and not held(each))
        except TimeoutError as error:
            return [f"something is held: {error}"]
    return []


def gaps_of(played: Played, num_largest: int) -> dict[str, float]:
    gaps_ms = sorted(1e3 * gap for gap in played.gaps_s)
    largest = gaps_ms[-max(1, num_largest) :]
    figures = {"p50": statistics.median(gaps_ms), "p99": gaps_ms[int(0.99 * len(gaps_ms))], "max": gaps_ms[-1]}
    figures |= {"largest_p50": statistics.median(largest), "largest_p90": largest[int(0.9 * len(largest))]}
    return {name: round(value, 2) for name, value in figures.items()}


def row_of(played: Played, share: float) -> dict[str, Any]:
    """`share`: of all gaps, that of a move."""
    return {
        "requests": len(played.answers),
        "tokens": len(played.gaps_s),
        "moves": played.moves,
        "role_changes": played.roles,
        "kills": played.kills,
        "sent_again": played.attempts,
        "recomputed_tokens": played.recomputed,
        "gaps_ms": gaps_of(played, round(share * len(played.gaps_s))),
    }


async def measure(endpoint: str, moves: int, kills: int) -> tuple[dict[str, Any], list[str]]:
    async with AsyncClient(endpoint) as client:
        calm = Played()
        for _ in range(2):  # the first warms up
            calm = Played(answers=calm.answers)
            await play(client, range(REQUESTS), calm)
            await play_long(client, calm)
        before = (await client.status()).counters
        moved = await play_disturbed(client, calm, moves=moves, kills=0, seed=0)
        after, passed = (await client.status()).counters, await passed_by(client)
        wrong = [*calm.errors, *moved.errors, *await leaks(client)]
        wrong += [f"{moved.attempts} requests were sent again without a kill"] * bool(moved.attempts)
        wrong += [f"{moved.recomputed} tokens were computed twice without a kill"] * bool(moved.recomputed)
        share = moved.moves / len(moved.gaps_s)
        rows = {"undisturbed": row_of(calm, share), "moved": row_of(moved, share)}
        rows["moved"] |= {"passed": passed}
        rows["moved"] |= {name: after[name] - before.get(name, 0) for name in ("moves_failed", "stale_tokens")}
        if kills:
            killed = await play_disturbed(client, calm, moves=0, kills=kills, seed=1)
            wrong += [*killed.errors, *await leaks(client)]
            rows["moved, and killed"] = row_of(killed, killed.moves / len(killed.gaps_s))
        return rows, wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.moves", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="100 moves, 3 kills; writes no file")
    parser.add_argument("--moves", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=20)
    args = parser.parse_args()
    moves, kills = (100, 3) if args.quick else (args.moves, args.kills)
    wanted = spec(demo_model("tiny"))
    pools = [{"role": "prefill", "threads": 1, "max_batch_tokens": 32}, {"role": "decode", "replicas": 2, "threads": 1}]
    wanted["pools"] = [pool | {"kv_memory": "64MiB"} for pool in pools]
    with cluster(wanted) as served:
        rows, wrong = asyncio.run(measure(served.endpoint, moves, kills))
    for name, row in rows.items():
        print(name, {key: value for key, value in row.items() if key != "gaps_ms"})
        print("  gaps, ms:", row["gaps_ms"])
    for line in wrong:
        print(f"error: {line}")
    if not args.quick:
        save("moves", {**about(), "streams": STREAMS, "rows": rows, "errors": wrong})
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
