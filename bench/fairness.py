"""Whether a key that floods a router keeps another one waiting, simulated: the live policy, one prefill worker.

    python -m bench.fairness [--quick]

The flood sends prompts at twice what the worker reads, the other one every two seconds; answers are charged as they
end. Played: the other key alone, both under one name, as without keys, and under names of their own. Printed: what TTFT
the other one has. Writes bench/results/fairness.json.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from statistics import quantiles
from typing import Any

from bench.common import about, save
from cluster.router.accounts import RequestShape, WorkerView
from cluster.router.decisions import Assigned, Queued
from cluster.router.options import RouterOptions
from cluster.router.policy import RouterPolicy

PROMPT, OUTPUT = 1000, 200
READS_PER_S, TOKEN_S = 20_000.0, 0.015
FLOOD_PER_S, OTHER_PER_S = 2 * READS_PER_S / PROMPT, 0.5
SMALL_BACKLOG = 4096


@dataclass(frozen=True, kw_only=True)
class Case:
    flood_per_s: float = FLOOD_PER_S
    names: tuple[str, str] = ("flood", "other")
    backlog: int = RouterOptions().max_backlog_tokens


CASES = {
    "alone": Case(flood_per_s=0.0),
    "one name": Case(names=("same", "same")),
    "two names": Case(),
    f"one name, backlog {SMALL_BACKLOG}": Case(names=("same", "same"), backlog=SMALL_BACKLOG),
    f"two names, backlog {SMALL_BACKLOG}": Case(backlog=SMALL_BACKLOG),
}


class Run:
    def __init__(self, case: Case, seconds: float, seed: int) -> None:
        self.ttfts_s: dict[str, list[float]] = {"flood": [], "other": []}
        self.refused = Counter[str]()
        self._case, self._seconds, self._rng = case, seconds, random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serials = count()
        self._now, self._is_read_s = 0.0, 0.0  # when the worker has read all that it was sent
        self._shapes: dict[str, tuple[str, float, RequestShape]] = {}  # who, since when
        self._policy = RouterPolicy(RouterOptions(max_backlog_tokens=case.backlog))
        for name, role in (("prefill-0", "prefill"), ("decode-0", "decode")):
            view = WorkerView(name=name, role=role, page_size=16, total_pages=10**6)
            self._policy.on_worker_up(view, 0.0)

    def play(self) -> None:
        for who, per_s in (("flood", self._case.flood_per_s), ("other", OTHER_PER_S)):
            if per_s:
                self._arrive_later(who, per_s)
        while self._events:
            self._now, _, event = heapq.heappop(self._events)
            event()

    def _at(self, when_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._serials), event))

    def _arrive_later(self, who: str, per_s: float) -> None:
        at_s = self._now + self._rng.expovariate(per_s)
        if at_s < self._seconds:
            self._at(at_s, lambda: self._arrive(who, per_s))

    def _arrive(self, who: str, per_s: float) -> None:
        self._arrive_later(who, per_s)
        owner = self._case.names[who == "other"]
        request_id = f"{who}-{next(self._serials)}"
        shape = RequestShape(id=request_id, prompt_len=PROMPT, max_tokens=OUTPUT, owner=owner)
        self._shapes[request_id] = who, self._now, shape
        decision = self._policy.assign(shape, self._now)
        if isinstance(decision, Assigned):
            self._read(decision)
        elif not isinstance(decision, Queued):
            self.refused[who] += 1

    def _read(self, assigned: Assigned) -> None:
        self._is_read_s = max(self._is_read_s, self._now) + PROMPT / READS_PER_S
        self._at(self._is_read_s, lambda: self._on_read(assigned))

    def _on_read(self, assigned: Assigned) -> None:
        who, since_s, _ = self._shapes[assigned.request_id]
        self.ttfts_s[who].append(self._now - since_s)
        self._policy.on_first_token(assigned.request_id, self._now)
        self._policy.on_handed_off(assigned.request_id, assigned.decode, self._now)
        self._at(self._now + OUTPUT * TOKEN_S, lambda: self._on_end(assigned.request_id))
        self._pump()

    def _on_end(self, request_id: str) -> None:
        _, _, shape = self._shapes.pop(request_id)
        self._policy.on_finished(request_id)
        self._policy.on_generated(shape.owner, OUTPUT)
        self._pump()

    def _pump(self) -> None:
        while (assigned := self._policy.next_assignable(self._now)) is not None:
            self._read(assigned)


def figures(run: Run) -> dict[str, Any]:
    return {
        who: {"answered": len(ttfts_s), "refused": run.refused[who], "ttft_s": _quantiles(ttfts_s)}
        for who, ttfts_s in run.ttfts_s.items()
        if ttfts_s
    }


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    cuts = quantiles(values, n=100, method="inclusive")
    return {"p50": round(cuts[49], 3), "p90": round(cuts[89], 3), "p99": round(cuts[98], 3)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.fairness", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two minutes of each; writes no file")
    seconds = 120.0 if (quick := parser.parse_args().quick) else 1800.0
    cases = {}
    for name, case in CASES.items():
        run = Run(case, seconds, seed=0)
        run.play()
        cases[name] = figures(run)
        print(name, cases[name], flush=True)
    if not quick:
        load = {"prompt": PROMPT, "output": OUTPUT, "reads_per_s": READS_PER_S, "token_s": TOKEN_S}
        rates = {"flood_per_s": FLOOD_PER_S, "other_per_s": OTHER_PER_S}
        save("fairness", {**about(), "seconds": seconds, **load, **rates, "cases": cases})


if __name__ == "__main__":
    main()
