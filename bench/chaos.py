"""Chaos: ten thousand faults in a cluster of real processes, and how each bound of docs/reliability.md was kept.

    python -m bench.chaos [--quick] [--faults 10000] [--minutes 75] [--seed 0]

Every cell of `kvrelay chaos`, shared out by how much each costs: mostly clients and messages, and of each process's
death some dozens. A machine with fewer cores than processes is given a second more for each bound, which the result
says. Writes bench/results/chaos.json.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from bench.common import about, save
from kvrelay.chaos.cells import CELLS
from kvrelay.chaos.report import as_object, sentences
from kvrelay.chaos.suite import Wish, run
from kvrelay.cli.chaos import busy_s_here
from kvrelay.cli.progress import progress


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=75.0, help="begin no more after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="each cell once; writes no file")
    arguments = parser.parse_args()
    wish = Wish(
        cells=list(CELLS.values()),
        faults=1 if arguments.quick else arguments.faults,
        minutes=arguments.minutes,
        seed=arguments.seed,
        busy_s=busy_s_here(),
    )
    head = about()
    with tempfile.TemporaryDirectory(prefix="kvrelay-chaos-") as folder, progress(show=True) as on_progress:
        played = run(wish, Path(folder), lambda done: on_progress("faults", done, max(done, wish.faults)))
        result = as_object(asyncio.run(played))
    if not arguments.quick:
        save("chaos", {**head, **result})
    for line in sentences(result):
        print(line)
    return not result["is_ok"]


if __name__ == "__main__":
    sys.exit(main())
