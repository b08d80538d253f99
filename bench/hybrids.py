"""One pool, two, or a hybrid: the goodput of the best of each, simulated, over targets from tight to loose.

    python -m bench.hybrids [--quick] [--ceilings] [NAMES...]

Each case is a model on so many GPUs with a workload; three TTFT and three TPOT targets make nine plans of it, each by
`kvrelay plan`'s own search: the same policies, placement by prediction included, the same latency models and requests.
A cell tells the goodput of the best hybrid as a multiple of the better pure placement's; the plan takes the best of all
three, so that 1 is the least it can serve. What keeps tighter targets keeps these, too: what a search missed at a cell,
it has from there. Wanted: at no cell below 0.99, 1.15 where both targets are balanced. What the best serves for targets
that bind nobody is looked for, too: how much could be gained at all.
Writes bench/results/hybrids.json, keeping the cases that are not named, and draws docs/plots/hybrids.svg.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bench.common import REPO, RESULTS, about, save
from bench.placement_search import trace
from bench.plots import draw
from placement.catalogs.base import PlanError
from placement.catalogs.roofline import open_catalog
from placement.compiled.build import compiled_folder
from placement.plan import KINDS, Plan, Slo
from placement.search.planner import plan
from placement.search.question import PlanQuestion
from placement.workload.requests import Workload

SMALL = ("llama-3.1-8b", "h100-sxm", 8, (0.15, 0.3, 1.0), (0.010, 0.015, 0.030))
LARGE = ("llama-3.1-70b", "h200-sxm", 32, (0.4, 0.8, 2.5), (0.020, 0.030, 0.060))
LARGER = ("llama-3.1-70b", "h100-sxm", 64, (0.4, 0.8, 2.5), (0.020, 0.030, 0.060))
NO_TARGETS = (60.0, 1.0)  # TTFT, TPOT s
CASES: Mapping[str, tuple[Any, str]] = {
    "8b-conversation": (SMALL, "conv"),
    "8b-code": (SMALL, "code"),
    "8b-256-64": (SMALL, ""),
    "70b-conversation": (LARGE, "conv"),
    "70b-code": (LARGE, "code"),
    "70b-256-64": (LARGE, ""),
    "70b-conversation-64": (LARGER, "conv"),
    "70b-code-64": (LARGER, "code"),
}
THOROUGHNESS = 0.3


def workload_of(kind: str) -> Workload:
    """A trace of Azure's, or 256 tokens in and 64 out."""
    if not kind:
        ones = np.ones(2000, dtype=np.int64)
        return Workload(arrival_s=np.arange(2000) / 10.0, prompt_len=256 * ones, output_len=64 * ones, name="256/64")
    return trace(kind)


def cell(case: str, ttft_s: float, tpot_s: float, thoroughness: float) -> dict[str, Any]:
    (model, hardware, gpus, _, _), kind = CASES[case]
    slo = Slo(ttft_s=ttft_s, tpot_s=tpot_s)
    question = PlanQuestion(slo=slo, num_gpus=gpus, thoroughness=thoroughness)
    row: dict[str, Any] = {"ttft_s": ttft_s, "tpot_s": tpot_s, "best": {}}
    began_s = time.monotonic()
    try:
        found = plan(question, open_catalog(model, hardware), workload_of(kind))
    except PlanError as error:
        return row | {"why_none": str(error)}
    row["best"] = {kind: _best(found, kind) for kind in KINDS}
    return row | {"wall_s": round(time.monotonic() - began_s)}


def ceiling(case: str, thoroughness: float) -> float:
    """What the best placement serves, requests/s, where targets bind nobody."""
    return max((best["per_s"] for best in cell(case, *NO_TARGETS, thoroughness)["best"].values()), default=0.0)


def _best(found: Plan, kind: str) -> dict[str, Any]:
    best = next((each for each in found.tried if each.candidate.kind == kind), None)
    if best is None:
        return {"per_s": 0.0, "label": "none keeps the targets"}
    return {"per_s": round(best.goodput.value, 2), "label": best.candidate.label}


def compared(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The row with the best of each kind among all whose targets are as tight or tighter."""
    tighter = [each for each in rows if each["ttft_s"] <= row["ttft_s"] and each["tpot_s"] <= row["tpot_s"]]
    found = [each["best"] for each in tighter if each["best"]]
    if not found:
        return dict(row)
    best = {kind: max((each[kind] for each in found), key=lambda one: float(one["per_s"])) for kind in KINDS}
    row = {**row, "best": best, "chosen": max(KINDS, key=lambda kind: float(best[kind]["per_s"]))}
    return {**row, "hybrid_ratio": ratio(row)}


def ratio(row: Mapping[str, Any]) -> float | None:
    """Of the best hybrid to the better pure placement; None where either has no goodput."""
    best = {kind: found["per_s"] for kind, found in row["best"].items()}
    pure = max(best.get("one pool", 0.0), best.get("two pools", 0.0))
    return round(best["hybrid"] / pure, 3) if pure and best.get("hybrid") else None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.hybrids", description="One pool, two, or a hybrid.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CASES)}; all when none is given")
    parser.add_argument("--quick", action="store_true", help="a third of the requests")
    parser.add_argument("--ceilings", action="store_true", help="only what is served where targets bind nobody")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in CASES]:
        parser.error(f"there is no case {unknown[0]!r}; give some of {', '.join(CASES)}")
    compiled_folder()
    path = RESULTS / "hybrids.json"
    cases: dict[str, Any] = json.loads(path.read_text())["cases"] if path.exists() else {}
    result = about()
    for name in args.names or CASES:
        print(f"{name}:", flush=True)
        thoroughness = THOROUGHNESS * (0.33 if args.quick else 1)
        if not args.ceilings:
            cases[name] = {"rows": _rows(name, thoroughness), "commit": result["commit"]}
        cases[name]["ceiling_per_s"] = ceiling(name, thoroughness)
        print(f"  targets that bind nobody: {cases[name]['ceiling_per_s']:g}", flush=True)
        save("hybrids", result | {"cases": cases})
    draw("hybrids", {"cases": cases})
    print(f"saved to {path.relative_to(REPO)}")


def _rows(name: str, thoroughness: float) -> Sequence[dict[str, Any]]:
    (_, _, _, ttfts_s, tpots_s), _ = CASES[name]
    rows = []
    for ttft_s in ttfts_s:
        for tpot_s in tpots_s:
            rows.append(cell(name, ttft_s, tpot_s, thoroughness))
            told = {kind: best["per_s"] for kind, best in rows[-1]["best"].items()}
            print(
                f"  TTFT {1e3 * ttft_s:g} ms, TPOT {1e3 * tpot_s:g} ms: {told}, {rows[-1].get('wall_s')} s", flush=True
            )
    return [compared(row, rows) for row in rows]


if __name__ == "__main__":
    main()
