"""What a change costs a client and the machine: the clusters of two versions at once, played in short turns.

    python -m bench.versions BEFORE AFTER [--rate 2] [--rounds 12] [--name versions]

Each folder holds a version of all this: give clones. Both clusters are those of bench/e2e.py, on the same cores; while
one is played the other is idle. A machine's speed swings by a tenth within minutes, and a cluster by itself for as long
as it takes to compare two would tell one time from another: each round plays the same requests to both, one after the
other, in turns. Shown are the medians of the rounds, and of AFTER's ratio to BEFORE in each round with the range that
half of the rounds lie in. Writes bench/results/NAME.json here.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.common import about, demo_model, save
from bench.e2e import Run, cluster, play_rate, problems_of, spec

SECONDS = 20.0  # of arrivals, in a round


def figures(one: Run) -> dict[str, float]:
    latency = {
        f"{metric} {key} ms": one["latency_ms"][metric][key] for metric in ("ttft", "tpot") for key in ("p50", "p90")
    }
    cpu = {f"{part} CPU ms/request": 1e3 * used / one["requests"] for part, used in one["cpu_s"].items()}
    return latency | cpu


def compared(before: Sequence[Run], after: Sequence[Run]) -> dict[str, Any]:
    pairs = [(figures(one), figures(other)) for one, other in zip(before, after, strict=True)]
    return {name: _row([(one[name], other[name]) for one, other in pairs]) for name in pairs[0][0]}


def _row(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    ratios = [after / before for before, after in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4)
    before, after = (round(statistics.median(values), 2) for values in zip(*pairs, strict=True))
    return {"before": before, "after": after, "ratio": round(middle, 3), "half_within": [round(low, 3), round(high, 3)]}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.versions", description=__doc__)
    parser.add_argument("before", type=Path, help="a folder with the version before")
    parser.add_argument("after", type=Path, help="a folder with the version after")
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second")
    parser.add_argument("--rounds", type=int, default=12, help="of both, two or more")
    parser.add_argument("--name", default="versions", help="of the result (default: versions)")
    asked = parser.parse_args()
    wanted: Mapping[str, Any] = spec(demo_model("125m"))
    runs: dict[str, list[Run]] = {"before": [], "after": []}
    with ExitStack() as stack:
        served = {
            side: stack.enter_context(cluster({**wanted, "name": f"{wanted['name']}-{side}"}, folder.resolve()))
            for side, folder in (("before", asked.before), ("after", asked.after))
        }
        for seed in range(asked.rounds):
            for side in sorted(served, reverse=bool(seed % 2)):
                runs[side].append(one := asyncio.run(play_rate(served[side], asked.rate, SECONDS, seed)))
                for problem in problems_of(one):
                    raise SystemExit(f"{side}: {problem}")
                print(f"{side:6} { ({name: round(value, 1) for name, value in figures(one).items()}) }", flush=True)
    rows = compared(runs["before"], runs["after"])
    for name, row in rows.items():
        print(f"{name:28} {row['before']:9} {row['after']:9} {row['ratio']:7} {row['half_within']}")
    save(asked.name, {**about(), "rate": asked.rate, "rounds": asked.rounds, "figures": rows})


if __name__ == "__main__":
    main()
