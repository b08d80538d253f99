"""What comes in by the front: what a request costs a router, who may ask for how much, and what clients see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tables.shape import Tables, cell, folded, slashed, table

PICTURES = {
    "flood": "The slowest health check and the most memory of a router in each flood",
    "router": "CPU time of a router by the number of workers",
}


def router(result: Mapping[str, Any]) -> str:
    latency, added = result["latency_ms"], result["added_ms"]
    first = table(
        ["one request after another", "P50 ms", "P99 ms"],
        [
            ["through the router", latency["router"]["p50"], latency["router"]["p99"]],
            ["the bare server", latency["bare"]["p50"], latency["bare"]["p99"]],
            ["added", added["p50"], added["p99"]],
        ],
    )
    names = {
        "requests": "requests, 64 at once",
        "tokens_paced": "tokens of 64 streams, paced",
        "tokens_flood_64": "tokens of 64 streams, flood",
        "tokens_flood_1024": "tokens of 1,024 streams, flood",
    }
    keys = ("router_cpu_us", "bare_cpu_us", "router_per_cpu_s", "router_tokens_per_message")
    rows = [[text, *(result[key][name] for name in keys)] for key, text in names.items()]
    columns = ["", "router CPU us each", "bare CPU us each", "router, a CPU second", "tokens a message"]
    half, grown = result["half_load"], result["growth"]
    beside = (
        f"Beside {half['streams']} streams of {half['tokens_per_s']:,} tokens a second together, which take "
        f"{half['router_cores']:.0%} of a core of the router, it adds {half['added_ms']['p50']} ms (P50) and "
        f"{half['added_ms']['p99']} ms (P99) to a request of one token."
    )
    growth = table(
        ["workers", *(str(row["workers"]) for row in grown)],
        [
            ["a request, CPU us", *(row["request_cpu_us"] for row in grown)],
            ["a token of 64 streams in a flood, CPU us", *(row["token_cpu_us"] for row in grown)],
            ["without a request, cores", *(row["idle_cores"] for row in grown)],
        ],
    )
    return "\n\n".join([first, folded("CPU time, and by the number of workers", table(columns, rows), beside, growth)])


def http(result: Mapping[str, Any]) -> str:
    """What a request and a token cost over each."""
    sides = {"grpc": "gRPC", "http": "HTTP", "bare http": "a bare HTTP server"}
    rows = [
        [
            title,
            "/".join(f"{value:.1f}" for value in result["latency_ms"][name].values()),
            result["requests"][name]["cpu_us"],
            result["tokens"][name]["cpu_us"],
            result["tokens_per_message"][name],
        ]
        for name, title in sides.items()
    ]
    columns = ["", "a request, P50/P99 ms", "a request, CPU us", "a token, CPU us", "tokens a message"]
    watched = f"The page's stream costs {result['watched_cores']:.1%} of a core, {result['idle_cores']:.1%} without it."
    return f"{table(columns, rows)}\n\n{watched}"


def page(result: Mapping[str, Any]) -> str:
    """What watching adds to a router that is at work."""
    rows = [
        [each["watchers"], f"{each['cores']:.1%}", f"{each['added_cores']:.1%}", f"{each['ratio']:.3f}"]
        for each in result["watchers"]
    ]
    return table(["pages that watch", "of a core", "added by them", "ratio"], rows)


def clients(result: Mapping[str, Any]) -> str:
    """What each looked at, and what of that failed."""
    rows = []
    for client in result["clients"].values():
        passed = [what for what, why in client["checks"].items() if not why]
        failed = [why for why in client["checks"].values() if why]
        versions = ", ".join(f"`{each}`" for each in client["versions"])
        said = "; ".join([*passed, *(f"**FAILED** {why}" for why in failed)]).replace("|", "/")
        rows.append([client["title"], versions, f"{len(passed)} of {len(client['checks'])}", said])
    return table(["client", "version", "passed", "looked at"], rows)


def guards(result: Mapping[str, Any]) -> str:
    columns = ["", "a request P50/P99 ms", "connect P50 ms", "CPU us a request", "a token", "ratio of both"]
    rows = [
        [
            name,
            "/".join(cell(ms) for ms in row["latency_ms"].values()),
            row["connect_ms_p50"],
            row["request_cpu_us"],
            row["token_cpu_us"],
            ", ".join(str(row[key]["median"]) for key in ("request_ratio", "token_ratio") if key in row),
        ]
        for name, row in result["guards"].items()
    ]
    return table(columns, rows)


def fuzz(result: Mapping[str, Any]) -> str:
    rows = [
        [
            name,
            door["cases"],
            ", ".join(f"{count:,} {how}" for how, count in door["outcomes"].items()),
            len(door["unclear"]),
        ]
        for name, door in result["doors"].items()
    ]
    return table(["door", "cases", "outcomes", "unclear"], rows)


def flood(result: Mapping[str, Any]) -> str:
    rows = []
    for name, part in {"quiet": result["quiet"], **result["parts"]}.items():
        ended = ", ".join(f"{count:,} {code}" for code, count in part.get("codes", {}).items())
        check, other = part["check_ms"], part["other_client"]
        gave_up = sum(count for code, count in other["codes"].items() if code != "OK")
        late = f"{other['ttft_ms']['max']:.0f}" + (f", {gave_up}" if gave_up else "")
        times = slashed([check["p50"], check["p99"], check["max"]])
        rows.append([name.replace("_", " "), ended, times, late, part["most_rss_mb"], part["router_cpu_s"]])
    columns = ("flood", "ended", "health P50/P99/max ms", "other ms", "most memory MB", "router's CPU s")
    left = f"Memory before {result['before']['rss_mb']:.0f}, a minute after the last {result['after']['rss_mb']:.0f}."
    return f"{table(columns, rows)}\n\n{left}"


def fairness(result: Mapping[str, Any]) -> str:
    rows = [
        [name, *(f"{case['other']['ttft_s'][key]:.2f}" for key in ("p50", "p90", "p99")), *_answered(case)]
        for name, case in result["cases"].items()
    ]
    columns = ("names", "TTFT P50, s", "P90", "P99", "answered, refused", "of the flood")
    return table(columns, rows)


def _answered(case: Mapping[str, Any]) -> list[str]:
    return [f"{case[who]['answered']:,}, {case[who]['refused']:,}" if who in case else "" for who in ("other", "flood")]


def accounts(result: Mapping[str, Any]) -> str:
    """What was played, then what was counted beside what was read, and beyond that by how a request was disturbed."""
    databases = result["databases"]
    ended = ("whole", "left", "broken", "refused", "failed")
    played: list[list[object]] = [
        [name, f"{row['requests']:,}", "/".join(f"{row.get(how, 0):,}" for how in ended), *row["faults"].values()]
        for name, row in databases.items()
    ]
    faults = next(iter(databases.values()))["faults"]
    sums: list[list[object]] = [
        [f"{name}, {what}", *(f"{row[of][what]:,}" for of in ("undisturbed", "read", "counted"))]
        for name, row in databases.items()
        for what in ("requests", "prompt_tokens", "generated_tokens")
    ]
    beyond: list[list[object]] = [
        [f"{name}, {how}", *(f"{each[key]:,}" for key in ("requests", "none", "tokens", "most"))]
        for name, row in databases.items()
        for how, each in row["beyond"].items()
    ]
    return "\n\n".join(
        [
            table(["counted in", "requests", "/".join(ended), *faults], played),
            table(["", "read under undisturbed keys: counted the same", "read in all", "counted in all"], sums),
            folded(
                "What was counted for requests that were cut, and not read",
                table(["", "requests", "with none", "tokens in all", "most of one"], beyond),
            ),
        ]
    )


def accounts_cost(result: Mapping[str, Any]) -> str:
    rows = [
        [
            name,
            *(cell for of in ("request", "token") for cell in (row[of]["cpu_us"], _within(row[of]["ratio"]))),
        ]
        for name, row in result["routers"].items()
    ]
    return table(["counted", "CPU us a request", "to off", "a token", "to off"], rows)


def _within(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})"


TABLES: Tables = {
    "flood": flood,
    "fairness": fairness,
    "accounts": accounts,
    "accounts_cost": accounts_cost,
    "fuzz": fuzz,
    "guards": guards,
    "router": router,
    "http": http,
    "page": page,
    "clients": clients,
}
