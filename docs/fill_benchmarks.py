"""`python docs/fill_benchmarks.py`: writes the tables of docs/benchmarks.md from bench/results/*.json, no more.

Each table stands between `<!-- NAME -->` and `<!-- /NAME -->`. A result that is not there leaves a sentence that says
so; one that has no table of its own here is shown as what it holds, one row for each figure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "bench" / "results"
HEAD_KEYS = ("date", "commit", "has_uncommitted_changes", "machine", "torch", "grpcio")
MAX_FIGURES = 60
SHOWN_TOKENS = (2048, 32 * 1024, 32 * 576)  # of the roofline's steps


def main() -> None:
    PAGE.write_text(filled(PAGE.read_text()))


def filled(page: str) -> str:
    """The page with the tables of the results that exist now."""
    return re.sub(
        r"<!-- (\w+) -->\n.*?<!-- /\1 -->",
        lambda match: f"<!-- {match[1]} -->\n{section(match[1])}\n<!-- /{match[1]} -->",
        page,
        flags=re.DOTALL,
    )


def section(name: str) -> str:
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return f"Not measured yet: `{path.relative_to(ROOT)}` is not there."
    result = json.loads(path.read_text())
    return f"{heading(result)}\n\n{TABLES.get(name, figures)(result)}"


def heading(result: Mapping[str, Any]) -> str:
    machine = result.get("machine", {})
    parts = [f"{machine['cores']} cores of {machine['cpu']}"] if machine else []
    parts += [f"commit {result['commit']}"] if "commit" in result else []
    if result.get("has_uncommitted_changes"):
        parts[-1] += " with changes"
    return f"*{', '.join(parts) or 'Measured'}.*"


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [columns, ["---"] + ["---:"] * (len(columns) - 1), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def slashed(values: Mapping[str, float] | Sequence[float]) -> str:
    numbers = values.values() if isinstance(values, Mapping) else values
    return "/".join(f"{number:.0f}" for number in numbers)


def e2e(result: Mapping[str, Any]) -> str:
    rows: list[list[object]] = [
        [
            "kvrelay 1P1D, a core each",
            f"{row['asked_per_s']:g}, {row['request_throughput']:.2f}",
            slashed(row["latency_ms"]["ttft"]),
            slashed(row["latency_ms"]["tpot"]),
            f"{row['attainment']:.0%}",
            f"{row['other_cores']:.2f}",
        ]
        for row in result["rows"]
    ]
    columns = ["server", "requests/s asked, served", "TTFT P50/P90/P99 ms", "TPOT P50/P90/P99 ms"]
    shown = table([*columns, "meet both", "cores of other work"], rows)
    return f"{shown}\n\nHeld to {result['held_per_s']:g} requests/s. Ready after {result['ready_s']:.1f} s."


def arrangements(result: Mapping[str, Any]) -> str:
    rates = [f"{row['asked_per_s']:g}/s" for row in next(iter(result["rows"].values()))]
    rows: list[list[object]] = []
    for name, of_rates in result["rows"].items():
        p90 = [slashed([row["latency_ms"][metric]["p90"] for metric in ("ttft", "tpot")]) for row in of_rates]
        cells = [f"{row['attainment']:.0%} ({times})" for row, times in zip(of_rates, p90, strict=True)]
        rows.append([name, *cells, f"{result['goodput'][name]:g}/s"])
    shown = table(["arrangement", *rates, "90% within both to"], rows)
    parts = [shown]
    if ratios := result.get("ratios"):
        parts += [_arriving_ratios(ratios), noise(result)]
    if "plan" in result:
        picked, goodput = next(iter(result["plan"]["goodput"].items()))
        parts.append(f"The planner picked {picked}; it expects {goodput['value']:.3g} requests/s of it.")
    return "\n\n".join(parts)


def _arriving_ratios(of_rates: Sequence[Mapping[str, Any]]) -> str:
    names = list(of_rates[0]["ratio_to"])
    rows = [
        [
            f"{row['ours']}, {row['asked_per_s']:g}/s, {of.upper()}",
            *(spread(row["ratio_to"][name][of]) for name in names),
        ]
        for row in of_rates
        for of in row["ratio_to"][names[0]]
        if of.endswith("p90")
    ]
    return table(["their time over ours", *names], rows)


def peers(result: Mapping[str, Any]) -> str:
    names = list(result["rows"][0]["ratio_to"])
    rows = [
        [row["what"], f"{row['ms']:.1f}", *(spread(row["ratio_to"][name]) for name in names)] for row in result["rows"]
    ]
    tokens = [
        f"{name} {found['equal']} of {found['requests']}, {len(found['ties'])} at a tie"
        for name, found in result["tokens"].items()
    ]
    shown = table(["", "ours, ms", *(f"{name}'s time over ours" for name in names)], rows)
    look = "A quick look. " if result["quick"] else ""
    return f"{shown}\n\n{look}{noise(result)} The same greedy tokens as ours: {'; '.join(tokens)}."


def spread(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.2f}x ({ratio['least']:.2f}, {ratio['most']:.2f})"


def noise(result: Mapping[str, Any]) -> str:
    return f"Rounds played again: {len(result['played_again'])}; not to be had clean: {len(result['not_clean'])}."


def engine(result: Mapping[str, Any]) -> str:
    names = list(result["rows"][0]["tokens_per_s"])
    beside = names[3:]  # after ours and transformers' two
    rows: list[list[object]] = [
        [
            row["what"],
            *(f"{rate:,.0f}" for rate in row["tokens_per_s"].values()),
            f"{row['ratio_to_better']:.2f}x of {row['target']:.1f}x",
            *(spread(row["ratio_to"][name]) for name in beside),
            f"{row['share_of_floor']:.0%}",
        ]
        for row in result["rows"]
    ]
    floor = result["floor"]
    ratios = ["to the better of transformers' two, wanted", *(f"to {name}'s" for name in beside)]
    columns = ["tokens/s", *names, *ratios, "of the floor"]
    return (
        f"{table(columns, rows)}\n\n{result['threads']} threads; memory {floor['memory_gb_per_s']:.0f} GB/s, products "
        f"{floor['matmul_gflop_per_s']:,.0f} GFLOP/s."
    )


def handoff(result: Mapping[str, Any]) -> str:
    rows = [
        [f"{row['model']}, {row['prompt_tokens']}, {way}", f"{row['mbytes']:.0f}", f"{speed:.1f}"]
        + [f"{speed / row['gbytes_per_s'][base]:.0%}" for base in ("memcpy", "raw_gloo")]
        for row in result["bytes"]
        for way, speed in row["gbytes_per_s"].items()
        if "/" in way
    ]
    parts = [table(["Bytes: model, prompt tokens, way", "MB", "GB/s", "of memcpy", "of raw gloo"], rows)]
    for key, title in (("handoff", "Handoff"), ("hidden", "Hidden")):
        head = list(result[key][0])
        cells = [[cell(row[name]) for name in head] for row in result[key]]
        parts.append(table([f"{title}: {head[0]}", *(name.replace("_", " ") for name in head[1:])], cells))
    return "\n\n".join(parts)


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
    return f"{first}\n\n{table(columns, rows)}\n\n{beside}\n\n{growth}"


def two_hosts(result: Mapping[str, Any]) -> str:
    """What was promised and held, then what was served and how each cut went."""
    promises = [[text, "yes" if kept else "NO"] for text, kept in result["promises"].items()]
    parts = {name.replace("_", " "): part for name, part in result.items() if isinstance(part, dict)}
    served = [
        [
            name,
            f"{part['good_receipts']} of {part['requests']}",
            ", ".join(part["transports"]),
            part["pages"],
            f"{part['bytes'] / 1e6:.1f}",
        ]
        for name, part in parts.items()
        if "good_receipts" in part
    ]
    times = ("cut_for_s", "stream_failed_s", "refused_s", "serving_after_mend_s")
    cuts = [[name, *(part[key] for key in times)] for name, part in parts.items() if "cut_for_s" in part]
    cut_columns = ["cable cut", "for s", "a running stream failed after s", "a new request was refused in s"]
    return "\n\n".join(
        [
            table(["promise", "kept"], promises),
            table(["requests", "good receipts", "transport", "pages", "MB"], served),
            table([*cut_columns, "served again, s after the mend"], cuts),
            f"`ray up` took {result['ray_up_s']:.0f} s, `ray down` {result['ray_down_s']:.0f} s.",
        ]
    )


def roofline(result: Mapping[str, Any]) -> str:
    """How wrong each source's steps are foretold, then some of its steps."""
    rows = [
        [
            row["source"],
            row["rows"],
            *(f"{row[key][part]:{'+' if part == 'mean' else ''}.0%}" for key in ways for part in ("mean", "all")),
            *(f"{row['with_its_engine'][kind]:.0%}" for kind in ("prefill", "decode")),
        ]
        for ways in [("as_in_file", "with_its_engine")]
        for row in result["sources"]
    ]
    columns = ["steps published by", "steps", "as in the file: mean", "9 of 10 within", "with its engine: mean"]
    first = table([*columns, "9 of 10 within", "prefill", "decode"], rows)
    shown = [row for row in result["steps"] if row["batch"] in (1, 32) and row["tokens"] in SHOWN_TOKENS]
    steps = [
        [f"{row['model']}, TP {row['tp']}, {row['kind']}, {row['source']}", row["batch"], row["tokens"]]
        + [cell(float(row[key])) for key in ("published_ms", "as_in_file_ms", "with_its_engine_ms")]
        for row in shown
    ]
    columns = ["step", "batch", "tokens", "published ms", "as in the file", "with its engine"]
    return f"{first}\n\n{table(columns, steps)}"


