"""What the planner finds, and how fast it looks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tables.shape import Tables, folded, long_run, table

PICTURES = {
    "growth": "TTFT of nine of ten requests by the number of workers, for one router and for several",
    "hybrids": "Goodput of the best hybrid over the better pure placement, a map of targets for each case",
    "placements": "Goodput of four ways to give requests to eight workers",
    "simulator": "Speed beside their simulators, and by size of the cluster",
}


def growth(result: Mapping[str, Any]) -> str:
    rows = [
        [
            f"{name}, {row['workers']} workers",
            row["routers"],
            f"{row['attainment']:.1%}",
            f"{row['ttft_p50_ms']:.0f} / {row['ttft_p90_ms']:.0f}",
            f"{row['tpot_p90_ms']:.1f}",
        ]
        for name, case in result["cases"].items()
        for row in case["rows"]
    ]
    return table(["case", "routers", "within targets", "TTFT P50 / P90 ms", "TPOT P90 ms"], rows)


def hybrids(result: Mapping[str, Any]) -> str:
    rows: list[list[object]] = []
    for name, case in result["cases"].items():
        for row in case["rows"]:
            asked = f"{1e3 * row['ttft_s']:g} / {1e3 * row['tpot_s']:g}"
            if not row["best"]:
                rows.append([name, asked, row["why_none"], "", "", ""])
                continue
            found = [f"{row['best'][kind]['per_s']:g}" for kind in ("two pools", "one pool", "hybrid")]
            rows.append([name, asked, *found, row["best"][row["chosen"]]["label"]])
    columns = ["case", "TTFT / TPOT ms", "two pools, requests/s", "one mixed pool", "hybrid", "the plan"]
    every = folded(f"All {len(rows)} cells", table(columns, rows))
    return f"{_balanced(result['cases'])}\n\n{every}"


def _balanced(cases: Mapping[str, Any]) -> str:
    """What could be gained where both targets are the middle ones, at most."""
    rows: list[list[object]] = []
    for name, case in cases.items():
        middle = case["rows"][len(case["rows"]) // 2]["best"]
        served = [best["per_s"] for row in case["rows"] for best in row["best"].values()]
        most = max(*served, case.get("ceiling_per_s", 0.0))
        pure = max(middle["two pools"]["per_s"], middle["one pool"]["per_s"])
        hybrid = middle["hybrid"]["per_s"]
        rows.append([name, f"{pure:g}", f"{hybrid:g}", f"{hybrid / pure:.2f}x", f"{most:g}", f"{most / pure:.2f}x"])
    columns = ["balanced", "the better pure one", "hybrid", "", "the most for any targets", "so at most"]
    return table(columns, rows)


def placement_search(result: Mapping[str, Any]) -> str:
    rows = [
        [
            row["search"],
            f"{row['cpu_s']:g} ({row['wanted_cpu_s']:g})",
            f"{row['simulated_requests']:,}",
            row["candidates"],
        ]
        for row in result["rows"]
    ]
    found = [
        [row["search"], row["chosen"], long_run(row["goodput"]), row["best_two_pools"], row["best_colocated"]]
        for row in result["rows"]
    ]
    parts = [
        table(["search", "CPU-s (wanted)", "requests simulated", "whole clusters tried"], rows),
        table(["search", "chosen", "requests/s", "best two pools", "best colocated"], found),
    ]
    return "\n\n".join(parts)


def placements(result: Mapping[str, Any]) -> str:
    columns = next(iter(result["goodput_per_s"].values()))
    rows = [[load, *found.values()] for load, found in result["goodput_per_s"].items()]
    return table(("requests/s", *columns), rows)


def simulator(result: Mapping[str, Any]) -> str:
    """By size of the cluster; what is beside other simulators is drawn."""
    rows = [[row["case"], f"{row['requests_per_cpu_s']:,}", row.get("uncompiled", "-")] for row in result["growth"]]
    return table(["under the live policies", "requests a CPU second", "not compiled"], rows)


TABLES: Tables = {
    "placement_search": placement_search,
    "growth": growth,
    "hybrids": hybrids,
    "placements": placements,
    "simulator": simulator,
}
