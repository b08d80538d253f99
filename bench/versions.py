"""What a change costs a client and the machine: the cluster of bench/e2e.py from two checkouts, in turns.

    python -m bench.versions BEFORE AFTER [--rate 2] [--rounds 3] [--name versions]

Each folder has a version of all this and is measured by its own bench/e2e.py, which writes bench/results/e2e.json
there: give clones. Shown are medians of the rounds; CPU time by process is the figure that other load disturbs least.
Writes bench/results/NAME.json here.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.common import about, save

FIGURES = ("p50", "p90")


def one_row(checkout: Path, rate: float) -> dict[str, Any]:
    """Of one run. Raises CalledProcessError when a request failed."""
    command = [sys.executable, "-m", "bench.e2e", "--rates", str(rate), "--repeats", "1"]
    env = os.environ | {"PYTHONPATH": str(checkout)}
    subprocess.run(command, cwd=checkout, env=env, check=True, stdout=subprocess.DEVNULL)
    row: dict[str, Any] = json.loads((checkout / "bench/results/e2e.json").read_text())["rows"][0]
    return row


def medians(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    def of(*keys: str) -> float:
        values: list[Any] = list(rows)
        for key in keys:
            values = [value[key] for value in values]
        return round(float(statistics.median(values)), 2)

    return {
        "ttft_ms": {figure: of("latency_ms", "ttft", figure) for figure in FIGURES},
        "tpot_ms": {figure: of("latency_ms", "tpot", figure) for figure in FIGURES},
        "cpu_ms_per_request": {name: of("cpu_ms_per_request", name) for name in rows[0]["cpu_ms_per_request"]},
        "other_cores": of("other_cores"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.versions", description=__doc__)
    parser.add_argument("before", type=Path, help="a folder with the version before")
    parser.add_argument("after", type=Path, help="a folder with the version after")
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second")
    parser.add_argument("--rounds", type=int, default=3, help="of both")
    parser.add_argument("--name", default="versions", help="of the result (default: versions)")
    arguments = parser.parse_args()
    sides = {"before": arguments.before.resolve(), "after": arguments.after.resolve()}
    head = about()  # before bench/e2e.py writes into the checkouts, of which this may be one
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for _ in range(arguments.rounds):
        for name, checkout in sides.items():
            rows[name].append(one_row(checkout, arguments.rate))
            print(f"{name}: {json.dumps(medians(rows[name][-1:]))}", flush=True)
    result = head | {"rate": arguments.rate, "rounds": arguments.rounds}
    result |= {name: medians(found) for name, found in rows.items()}
    print(save(arguments.name, result))


if __name__ == "__main__":
    main()