def verify_live(result: Mapping[str, Any]) -> str:
    """Predicted and measured at each rate, then where the time went, then how the machine was."""
    columns = ["of the knee, requests/s", "within both %", "off", "TTFT P90 ms", "off", "TPOT P90 ms", "off", "noise"]
    rows: list[list[object]] = []
    for row in result["rows"]:
        shares, ttft, tpot = row["attainment"], row["ttft_p90"], row["tpot_p90"]
        noise = f"{shares['noise_points']:.1f}, {ttft['noise']:.0%}, {tpot['noise']:.0%}"
        rows.append(
            [
                f"{row['share_of_knee']:g}, {row['rate']:.2f}",
                _against(100 * shares["predicted"]["value"], [100 * value for value in shares["measured"]], 1),
                f"{shares['error_points']:+.1f}",
                *(_against(ttft["predicted_ms"]["value"], ttft["measured_ms"], 0), f"{ttft['error']:+.1%}"),
                *(_against(tpot["predicted_ms"]["value"], tpot["measured_ms"], 1), f"{tpot['error']:+.1%}"),
                noise,
            ]
        )
    names = list(result["rows"][0]["phases_ms"])
    phases = [
        [f"{row['share_of_knee']:g}"]
        + [_against(phase["predicted"], phase["measured"], 1) for phase in row["phases_ms"].values()]
        for row in result["rows"]
    ]
    broken = [
        f"{row['share_of_knee']:g} of the knee: {name}"
        for row in result["rows"]
        for name, is_kept in row["promises"].items()
        if not is_kept
    ]
    slo, error = result["slo"], result["profile"]["error"]
    return "\n\n".join(
        [
            f"Predicted against both live runs. Targets: TTFT {1e3 * slo['ttft_s']:.0f} ms, TPOT "
            f"{1e3 * slo['tpot_s']:.0f} ms. Error of the profile: prefill {error['prefill']:.1%}, decode "
            f"{error['decode']:.1%}. Noise: the live runs against each other (points, TTFT P90, TPOT P90).",
            table(columns, rows),
            table(["mean of each phase, ms", *(name.replace("_", " ") for name in names)], phases),
            f"Not as wanted: {'; '.join(broken)}." if broken else "All as wanted.",
        ]
    )


