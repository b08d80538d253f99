"""A cluster as it is used: started, served from, explained, and beside an earlier version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tables.shape import Tables, folded, slashed, table

PICTURES = {
    "e2e": "P50, P90 and P99 of TTFT and TPOT over the request rate",
    "startup": "Memory and idle CPU of each process",
    "versions_unused": "Latencies and CPU time after over before, with what half of the rounds lie within",
}


def e2e(result: Mapping[str, Any]) -> str:
    rows = [
        [
            f"{row['asked_per_s']:g}, {row['request_throughput']:.2f}",
            *(slashed(row["latency_ms"][metric]) for metric in ("ttft", "tpot")),
            f"{row['attainment']:.0%}",
            f"{row['other_cores']:.2f}",
        ]
        for row in result["rows"]
    ]
    columns = ["requests/s asked, served", "TTFT P50/P90/P99 ms", "TPOT P50/P90/P99 ms", "meet both"]
    shown = table([*columns, "cores of other work"], rows)
    return f"{shown}\n\nHeld to {result['held_per_s']:g} requests/s. Ready after {result['ready_s']:.1f} s."


def startup(result: Mapping[str, Any]) -> str:
    memory, idle = result["memory_mb"], result["idle_cpu_percent"]
    rows = [[name, round(memory[name]), idle[name]] for name in memory]
    rows.append(["all", round(result["memory_total_mb"]), result["idle_cpu_total_percent"]])
    times = (
        f"{result['workers']} of {result['model']}: ready after {result['ready_s']} s (the first start "
        f"{result['first_start_s']} s), of which `ray.init` alone takes {result['ray_alone_s']} s; stopped after "
        f"{result['stop_s']} s."
    )
    return f"{times}\n\n{table(['process', 'memory MB', 'idle, % of a core'], rows)}"


def newcomer(result: Mapping[str, Any]) -> str:
    steps = list(result["steps_s"].items())
    last = next(i for i, (name, _) in enumerate(steps) if name.startswith("kvrelay up"))
    ready_s = sum(seconds for _, seconds in steps[: last + 1])
    rows = [[name, seconds, sum(s for _, s in steps[: i + 1])] for i, (name, seconds) in enumerate(steps[: last + 1])]
    rows += [[name, seconds, ready_s + seconds] for name, seconds in steps[last + 1 :]]
    return table(["step", "seconds", "from nothing"], [[name, f"{s:.1f}", f"{whole:.0f}"] for name, s, whole in rows])


def explain(result: Mapping[str, Any]) -> str:
    row = result["row"]
    states = [row.get(state, 0) for state in ("finished", "cancelled", "failed")]
    figures = [row.get(key, 0) for key in ("moves", "sent again", "kills")]
    off = [f"{row[key]:.6f}" for key in ("ttft_off_ms", "e2e_off_ms")]
    columns = ("requests", "finished/left/failed", "moves", "sent again", "kills")
    sums = ("most that TTFT is off, ms", "E2E", "the client's clock says more, ms")
    rows = [[row["requests"], slashed(states), *figures, *off, row["client_says_more_ms"]]]
    told = [[name, count] for part in ("spans", "details") for name, count in sorted(result[part].items())]
    return f"{table((*columns, *sums), rows)}\n\n{folded('What was told', table(['part', 'times'], told))}"


def two_versions(result: Mapping[str, Any]) -> str:
    before, after = result["before"], result["after"]
    rows = [
        [f"{name.upper()} P50/P90 ms", *(slashed(side[f"{name}_ms"]) for side in (before, after))]
        for name in ("ttft", "tpot")
    ]
    busy = "cpu_ms_per_request"
    rows += [[f"{name}, CPU ms a request", before[busy][name], after[busy][name]] for name in before[busy]]
    return table([f"{result['rate']:g} requests/s, {result['rounds']} rounds", "before", "after"], rows)


def versions(result: Mapping[str, Any]) -> str:
    columns = ("figure", "before", "after", "ratio", "half of the rounds within")
    rows = [
        [name, row["before"], row["after"], row["ratio"], " to ".join(map(str, row["half_within"]))]
        for name, row in result["figures"].items()
    ]
    return f"{result['rounds']} rounds at {result['rate']:g} requests/s.\n\n{table(columns, rows)}"


TABLES: Tables = {
    "e2e": e2e,
    "explain": explain,
    "startup": startup,
    "newcomer": newcomer,
    "versions": two_versions,
    "versions_unused": versions,
}
