"""The short table at the end of bench/gpu_check.sh: how each part went, and the figures that were wanted.

Exit code 1 if a part failed or a result was wrong; a figure below what is wanted is shown, and is no failure.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import common
from bench.gpu import common as gpu_common

MEANINGS = {0: "good", 1: "WRONG or failed", 5: "nothing to run", 124: "too slow", 137: "too slow"}
NO_TESTS = 5  # pytest's exit code where a rehearsal skips or deselects everything


def parts(path: Path) -> list[tuple[str, int, int]]:
    rows = [line.split("\t") for line in path.read_text().splitlines()]
    return [(name, int(code), int(seconds)) for name, code, seconds in rows]


def result(folder: Path, name: str, since_s: float) -> dict[str, Any]:
    """Of this run: what an earlier one left is not shown for a part that failed now."""
    path = folder / f"gpu_{name}.json"
    is_new = path.exists() and path.stat().st_mtime >= since_s
    return json.loads(path.read_text()) if is_new else {}


def figures(folder: Path, since_s: float = 0.0) -> Iterator[tuple[str, str, str]]:
    """(what, found, wanted) of what is looked for first."""
    transports, cluster = result(folder, "transports", since_s), result(folder, "cluster", since_s)
    for row in transports.get("bytes", []):
        if row["prompt_tokens"] >= 2048 or transports["is_rehearsal"]:
            what = f"{row['transport']}, {row['prompt_tokens']} tokens, {row['pages']} pages"
            yield what, f"{row['share_of_plain_copy']:.0%} of a plain copy", f"{transports['wanted_share']:.0%}"
    if transports:
        way = transports["nccl"]["way"]
        yield "NCCL's bytes", f"right ({way})" if way else "could not run here", "right"
    if cluster:
        tokens, handoff = cluster["tokens"], cluster["handoff"]
        found = f"{tokens['equal']} equal, {len(tokens['ties'])} ties, {len(tokens['wrong'])} wrong"
        yield f"greedy tokens of {tokens['requests']} requests", found, "0 wrong"
        what = f"exposed handoff of {handoff['prompt_tokens']} tokens"
        yield what, f"{handoff['exposed_ms']:.2f} ms", f"{handoff['wanted_exposed_ms']:.0f} ms"
    engine = result(folder, "engine", since_s)
    for row in engine.get("summary", []):
        yield row["what"], row["found"], row["wanted"]


def main() -> None:
    parser = gpu_common.parser(__doc__)
    parser.add_argument("status", type=Path)
    arguments = parser.parse_args()
    folder = arguments.out if arguments.rehearse else common.RESULTS
    console, table = Console(), Table("part", "how", "seconds")
    ran = parts(arguments.status)
    bad = [name for name, code, _ in ran if code and not (code == NO_TESTS and arguments.rehearse)]
    for name, code, seconds in ran:
        table.add_row(name, MEANINGS.get(code, f"exit code {code}"), str(seconds))
    console.print(table)
    table = Table("figure", "found", "wanted")
    began = arguments.status.with_name("began")
    for row in figures(folder, began.stat().st_mtime if began.exists() else 0.0):
        table.add_row(*row)
    console.print(table)
    if arguments.rehearse:
        console.print("A rehearsal on the CPU: the figures mean nothing.")
    sys.exit(f"WRONG or failed: {', '.join(bad)}" if bad else 0)


if __name__ == "__main__":
    main()