def _against(predicted: float, measured: Sequence[float], digits: int) -> str:
    return f"{predicted:.{digits}f}: {'/'.join(f'{value:.{digits}f}' for value in measured)}"


def paper_splitwise(result: Mapping[str, Any]) -> str:
    """Its known runs beside ours, its mixes and the best ones by each rule, its claims, and why."""
    rows = result["given_rows"]
    same = sum(row["slo_met"][0] == row["slo_met"][1] for row in rows)
    near = sum(row["largest_difference"] < 0.003 for row in rows)
    known = [
        [f"{name} {_counts(row)}", row["splitwise"], f"{row['published']:g}", f"{row['table']:g}"]
        for name, row in result["given_rates_code"].items()
    ]
    parts = [
        f"Of its {len(rows)} known runs, {same} have the same verdict here, and {near} agree within 0.3% in every "
        "percentile of TTFT, TBT and E2E.",
        table(
            ["code, equal power, grid of 10 requests/s: largest rate", "Splitwise", "here, published", "here, table"],
            known,
        ),
        table(
            ["mixes", "design", "published: machines, requests/s", "table: machines, requests/s", "cost", "power"],
            [row for name, rules in result["traces"].items() for row in _mix_rows(name, rules)],
        ),
    ]
    if "claims" in result:
        head = ["claim", "trace", "rule", "mix", "against", "times", "cost", "power"]
        claimed = [
            [
                *(row["claim"], row["trace"], row["rule"], row["mix"] + (", its own" if row.get("its") else "")),
                *(row["against"], f"**{row['times']:.2f}**", f"{row['cost']:.0f}", f"{row['power']:.0f}"),
            ]
            for row in result["claims"]
        ]
        said = [
            [row["what"], f"{row['paper']:g}", f"{row['published']:.2f}", f"{row['table']:.2f}"]
            for row in result["paper_figures"]
        ]
        parts.append(table(["conversation, as the paper has it", "paper", "here, published", "here, table"], said))
        parts += [table(head, claimed), "\n".join(f"- {sentence}" for sentence in result["reasons"])]
        parts.append(
            table(
                [
                    "its mixes at equal power: largest rate",
                    "design",
                    "drawn, published / table",
                    "real timestamps, published / table",
                    "live policies, table",
                ],
                list(_other_ways(result)),
            )
        )
    return "\n\n".join(parts)


