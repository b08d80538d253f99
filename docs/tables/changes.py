"""What is changed in a cluster that serves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tables.shape import Tables, slashed, table

PICTURES = {
    "moves": "Gaps between tokens: undisturbed, moved, and moved and killed",
    "replan": "Share within both targets over time: roles that stay, and by both policies",
    "shift": "Share of requests within both targets over time, with and without replanning",
}


def moves(result: Mapping[str, Any]) -> str:
    columns = (
        "run",
        "moves",
        "of prompts",
        "moves that failed",
        "role changes",
        "kills",
        "sent again",
        "computed twice",
    )
    keys = ("moves", "passed", "moves_failed", "role_changes", "kills", "sent_again", "recomputed_tokens")
    rows = []
    for name, row in result["rows"].items():
        gaps = row["gaps_ms"]
        every = slashed([gaps["p50"], gaps["p99"], gaps["max"]])
        largest = slashed([gaps["largest_p50"], gaps["largest_p90"]])
        rows.append([name, *(row.get(key, "-") for key in keys), every, largest])
    return table((*columns, "gaps, ms", "largest k, ms"), rows)


def models(result: Mapping[str, Any]) -> str:
    columns = ("model", "requests", "wrong or failed", "sent again", "told that it is gone", "TTFT P50 busy/else, ms")
    rows = []
    for name, row in result["rows"].items():
        counts = [row[key] for key in ("requests", "wrong", "sent_again", "refused_after")]
        rows.append([name, *counts, slashed([row["ttft_p50_ms"][key] for key in ("busy", "few")])])
    took_s = result["took_s"]
    took = f"The third was loaded in {took_s['load']:g} s, the second removed in {took_s['remove']:g} s."
    return f"{table(columns, rows)}\n\n{took}"


def rolling(result: Mapping[str, Any]) -> str:
    columns = ("run", "requests", "wrong or failed", "sent again", "computed twice", "moves", "took, s", "gaps, ms")
    rows = []
    for name, row in result["rows"].items():
        gaps = slashed([row["gaps_ms"][key] for key in ("p50", "p99", "max")])
        counts = [row[key] for key in ("sent_again", "recomputed_tokens", "moves", "seconds")]
        rows.append([name, row["requests"], row["wrong"], *counts, gaps])
    return table(columns, rows)


def replan(result: Mapping[str, Any]) -> str:
    columns = ("load", "roles", "requests that met their targets", "changes")
    rows = []
    for name, row in result["loads"].items():
        for roles, share in row["attainment"].items():
            changes = ", ".join(f"{each['at_s']:.0f} s" for each in row["changes"].get(roles, ()))
            rows.append([name, roles, f"{share:.0%}", changes])
    return table(columns, rows)


def shift(result: Mapping[str, Any]) -> str:
    tables = []
    for begin, played in result["begins"].items():
        columns = ("replan", "all", *(kind for kind, _ in played["phases"]), "changes", "moves", "failed", "again")
        (_, first_s), *_, (_, last_s) = played["phases"]
        how = f"{first_s:g} s of each, then {last_s:g}; commit {played['commit']}"
        tables.append(f"Begins with {begin} ({how}):\n\n{table(columns, [_shifted(run) for run in played['runs']])}")
    return "\n\n".join(tables)


def _shifted(run: Mapping[str, Any]) -> list[Any]:
    changed = [f"{each['at_s']:.0f} s: {_changed(change)}" for each in run["changes"] for change in each["changes"]]
    shares = [f"{share:.0%}" for share in (run["attainment"], *run["phases"])]
    return [run["mode"], *shares, ", ".join(changed), run["moves"], run["failed"], run["sent_again"]]


def _changed(change: Mapping[str, Any]) -> str:
    """A worker's role and chunks, or a pool's size."""
    if not change["worker"]:
        return f"{change['pool']}: {change['replicas']} workers"
    return f"{change['worker']} {change['role']} {change.get('chunk_tokens') or ''}".rstrip()


TABLES: Tables = {
    "moves": moves,
    "replan": replan,
    "rolling": rolling,
    "models": models,
    "shift": shift,
}
