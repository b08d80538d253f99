"""Three models in one cluster whose loads take turns, one loaded and one removed meanwhile: what their streams show.

    python -m bench.models [--quick]

`kvrelay up` serves two models, each from two prefill and two decode workers. Each answers its requests one by one
first. Then, for as long as all of what follows takes, clients ask again and again: every few seconds another model has
BUSY clients, and each of the others FEW. A third model is loaded (`apply`), and is asked as well; then the second is
removed: what it has under way must end whole, and who asks for it later is told NOT_FOUND. Every other answer must be
what it was at first, token for token, and none may fail or be sent again. Kept in bench/results/models.json. Exit code
1 when anything of this does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.common import MODELS, about, save
from bench.e2e import cluster, spec
from bench.moves import leaks
from bench.rolling import roll
from kvrelay.client.client import AsyncClient
from kvrelay.client.types import KvrelayError
from kvrelay.demo_model import make_demo_model

NAMES = ("first", "second", "third")
BUSY, FEW = 24, 3  # clients
TURN_S = 5.0
PROMPTS = 16  # of each model
TOKENS = 48
POOL = {"threads": 1, "kv_memory": "64MiB", "num_cpus": 0.1, "replicas": 2}


def wanted_spec(names: Sequence[str]) -> dict[str, Any]:
    """Of these models, the first the cluster's own."""
    paths = {name: make_demo_model(MODELS / f"demo-{name}", seed=i) for i, name in enumerate(NAMES)}
    pools = [
        {"name": f"{name}-{role}", "role": role, **POOL, **({} if name == NAMES[0] else {"model": name})}
        for name in names
        for role in ("prefill", "decode")
    ]
    beside = [{"name": name, "model": str(paths[name]), "dtype": "bfloat16"} for name in names[1:]]
    made = spec(paths[NAMES[0]]) | {"served_model_name": NAMES[0], "pools": pools}
    return made | ({"models": beside} if beside else {})


@dataclass
class Said:
    """By the clients of one model. `refused`: by NOT_FOUND, after it was removed."""

    answers: dict[int, tuple[int, ...]] = field(default_factory=dict)
    requests: int = 0
    errors: list[str] = field(default_factory=list)
    refused: int = 0
    sent_again: int = 0
    ttft_s: dict[str, list[float]] = field(default_factory=lambda: {"busy": [], "few": []})


async def ask(client: AsyncClient, model: str, number: int, said: Said, when: str, *, is_leaving: bool) -> None:
    prompt = [5 + (7 * number + 3 * place) % 400 for place in range(20 + 11 * number)]
    how: dict[str, Any] = {"temperature": 0.8, "seed": number, "max_tokens": TOKENS, "ignore_eos": True}
    try:
        answer = await client.generate(prompt, model=model, **how)
    except KvrelayError as error:
        if is_leaving and error.code == "NOT_FOUND":
            said.refused += 1
            await asyncio.sleep(0.1)
        else:
            said.errors.append(f"{model}: {error}")
        return
    assert answer.timeline is not None, "it has ended"
    said.requests += 1
    said.sent_again += answer.timeline.attempts - 1
    said.ttft_s[when].append(answer.timeline.ttft_s)
    if said.answers.setdefault(number, tuple(answer.token_ids)) != tuple(answer.token_ids):
        said.errors.append(f"{model}: another answer to {number} than at first")


class Load:
    """Clients of every model that is asked for; `busy` has most of them."""

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        self.said = {name: Said() for name in NAMES}
        self.asked: list[str] = []
        self.leaving = ""
        self.busy = ""
        self.turns: Counter[str] = Counter()
        self._tasks: list[asyncio.Task[None]] = []

    async def begin(self, *names: str) -> None:
        for name in names:
            for number in range(PROMPTS):
                await ask(self.client, name, number, self.said[name], "few", is_leaving=False)
            self.said[name].ttft_s["few"].clear()
            self.asked.append(name)
            self._tasks += [asyncio.create_task(self._client(name, place)) for place in range(BUSY)]

    async def _client(self, name: str, place: int) -> None:
        number = place
        while True:
            if place >= FEW and self.busy != name:
                await asyncio.sleep(0.05)
                continue
            number = (number + 1) % PROMPTS
            when = "busy" if self.busy == name else "few"
            await ask(self.client, name, number, self.said[name], when, is_leaving=self.leaving == name)

    async def take_turns(self) -> None:
        while True:
            for name in [each for each in self.asked if each != self.leaving]:
                self.busy = name
                self.turns[name] += 1
                await asyncio.sleep(TURN_S)

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def measure(endpoint: str, turns: int) -> tuple[dict[str, Any], list[str]]:
    async with AsyncClient(endpoint) as client:
        load = Load(client)
        await load.begin(*NAMES[:2])
        taking = asyncio.create_task(load.take_turns())
        await asyncio.sleep(turns * TURN_S)
        took_s = {"load": await roll(client, lambda: client.apply_spec(json.dumps(wanted_spec(NAMES)), {}))}
        await load.begin(NAMES[2])
        await asyncio.sleep(turns * TURN_S)
        load.leaving = NAMES[1]
        left = (NAMES[0], NAMES[2])
        took_s["remove"] = await roll(client, lambda: client.apply_spec(json.dumps(wanted_spec(left)), {}))
        await asyncio.sleep(turns * TURN_S)
        taking.cancel()
        await load.end()
        rows, wrong = (
            {name: row_of(load, name) for name in NAMES},
            [e for said in load.said.values() for e in said.errors],
        )
        wrong += [f"{name}: {row['sent_again']} were sent again" for name, row in rows.items() if row["sent_again"]]
        wrong += [f"{NAMES[1]}: nobody was told that it is gone"] * (not load.said[NAMES[1]].refused)
        there = sorted({worker.name.rpartition("-")[0] for worker in (await client.status()).workers})
        if there != sorted(f"{name}-{role}" for name in left for role in ("prefill", "decode")):
            wrong.append(f"at the end there are {there}")
        wrong += await leaks(client)
        return {"took_s": {what: round(s, 1) for what, s in took_s.items()}, "rows": rows}, wrong


def row_of(load: Load, name: str) -> dict[str, Any]:
    said = load.said[name]
    p50 = {when: round(1e3 * statistics.median(times), 1) for when, times in said.ttft_s.items() if times}
    return {
        "requests": said.requests,
        "wrong": len(said.errors),
        "refused_after": said.refused,
        "sent_again": said.sent_again,
        "turns": load.turns[name],
        "ttft_p50_ms": p50,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.models", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="writes no file")
    args = parser.parse_args()
    with cluster(wanted_spec(NAMES[:2])) as served:
        result, wrong = asyncio.run(measure(served.endpoint, 2 if args.quick else 6))
    print(result["took_s"])
    for name, row in result["rows"].items():
        print(name, row)
    for line in wrong[:20]:
        print(f"error: {line}")
    if not args.quick:
        settings = {"busy": BUSY, "few": FEW, "turn_s": TURN_S}
        save("models", {**about(), "settings": settings, **result, "errors": wrong})
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