MIXES = {
    "its_mixes_iso_power": "its own, equal power",
    "its_mixes_iso_cost": "its own, equal cost",
    "best_iso_power": "best, equal power",
    "best_iso_cost": "best, equal cost",
    "least_cost": "least cost",
    "least_power": "least power",
}


def _mix_rows(name: str, rules: Mapping[str, Any]) -> Iterator[list[object]]:
    flat, right = ({**rules[rule], **rules[rule].get("iso_throughput", {})} for rule in ("published", "table"))
    for key, title in MIXES.items():
        for design in flat.get(key, ()):
            first, second = flat[key][design], right.get(key, {}).get(design)
            cells = [f"{_counts(row)} {_rate(row)}" if row else "" for row in (first, second)]
            taken = [_taken(first, second, what) for what in ("cost", "power")]
            yield [f"{name}: {title}", design, *cells, *taken]


def _counts(row: Mapping[str, Any]) -> str:
    prompt, token = row["machines"]
    return f"({prompt},{token})" if token else f"({prompt})"


def _rate(row: Mapping[str, Any]) -> str:
    spread = row.get("interval")
    return f"{row['rate']:g}" + (f" [{spread[0]:g} to {spread[1]:g}]" if spread else "")


def _taken(first: Mapping[str, Any], second: Mapping[str, Any] | None, what: str) -> str:
    values = [f"{row[what]:.0f}" for row in (first, second) if row]
    return values[0] if len(set(values)) == 1 else ", ".join(values)


def _other_ways(result: Mapping[str, Any]) -> Iterator[list[object]]:
    for name, rules in result["traces"].items():
        for design, row in rules["table"]["its_mixes_iso_power"].items():
            drawn = [rules[rule]["its_mixes_iso_power"][design]["rate"] for rule in ("published", "table")]
            replay = [result["replay"][name][rule][design]["rate"] for rule in ("published", "table")]
            both = [f"{rates[0]:g} / {rates[1]:g}" for rates in (drawn, replay)]
            yield [name, f"{design} {_counts(row)}", *both, f"{result['live'][name][design]['rate']:g}"]


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
    return f"{_balanced(result['cases'])}\n\n{table(columns, rows)}"


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
        [row["search"], row["chosen"], _long(row["goodput"]), row["best_two_pools"], row["best_colocated"]]
        for row in result["rows"]
    ]
    parts = [
        table(["search", "CPU-s (wanted)", "requests simulated", "whole clusters tried"], rows),
        table(["search", "chosen", "requests/s", "best two pools", "best colocated"], found),
    ]
    return "\n\n".join(parts)


