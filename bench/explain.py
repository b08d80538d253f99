"""Do the parts that `kvrelay explain` tells of a request sum to what its client was told? With moves, drains and kills.

    python -m bench.explain [--quick] [--requests 1000] [--kills 4]

`kvrelay up` with two prefill workers, two decode workers and one that does both serves `STREAMS` streams at a time:
long and short prompts, greedy and sampled, some ended by their client in the middle. Meanwhile decode workers are
drained and taken back, so that what they run moves, and now and then one is killed. After each request its client asks
where its time went: the spans must lie end to end, those up to the first token sum to the TTFT and all to the E2E of
the timeline that came with its last token, within `MOST_S`. By how much the client's own clock says more is shown, too.
Kept in bench/results/explain.json. Exit code 1 where one does not.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from bench.common import about, demo_model, save
from bench.e2e import cluster, spec
from bench.moves import kill, until
from kvrelay.client.client import AsyncClient
from kvrelay.client.types import Completion, ExplainedRequest, KvrelayError

STREAMS = 16  # at a time
MOST_S = 1e-3  # between a sum and what it should be
PROMPTS = ((8, 64), (200, 600))  # tokens, of short ones and long ones
OUTPUTS = ((1, 16), (100, 250))
LEAVE = 0.05  # of the requests, whose clients leave in the middle
DECODE = ("decode-0", "decode-1")


@dataclass
class Checked:
    errors: list[str] = field(default_factory=list)
    ttft_off_s: list[float] = field(default_factory=list)
    e2e_off_s: list[float] = field(default_factory=list)
    beyond_s: list[float] = field(default_factory=list)  # of the E2E, by the client's clock
    counts: Counter[str] = field(default_factory=Counter)
    spans: Counter[str] = field(default_factory=Counter)
    details: Counter[str] = field(default_factory=Counter)


def check(told: ExplainedRequest, whole: Completion | None, checked: Checked) -> None:
    """`whole`: as its client had it; None: it left before the end."""
    spans = told.spans
    gaps = [abs(one.end_s - two.begin_s) for one, two in pairwise(spans)]
    timeline = None if whole is None else whole.timeline
    ttft_s, e2e_s = (told.ttft_s, told.e2e_s) if timeline is None else (timeline.ttft_s, timeline.e2e_s)
    first_s = sum(span.end_s - span.begin_s for span in spans if told.ttft_s and span.end_s <= told.ttft_s + 1e-9)
    all_s = sum(span.end_s - span.begin_s for span in spans)
    checked.ttft_off_s.append(abs(first_s - ttft_s))
    checked.e2e_off_s.append(abs(all_s - e2e_s))
    if max(checked.ttft_off_s[-1], checked.e2e_off_s[-1], spans[0].begin_s, *gaps) > MOST_S:
        sums = f"{first_s:.6f} of {ttft_s:.6f} s to its first token, {all_s:.6f} of {e2e_s:.6f} s in all"
        checked.errors.append(f"{told.request_id}: its parts sum to {sums}")
    checked.spans.update(span.name for span in spans)
    checked.details.update(detail.name for span in spans for detail in span.details)
    checked.counts["moves"] += told.moves
    checked.counts["sent again"] += told.attempts - 1
    checked.counts[told.state] += 1


async def ask(client: AsyncClient, number: int, checked: Checked) -> None:
    rng = random.Random(number)
    prompt = [rng.randrange(5, 4000) for _ in range(rng.randint(*rng.choice(PROMPTS)))]
    wanted: dict[str, Any] = {"temperature": rng.choice((0.0, 0.8)), "seed": number, "ignore_eos": True}
    wanted["max_tokens"] = rng.randint(*rng.choice(OUTPUTS))
    name, leaves, whole = f"explained-{number}", rng.random() < LEAVE, None
    began_s = time.perf_counter()
    try:
        async with client.stream(prompt, **wanted, request_id=name, timeout_s=120) as stream:
            async for _ in stream:
                if leaves:
                    break
            else:
                took_s, whole = time.perf_counter() - began_s, stream.completion()
    except KvrelayError as error:
        checked.errors.append(f"{name}: {error.code} {error.message}")
        return
    told = await told_of(client, name)
    check(told, whole, checked)
    if whole is not None:
        checked.beyond_s.append(took_s - told.e2e_s)


async def told_of(client: AsyncClient, name: str) -> ExplainedRequest:
    """Once it has ended: that its client has left reaches the router a moment later."""
    while True:
        (told,) = await client.explain(name)
        if told.state != "running":
            return told
        await asyncio.sleep(0.01)


async def disturb(client: AsyncClient, kills: int, checked: Checked) -> None:
    """Drain one decode worker after another, until cancelled, and kill one in the middle now and then."""
    rng = random.Random(0)
    while True:
        name = rng.choice(DECODE)
        await client.drain(name, force=True)
        if checked.counts["kills"] < kills and rng.random() < 0.5:
            await asyncio.sleep(rng.random() * 0.1)
            await kill(client, rng.choice(DECODE))
            checked.counts["kills"] += 1
        else:
            await until(client, name, lambda worker: worker.state == "drained")
        await client.drain(name, undo=True)
        await asyncio.sleep(rng.random() * 0.5)


async def measure(endpoint: str, requests: int, kills: int) -> Checked:
    checked, numbers = Checked(), itertools.count()

    async def stream(client: AsyncClient) -> None:
        while (number := next(numbers)) < requests or checked.counts["kills"] < kills:
            await ask(client, number, checked)

    async with AsyncClient(endpoint) as client:
        trouble = asyncio.create_task(disturb(client, kills, checked))
        await asyncio.gather(*(stream(client) for _ in range(STREAMS)))
        trouble.cancel()
        outcome = (await asyncio.gather(trouble, return_exceptions=True))[0]
        if not isinstance(outcome, asyncio.CancelledError):
            checked.errors.append(f"the drains ended: {outcome!r}")
    return checked


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.explain", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="150 requests and 1 kill; writes no file")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=4)
    args = parser.parse_args()
    requests, kills = (150, 1) if args.quick else (args.requests, args.kills)
    wanted = spec(demo_model("tiny"))
    roles = {"prefill": 2, "decode": 2, "mixed": 1}
    wanted["pools"] = [
        {"role": role, "replicas": count, "threads": 1, "kv_memory": "64MiB"} for role, count in roles.items()
    ]
    with cluster(wanted) as served:
        checked = asyncio.run(measure(served.endpoint, requests, kills))
    row = {
        "requests": len(checked.e2e_off_s),
        **checked.counts,
        "ttft_off_ms": 1e3 * max(checked.ttft_off_s),
        "e2e_off_ms": 1e3 * max(checked.e2e_off_s),
        "client_says_more_ms": round(1e3 * statistics.median(checked.beyond_s), 3),
    }
    print(row, "\n  spans:", dict(checked.spans), "\n  details:", dict(checked.details))
    for line in checked.errors:
        print(f"error: {line}")
    if not args.quick:
        kinds = {"spans": dict(checked.spans), "details": dict(checked.details)}
        save("explain", {**about(), "streams": STREAMS, "row": row, **kinds, "errors": checked.errors})
    return bool(checked.errors)


if __name__ == "__main__":
    sys.exit(main())
