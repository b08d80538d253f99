"""What a run found, as plain data (JSON) and as a table for a person. Nothing is decided here: a problem is a problem
already.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from kvrelay.chaos.bounds import Bound, bound_of, within
from kvrelay.chaos.cells.table import CELLS
from kvrelay.chaos.flat import ALLOWED
from kvrelay.chaos.suite import Findings, Outcome

TIMES = ("noticed", "next_token", "pages")
MAX_PROBLEMS = 20  # shown of each cell


def as_object(findings: Findings) -> dict[str, Any]:
    by_cell: dict[str, list[Outcome]] = {}
    for outcome in findings.outcomes:
        by_cell.setdefault(outcome.cell, []).append(outcome)
    cells = [cell_object(name, outcomes) for name, outcomes in sorted(by_cell.items())]
    wrong = [f"{g.who}: grew by {g.by:.0f} {name}" for name, g in findings.growth.items() if g.by > ALLOWED[name]]
    wrong += [f"process {pid} outlived the cluster" for pid in findings.orphans]
    wrong += findings.problems
    stops = [outcome.measured.stopped_s for outcome in findings.outcomes if outcome.measured.stopped_s]
    return {
        "faults": findings.num_faults,
        "rounds": len(findings.outcomes),
        "duration_s": round(findings.duration_s, 1),
        "is_ok": bool(cells) and all(cell["is_ok"] for cell in cells) and not wrong,
        "was_interrupted": findings.was_interrupted,
        "stopped": {"rounds": len(stops), "seconds": round(sum(stops), 1)},
        "streams": dict(sum((Counter(o.measured.ended) for o in findings.outcomes), Counter())),
        "growth": {name: round(grown.by, 1) for name, grown in findings.growth.items()},
        "problems": wrong,
        "settings": {CELLS[o.cell].shape: {k: round(v, 4) for k, v in o.values.items()} for o in findings.outcomes},
        "cells": cells,
    }


def cell_object(name: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    bound = bound_of(CELLS[name].bound)
    failed = [outcome for outcome in outcomes if outcome.measured.problems]
    return {
        "cell": name,
        "bound": bound.fault,
        "faults": sum(outcome.measured.faults for outcome in outcomes),
        "rounds": len(outcomes),
        "duration_s": round(sum(outcome.duration_s for outcome in outcomes), 1),
        "missed": sum(outcome.measured.missed for outcome in outcomes),
        "streams": dict(sum((Counter(outcome.measured.ended) for outcome in outcomes), Counter())),
        **{f"{what}_s": times(what, outcomes, bound) for what in TIMES},
        "is_ok": not failed,
        "problems": [
            {"problem": problem, "repeat": f"kvrelay chaos --cell {quoted(name)} --seed {outcome.seed}"}
            for outcome in failed
            for problem in outcome.measured.problems
        ][:MAX_PROBLEMS],
    }


def times(what: str, outcomes: Sequence[Outcome], bound: Bound) -> dict[str, float | None]:
    measured = sorted(t for o in outcomes if (t := getattr(o.measured, f"{what}_s")) is not None)
    promise = getattr(bound, what)
    return {
        **{f"p{share}": rounded(percentile(measured, share / 100)) for share in (50, 99)},
        "max": rounded(measured[-1] if measured else None),
        "bound": rounded(within(promise, outcomes[0].values)) if promise else None,
    }


def percentile(ordered: Sequence[float], share: float) -> float | None:
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] if ordered else None


def rounded(time_s: float | None) -> float | None:
    return None if time_s is None else round(time_s, 3)


def quoted(name: str) -> str:
    return f"'{name}'" if " " in name else name


def table(result: dict[str, Any]) -> Table:
    shown = Table(box=None, pad_edge=False)
    shown.add_column("cell")
    shown.add_column("faults", justify="right")
    for name in ("noticed", "next token", "pages back"):
        shown.add_column(f"{name}, s\np50  p99  max / bound", justify="right")
    shown.add_column("")
    for cell in result["cells"]:
        ok = "ok" if cell["is_ok"] else "BROKEN"
        shown.add_row(cell["cell"], str(cell["faults"]), *(time_text(cell[f"{what}_s"]) for what in TIMES), ok)
    return shown


def time_text(figures: dict[str, float | None]) -> str:
    if figures["max"] is None:
        return "-"
    bound = "-" if figures["bound"] is None else f"{figures['bound']:.2f}"
    return f"{figures['p50']:.2f}  {figures['p99']:.2f}  {figures['max']:.2f} / {bound}"


def sentences(result: dict[str, Any]) -> list[str]:
    """What went wrong, with what plays it again; and the sum."""
    lines = [f"{p['problem']}\n  {p['repeat']}" for cell in result["cells"] for p in cell["problems"]]
    lines += result["problems"]
    ended = ", ".join(f"{count} {how}" for how, count in sorted(result["streams"].items()))
    broken = sum(not cell["is_ok"] for cell in result["cells"])
    stopped = "interrupted; " if result["was_interrupted"] else ""
    verdict = f"{broken} of {len(result['cells'])} cells broken" if broken else "every bound was kept"
    if (stops := result["stopped"])["rounds"]:
        of = f"{stops['rounds']} of {result['rounds']} rounds"
        lines.append(f"the machine stood still for {stops['seconds']:.1f} s in {of}; bounds allow for that")
    return [*lines, f"{result['faults']} faults in {result['duration_s']:.0f} s; {stopped}requests: {ended}; {verdict}"]