def paper_distserve(result: Mapping[str, Any]) -> str:
    """Its runs, its searches, its placements, its figures, its bursts."""
    keys = ("its_simulator", "its_rules_here", "live_policies")
    runs = [[row["case"], *(_run_of(row.get(key)) for key in keys)] for row in result.get("runs", [])]
    searches = [
        [
            row["case"],
            f"{row['its_best']} {row['its_best_per_gpu']:g}",
            f"{row['its_rules_here']} {row['its_rules_here_per_gpu']:g}",
            f"{row['configurations_alike']} of {row['configurations']}",
            f"{row['long_run_best_pair']}: {row['long_run_per_gpu']:g}",
        ]
        for row in result.get("searches", [])
    ]
    placements = [
        [f"{row['model']} {row['dataset']}", f"{row['published_prefill']} {row['published_decode']}"]
        + [_best_of(row.get(key)) for key in ("algorithm_1_prefill", "algorithm_1_decode", "best_pairs")]
        + [row.get("ours") or _best_of(row.get("best_colocated_same_profile"))]
        for row in result.get("placements", [])
    ]
    figures = [
        [
            f"{row['case']}, {name}",
            row["published_per_gpu"].get(name, ""),
            row["burst_per_gpu"].get(name, ""),
            _long(found),
        ]
        for row in result.get("figures", [])
        for name, found in row["long_run_per_gpu"].items()
    ]
    gains = [
        [
            f"{row['case']}, gain over vLLM",
            row["published_gain"],
            _gain(row["burst_per_gpu"]),
            ", ".join(f"{name} {gain}" for name, gain in row["long_run_gain"].items()),
        ]
        for row in result.get("figures", [])
    ]
    counts = ("300", "1000")
    bursts = [
        [row["placement"], *(f"{row['known_per_gpu'][n]:g}, {row['its_rules_here_per_gpu'][n]:g}" for n in counts)]
        + [_long(found) for found in row["long_run_per_gpu"].values()]
        for row in result.get("bursts", [])
    ]
    its = "its simulator"
    return "\n\n".join(
        [
            table(["run: both met %, P90 TTFT, TPOT ms", its, "its rules here", "live policies"], runs),
            table(["search: per GPU", its, "its rules here", "configurations alike", "best pair, long run"], searches),
            table(
                [
                    "placement",
                    "published prefill, decode (tp, pp)",
                    "Algorithm 1: prefill",
                    "decode",
                    "best pair",
                    "best colocated, same profile",
                ],
                placements,
            ),
            table(["goodput per GPU", "published", "its rules, a burst", "long run"], [*figures, *gains]),
            table(
                [
                    "per GPU by number of requests: known, here",
                    *counts,
                    "its rules, long run",
                    "live policies, long run",
                ],
                bursts,
            ),
        ]
    )


def _run_of(run: Mapping[str, float] | None) -> str:
    return f"{run['attainment_pct']:g}, {run['ttft_p90_ms']:.0f}, {run['tpot_p90_ms']:.1f}" if run else ""


def _best_of(found: Sequence[Sequence[Any]] | None) -> str:
    return f"{found[0][0]}: {found[0][1]:g}" if found else ""


def _long(found: Sequence[float]) -> str:
    return f"{found[0]:g} ({found[1]:g} to {found[2]:g})"


def _gain(rates: Mapping[str, float]) -> str:
    return f"{rates['DistServe'] / rates['vLLM']:.2f}" if rates.get("vLLM") else "vLLM keeps the targets at no rate"


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


def guards(result: Mapping[str, Any]) -> str:
    columns = ["", "a request P50/P99 ms", "connect P50 ms", "CPU us a request", "a token"]
    rows = [
        [
            name,
            "/".join(cell(ms) for ms in row["latency_ms"].values()),
            row["connect_ms_p50"],
            row["request_cpu_us"],
            row["token_cpu_us"],
        ]
        for name, row in result["guards"].items()
    ]
    return table(columns, rows)


