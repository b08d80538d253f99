"""Reads what `kvrelay bench` saved, a series or a single run, as one form: the sides and turns of a series.

A single run is a series of one side and one turn; several files are put together, a side for each, named apart.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvrelay.bench.series.comparing import METRICS, SCHEMA
from kvrelay.bench.workload import WorkloadError


def read_result(path: Path) -> dict[str, Any]:
    """Raises WorkloadError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WorkloadError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}; give a file") from None
    except (ValueError, RecursionError):
        raise WorkloadError(f"{path} is no JSON; give what `kvrelay bench --save-result` wrote") from None
    if isinstance(found, dict) and found.get("schema") == SCHEMA:
        return found
    if isinstance(found, dict) and {"requests_detail", "latency_ms", "settings"} <= found.keys():
        return _as_series(found)
    raise WorkloadError(f"{path} is no result of {SCHEMA} and no run; give what `kvrelay bench --save-result` wrote")


def _as_series(run: Mapping[str, Any]) -> dict[str, Any]:
    rate = run["settings"]["request_rate"]
    detail = run["requests_detail"]
    kept = {key: run[key] for key in run if key not in ("requests_detail", "settings", "endpoint", "model")}
    turn = kept | {"side": "run", "rate": rate, "round": 0, "samples": _samples(detail)}
    return {
        "schema": SCHEMA,
        **{key: run[key] for key in ("date", "commit", "machine", "versions") if key in run},
        "settings": run["settings"],
        "slos_ms": run.get("slos_ms", {}),
        "sides": [{"name": "run", "endpoint": run["endpoint"], "model": run["model"]}],
        "turns": [turn],
    }


def _samples(detail: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    good = [each for each in detail if not each["code"] and each["token_times_s"]]
    seen: dict[str, list[float]] = {f"{name}_ms": [] for name in METRICS}
    for each in good:
        first, last = (each["token_times_s"][end] - each["due_s"] for end in (0, -1))
        seen["ttft_ms"].append(1e3 * first)
        seen["e2el_ms"].append(1e3 * last)
        if each["output_len"] > 1:
            seen["tpot_ms"].append(1e3 * (last - first) / (each["output_len"] - 1))
    return {name: sorted(values) for name, values in seen.items()}


def together(results: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """(name of the file, what it holds), as one: the first's head and settings, each file's sides under its name."""
    if len(results) == 1:
        return results[0][1]
    whole = dict(results[0][1]) | {"sides": [], "turns": [], "knees": {}}
    whole.pop("compared", None)
    for name, result in results:
        renamed = {
            side["name"]: name if len(result["sides"]) == 1 else f"{name}: {side['name']}" for side in result["sides"]
        }
        whole["sides"] += [{**side, "name": renamed[side["name"]]} for side in result["sides"]]
        whole["turns"] += [{**turn, "side": renamed[turn["side"]]} for turn in result["turns"]]
        whole["knees"] |= {renamed[side]: found for side, found in result.get("knees", {}).items()}
    return whole
