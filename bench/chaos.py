"""Chaos: ten thousand faults in a cluster of real processes, and how each bound of docs/reliability.md was kept.

    python -m bench.chaos [--quick] [--faults 10000] [--minutes 75] [--seed 0]

Every cell of `kvrelay chaos`, shared out by how much each costs: mostly clients and messages, and of each process's
death some dozens. A machine with fewer cores than processes is given a second more for each bound, which the result
says. Writes bench/results/chaos.json, every half minute and at the end, SIGINT and SIGTERM included.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.common import about, save
from kvrelay.chaos.cells.table import CELLS
from kvrelay.chaos.report import as_object, sentences
from kvrelay.chaos.suite import Findings, Wish, play
from kvrelay.cli.measuring.chaos import busy_s_here
from kvrelay.cli.progress import progress

SAVE_S = 30.0


class Saver:
    """Writes the result as it grows, so that a run which is ended in whatever way leaves what it found."""

    def __init__(self, head: Mapping[str, Any], *, is_kept: bool) -> None:
        self._head = head
        self._is_kept = is_kept
        self._saved_s = time.monotonic()

    def on_round(self, findings: Findings) -> None:
        if time.monotonic() - self._saved_s > SAVE_S:
            self.save(findings)
            self._saved_s = time.monotonic()

    def save(self, findings: Findings) -> dict[str, Any]:
        result = as_object(findings)
        if self._is_kept:
            save("chaos", {**self._head, **result})
        return result


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
    saver = Saver(about(), is_kept=not arguments.quick)
    with tempfile.TemporaryDirectory(prefix="kvrelay-chaos-") as folder, progress(show=True) as on_progress:

        def on_round(findings: Findings) -> None:
            on_progress("faults", findings.num_faults, wish.faults)
            saver.on_round(findings)

        result = saver.save(play(wish, Path(folder), on_round))
    for line in sentences(result):
        print(line)
    return not result["is_ok"]


if __name__ == "__main__":
    sys.exit(main())