def simulator(result: Mapping[str, Any]) -> str:
    columns = ["case", "rules", "requests a CPU second", "not compiled", "times their simulator"]
    rows = [
        [row["case"], row["rules"], f"{row['requests_per_cpu_s']:,}", row.get("uncompiled", "-"), row.get("times", "-")]
        for part in ("distserve", "splitwise", "growth")
        for row in result[part]
    ]
    return table(columns, rows)


def kv_fp8(result: Mapping[str, Any]) -> str:
    names = {
        "relative_error_median": "relative error of logits, median",
        "relative_error_p99": "the same, P99",
        "same_likeliest": "share of positions with the same likeliest token",
        "kl_mean_nats": "KL divergence, mean, nats",
        "nll_increase_nats": "loss, more by, nats",
    }
    sides = (result["fp8_against_bfloat16"], result["bfloat16_against_float32"])
    rows = [[text, *(cell(side[name]) for side in sides)] for name, text in names.items()]
    rows.append(["bytes of KV a token", *(cell(result["kv_bytes"][name]) for name in ("fp8", "bfloat16"))])
    of = f"{sides[0]['positions']:,} positions of {result['prompts']} prompts, {result['model']}"
    note = ", random weights: a rehearsal of how it is measured" if result["is_rehearsal"] else ""
    return f"{of}{note}.\n\n{table(['', 'fp8 against bfloat16', 'bfloat16 against float32'], rows)}"


def two_versions(result: Mapping[str, Any]) -> str:
    before, after = result["before"], result["after"]
    rows = [
        [f"{name.upper()} P50/P90 ms", *(slashed(side[f"{name}_ms"]) for side in (before, after))]
        for name in ("ttft", "tpot")
    ]
    busy = "cpu_ms_per_request"
    rows += [[f"{name}, CPU ms a request", before[busy][name], after[busy][name]] for name in before[busy]]
    return table([f"{result['rate']:g} requests/s, {result['rounds']} rounds", "before", "after"], rows)


def figures(result: Mapping[str, Any]) -> str:
    """What is known of a result without its own table: its figures, by their names."""
    rows = [[f"`{key}`", cell(value)] for key, value in leaves(result) if key.split(".")[0] not in HEAD_KEYS]
    left_out = f"\n\n{len(rows) - MAX_FIGURES} more are in the file." if len(rows) > MAX_FIGURES else ""
    return table(["figure", ""], rows[:MAX_FIGURES]) + left_out


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield prefix, value
        return
    for key, item in items:
        yield from leaves(item, f"{prefix}.{key}" if prefix else str(key))


def cell(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def chaos(result: Mapping[str, Any]) -> str:
    """A row for each bound, its cells together: the tables of single cells are in the file."""
    bounds: dict[str, list[Mapping[str, Any]]] = {}
    for cell in result["cells"]:
        bounds.setdefault(cell["bound"], []).append(cell)
    rows = [
        [name, len(cells), sum(c["faults"] for c in cells), *(_times(cells, f"{what}_s") for what in CHAOS_TIMES)]
        for name, cells in bounds.items()
    ]
    columns = ["bound", "cells", "faults", "noticed", "next token", "pages back"]
    ended = ", ".join(f"{count:,} {how}" for how, count in sorted(result["streams"].items()))
    broken = [cell["cell"] for cell in result["cells"] if not cell["is_ok"]]
    verdict = f"Broken in {', '.join(broken)}." if broken else "Every bound was kept."
    verdict += "".join(f" But {problem}." for problem in result["problems"])
    growth = ", ".join(f"{value:g} {name}" for name, value in result["growth"].items())
    return (
        f"{result['faults']:,} faults in {result['duration_s'] / 60:.0f} minutes. Requests: {ended}. {verdict} Most "
        f"that a process grew while it lived: {growth}.\n\n{table(columns, rows)}"
    )


def protocol(result: Mapping[str, Any]) -> str:
    columns = ("states", "histories", "left", "turns", "walks", "seconds")
    rows = [
        [f"{name} ({row['commit']})" if "commit" in row else name, *(row.get(c, "broken") for c in columns)]
        for name, row in result["settings"].items()
    ]
    return table(["setting", *columns], rows)


def moves(result: Mapping[str, Any]) -> str:
    columns = ("run", "moves", "of prompts", "failed", "role changes", "kills", "sent again", "computed twice")
    keys = ("moves", "passed", "moves_failed", "role_changes", "kills", "sent_again", "recomputed_tokens")
    rows = []
    for name, row in result["rows"].items():
        gaps = row["gaps_ms"]
        every = slashed([gaps["p50"], gaps["p99"], gaps["max"]])
        largest = slashed([gaps["largest_p50"], gaps["largest_p90"]])
        rows.append([name, *(row.get(key, "-") for key in keys), every, largest])
    return table((*columns, "gaps, ms", "largest k, ms"), rows)


def replan(result: Mapping[str, Any]) -> str:
    columns = ("load", "roles", "requests that met their targets", "changes")
    rows = []
    for name, row in result["loads"].items():
        for roles, share in row["attainment"].items():
            changes = ", ".join(f"{each['at_s']:.0f} s" for each in row["changes"].get(roles, ()))
            rows.append([name, roles, f"{share:.0%}", changes])
    return table(columns, rows)


def placements(result: Mapping[str, Any]) -> str:
    columns = next(iter(result["goodput_per_s"].values()))
    rows = [[load, *found.values()] for load, found in result["goodput_per_s"].items()]
    return table(("requests/s", *columns), rows)


def versions(result: Mapping[str, Any]) -> str:
    columns = ("figure", "before", "after", "ratio", "half of the rounds within")
    rows = [
        [name, row["before"], row["after"], row["ratio"], " to ".join(map(str, row["half_within"]))]
        for name, row in result["figures"].items()
    ]
    return f"{result['rounds']} rounds at {result['rate']:g} requests/s.\n\n{table(columns, rows)}"


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


def flood(result: Mapping[str, Any]) -> str:
    rows = []
    for name, part in {"quiet": result["quiet"], **result["parts"]}.items():
        ended = ", ".join(f"{count:,} {code}" for code, count in part.get("codes", {}).items())
        check, other = part["check_ms"], part["other_client"]
        gave_up = sum(count for code, count in other["codes"].items() if code != "OK")
        late = f"{other['ttft_ms']['max']:.0f}" + (f", {gave_up}" if gave_up else "")
        times = slashed([check["p50"], check["p99"], check["max"]])
        rows.append([name.replace("_", " "), ended, times, late, part["most_rss_mb"], part["router_cpu_s"]])
    columns = ("flood", "ended", "health P50/P99/max", "other", "most memory", "router's CPU s")
    left = f"Memory before {result['before']['rss_mb']:.0f}, a minute after the last {result['after']['rss_mb']:.0f}."
    return f"{table(columns, rows)}\n\n{left}"


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


CHAOS_TIMES = ("noticed", "next_token", "pages")


def _times(cells: Sequence[Mapping[str, Any]], what: str) -> str:
    """The worst of the cells' P50, P99 and longest, and their bound."""
    measured = [cell[what] for cell in cells if cell[what]["max"] is not None]
    if not measured:
        return "-"
    worst = [max(figures[key] for figures in measured) for key in ("p50", "p99", "max")]
    bounds = {figures["bound"] for figures in measured} - {None}
    return f"{'/'.join(f'{time_s:.2f}' for time_s in worst)} of {max(bounds):.2f}" if bounds else "-"


TABLES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "chaos": chaos,
    "flood": flood,
    "e2e": e2e,
    "arrangements": arrangements,
    "arrangements_amx": arrangements,
    "arrangements_avx512_fp16": arrangements,
    "engine": engine,
    "engine_amx": engine,
    "engine_avx512_fp16": engine,
    "fuzz": fuzz,
    "handoff": handoff,
    "paper_distserve": paper_distserve,
    "paper_splitwise": paper_splitwise,
    "placement_search": placement_search,
    "guards": guards,
    "guards_amd": guards,
    "hybrids": hybrids,
    "kv_fp8": kv_fp8,
    "moves": moves,
    "peers": peers,
    "peers_amx": peers,
    "peers_avx512_fp16": peers,
    "placements": placements,
    "replan": replan,
    "shift": shift,
    "protocol": protocol,
    "roofline": roofline,
    "router": router,
    "simulator": simulator,
    "startup": startup,
    "two_hosts": two_hosts,
    "versions": two_versions,
    "versions_unused": versions,
    "verify_live": verify_live,
}

if __name__ == "__main__":
    main()
