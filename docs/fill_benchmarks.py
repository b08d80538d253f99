"""`python docs/fill_benchmarks.py`: writes the tables of docs/benchmarks.md from bench/results/*.json, no more.

Each stands between `<!-- NAME -->` and `<!-- /NAME -->`, with the result's picture above (`python -m bench.plots` draws
those). A result that is not there leaves a sentence that says so. What is long is folded.
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
SHOWN_BOUNDS = (  # of chaos; the others are folded
    *("worker-killed", "worker-stopped", "rank-killed", "router-killed", "router-stopped"),
    *("engine-failed", "engine-hung", "pair-cut", "link-reset", "segment"),
)
KINDS_OF_CPU = ("", "_amx", "_avx2", "_avx512_fp16", "_zen4")  # bench.common's


def by_cpu(**of_each: Any) -> dict[str, Any]:
    """Of results that have a file for each kind of CPU."""
    return {name + kind: it for name, it in of_each.items() for kind in KINDS_OF_CPU}


PICTURES = {  # what each shows, for who does not see it
    **by_cpu(
        arrangements="The P90s of TTFT and of TPOT over the request rate, of our arrangements and of other servers",
        engine="Tokens a second of prefill and decode, ours and others'",
        peers="Other servers' times over ours, with their least and most",
        verify_live="Attainment and the P90s of TTFT and TPOT over the rate: predicted, and measured twice",
    ),
    "closed_loops": "Measured against predicted TTFT, time between tokens and throughput of served closed loops",
    "chaos": "The longest time of each fault as a share of its bound: all are below 1",
    "e2e": "P50, P90 and P99 of TTFT and TPOT over the request rate",
    "flood": "The slowest health check and the most memory of a router in each flood",
    "handoff": "The exposed part of handoffs with and without prefill, and GB/s of each transport by size",
    "growth": "TTFT of nine of ten requests by the number of workers, for one router and for several",
    "hybrids": "Goodput of the best hybrid over the better pure placement, a map of targets for each case",
    "kv_fp8": "Errors of fp8 pages beside those of bfloat16",
    "moves": "Gaps between tokens: undisturbed, moved, and moved and killed",
    "paper_distserve": "Goodput per GPU: published, of a burst, and in the long run",
    "paper_splitwise": "Requests a second of Splitwise's mixes, by the published rule, by the table, and live",
    "placements": "Goodput of four ways to give requests to eight workers",
    "protocol": "States looked at in each setting, exhausted or bounded",
    "replan": "Share within both targets over time: roles that stay, and by both policies",
    "static_batches": "Foretold over measured time of prefill and decode steps, by GPU",
    "roofline": "Planned over published time of single steps, by source",
    "router": "CPU time of a router by the number of workers",
    "shift": "Share of requests within both targets over time, with and without replanning",
    "simulator": "Speed beside their simulators, and by size of the cluster",
    "startup": "Memory and idle CPU of each process",
    "two_hosts": "Seconds until a stream failed, a request was refused and it served again, for both cuts",
    "versions_unused": "Latencies and CPU time after over before, with what half of the rounds lie within",
}


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
    return "\n\n".join([*picture(name), heading(result), TABLES[name](result)])


def picture(name: str) -> list[str]:
    """In the page's colours; none where a table says all."""
    dark = f'<source media="(prefers-color-scheme: dark)" srcset="plots/{name}-dark.svg">'
    light = f'<img alt="{PICTURES.get(name)}" src="plots/{name}.svg">'
    return [f"<picture>{dark}{light}</picture>"] if name in PICTURES else []


def folded(summary: str, *parts: str) -> str:
    return "\n\n".join([f"<details><summary>{summary}</summary>", *parts, "</details>"])


def heading(result: Mapping[str, Any]) -> str:
    machine = result.get("machine", {})
    parts = [f"{machine['cores']} cores of {machine['cpu']}"] if machine else []
    parts += [f"commit {result['commit']}"] if result.get("commit") else []
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
        parts += [folded("Each other server's time over ours", _arriving_ratios(ratios)), noise(result)]
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
    """The engine's rows, then what arrives by chance."""
    names = list(result["rows"][0]["ratio_to"])
    columns = ["", "ours, ms", *(f"{name}'s time over ours" for name in names)]
    rows = [
        [row["what"], f"{row['ms']:.1f}", *(spread(row["ratio_to"][name]) for name in names)] for row in result["rows"]
    ]
    alone = [row for row in rows if row[0].startswith(("prefill", "decode"))]
    arriving = table(columns, [row for row in rows if row not in alone])
    tokens = [
        f"{name} {found['equal']} of {found['requests']}, {len(found['ties'])} at a tie"
        for name, found in result["tokens"].items()
    ]
    look = "A quick look. " if result["quick"] else ""
    told = f"{look}{noise(result)} The same greedy tokens as ours: {'; '.join(tokens)}."
    return "\n\n".join([table(columns, alone), folded("Requests that arrive by chance", arriving), told])


def spread(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.2f}x ({ratio['least']:.2f}, {ratio['most']:.2f})"


def noise(result: Mapping[str, Any]) -> str:
    return f"Rounds played again: {len(result['played_again'])}; not to be had clean: {len(result['not_clean'])}."


def engine(result: Mapping[str, Any]) -> str:
    names = list(result["rows"][0]["tokens_per_s"])
    beside = names[3:]  # after ours and transformers' two
    rows = [
        [
            row["what"],
            *(f"{rate:,.0f}" for rate in row["tokens_per_s"].values()),
            f"{row['ratio_to_better']:.2f}x of {row['target']:.1f}x",
            f"{row['share_of_floor']:.0%}",
        ]
        for row in result["rows"]
    ]
    shown = table(["tokens/s", *names, "to the better of transformers' two, wanted", "of the floor"], rows)
    floor = result["floor"]
    told = (
        f"{result['threads']} threads; memory {floor['memory_gb_per_s']:.0f} GB/s, products "
        f"{floor['matmul_gflop_per_s']:,.0f} GFLOP/s."
    )
    ratios = [[row["what"], *(spread(row["ratio_to"][name]) for name in beside)] for row in result["rows"] if beside]
    more = [folded("Ours over each other server", table(["rate", *beside], ratios))] if beside else []
    return "\n\n".join([shown, told, *more])


def handoff(result: Mapping[str, Any]) -> str:
    """What prefill hides, then of each prompt the time alone and the bytes' speed, a column for each way."""
    hidden = [
        [
            row["transport"],
            row["prompt_tokens"],
            *(f"{row[key]:.3g}" if row[key] < 1000 else f"{row[key]:.0f}" for key in HIDDEN),
            f"{row['hidden_share']:.0%}",
        ]
        for row in result["hidden"]
    ]
    columns = ["transport", "prompt tokens", "prefill ms", "handoff alone ms", "exposed ms", "hidden"]
    ways = [way for way in result["bytes"][0]["gbytes_per_s"] if "/" in way]
    speeds = [
        [f"{row['model']}, {row['prompt_tokens']}", f"{row['mbytes']:.0f}"]
        + [_share(row["gbytes_per_s"], way) for way in ways]
        for row in result["bytes"]
    ]
    sizes: dict[str, list[str]] = {}
    for row in result["handoff"]:
        sizes.setdefault(f"{row['model']}, {row['prompt_tokens']}", []).append(f"{row['handoff_ms']:.3g}")
    runs = dict.fromkeys(
        f"{row['transport']}, {'' if row['checksums'] else 'no '}checksums" for row in result["handoff"]
    )
    return "\n\n".join(
        [
            table(columns, hidden),
            folded(
                "GB/s, and the share of its base: shared memory of one memcpy, tcp of one sendall, else of raw gloo",
                table(["model, prompt tokens", "MB", *(way.replace("/", ", ") for way in ways)], speeds),
            ),
            folded(
                "A handoff through the control stream, all layers ready at once, ms",
                table(["model, prompt tokens", *runs], [[name, *times] for name, times in sizes.items()]),
            ),
        ]
    )


HIDDEN = ("prefill_ms", "handoff_alone_ms", "exposed_ms")
BASES = {"shared_memory": "memcpy", "tcp": "raw_tcp"}


def _share(speeds: Mapping[str, float], way: str) -> str:
    base = BASES.get(way.partition("/")[0], "raw_gloo")
    return f"{speeds[way]:.1f}, {speeds[way] / speeds[base]:.0%}"


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
            table([*cut_columns, "served again, s after the mend"], cuts),
            f"`ray up` took {result['ray_up_s']:.0f} s, `ray down` {result['ray_down_s']:.0f} s.",
            folded(
                "What was promised, and what was served",
                table(["promise", "kept"], promises),
                table(["requests", "good receipts", "transport", "pages", "MB"], served),
            ),
        ]
    )


def roofline(result: Mapping[str, Any]) -> str:
    """How wrong each source's steps are foretold."""
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
    return table([*columns, "9 of 10 within", "prefill", "decode"], rows)


def static_batches(result: Mapping[str, Any]) -> str:
    """What each way of leaving batches out leaves of their times, then by setting, then what was fitted."""
    ways = result["ways"]
    gpus = list(result["figures"])
    rows = [
        [way, found["batches"], _step_errors(found), *(_step_errors(found["by_gpu"].get(gpu)) for gpu in gpus)]
        for way, found in ways.items()
    ]
    shown = ("fitted", "a model on a GPU", "a model", "another design")
    settings = [
        [" ".join((row["hardware"], row["model"], row["precision"])), row["tp"], row["batches"]]
        + [_step_errors(row.get(way)) for way in shown]
        for row in result["rows"]
    ]
    figures = [
        [path.split(".")[1], *(at.get(path, "") for at in result["figures"].values())]
        for path in result["figures"]["h100-sxm"]
    ]
    return "\n\n".join(
        [
            table(["left out of the fit", "batches", "all", *gpus], rows),
            folded("By GPU, model, precision and TP", table(["batches of", "TP", "batches", *shown], settings)),
            folded("What was fitted, as the hardware files have it", table(["", *gpus], figures)),
        ]
    )


def _step_errors(of: Mapping[str, Any] | None) -> str:
    if of is None:
        return ""
    return " / ".join(f"{of[phase]['median']:+.0%} ({of[phase]['nine_of_ten']:.0%})" for phase in ("prefill", "decode"))


CLOSED_LOOPS = {
    "ttft_mean": "TTFT mean",
    "itl_mean": "between tokens mean",
    "throughput": "throughput",
    "ttft_p95": "TTFT P95",
    "itl_p95": "between tokens P95",
}


def closed_loops(result: Mapping[str, Any]) -> str:
    """Each way's errors, fitted and left out, then what it goes by, then by setting, and what is left by clients."""
    ways = result["ways"]
    names = [f"{text}, within {result['wanted'][key]:.0%}" for key, text in CLOSED_LOOPS.items()]
    rows = [
        [f"{way}: {part}", of["runs"], *(_loop_error(of[key]) for key in CLOSED_LOOPS)]
        for way, found in ways.items()
        for part, of in found["parts"].items()
    ]
    by_setting = [
        [" ".join(str(row[key]) for key in ("model", "hardware", "precision")), row["tp"], row["clients"], row["runs"]]
        + [_loop_error(row[key]) for key in CLOSED_LOOPS]
        for row in ways["with both"]["by_setting"]
    ]
    columns = ["served", "TP", "clients", "runs", *CLOSED_LOOPS.values()]
    return "\n\n".join(
        [
            table(["", "runs", *names], rows),
            table(["nine of ten differ from runs like them by", "runs", *CLOSED_LOOPS.values()], _disagreement(result)),
            table(["what was fitted", "a step", "a token", "a request", "prompts", "reading KV"], _overheads(ways)),
            folded("By GPU, model, precision, TP and clients, with both", table(columns, by_setting)),
            folded("Measured less predicted by clients, prompts of 200 tokens, medians", _residuals(ways)),
        ]
    )


def _disagreement(result: Mapping[str, Any]) -> list[list[object]]:
    texts = {
        "repeated": "the same run twice, as measured",
        "fitted": "other lengths of answers only, with both: fitted",
        "left out": "other lengths of answers only, with both: left out",
    }
    return [
        [texts[part], of["runs"], *("" if of[key] is None else f"{of[key]:.1%}" for key in CLOSED_LOOPS)]
        for part, of in result["disagreement"].items()
    ]


def _loop_error(of: Mapping[str, float]) -> str:
    return f"{of['median']:+.0%} ({of['nine_of_ten']:.0%}), {of['within']:.0%} within"


def _overheads(ways: Mapping[str, Any]) -> list[list[object]]:
    return [
        [
            way,
            f"{of['step_s'] * 1e3:.2f} ms",
            f"{of['token_s'] * 1e6:.0f} us",
            f"{of['request_s'] * 1e3:.2f} ms",
            f"x {of['prefill']:.2f}",
            f"x {of['attention']:.2f}",
        ]
        for way, found in ways.items()
        for of in [found["overheads"]]
    ]


def _residuals(ways: Mapping[str, Any]) -> str:
    rows = [
        [row["clients"], row["runs"]]
        + [
            f"{found['residuals'][at][f'{key}_ms']:+.1f}"
            for key in ("ttft_mean", "itl_mean")
            for found in ways.values()
        ]
        for at, row in enumerate(ways["as in the file"]["residuals"])
    ]
    columns = [f"{text} ms, {way}" for text in ("TTFT", "between tokens") for way in ways]
    return table(["clients", "runs", *columns], rows)


def coverage(result: Mapping[str, Any]) -> str:
    """By quantity, and what the load had said of the machine."""
    covered, load = result["coverage"], result["profile"]["load"]
    rows = [
        [
            name,
            *(f"{100 * figures[key]:.0f}" for key in ("inside", "below", "above", "width")),
            f"{figures['off']:+.0%}",
        ]
        for name, figures in covered.items()
        if name != "all"
    ]
    times = "; ".join(
        f"{name} {load[name]['alone']:.2f} times the probes' alone, {load[name]['beside']:.2f} beside the other phase, "
        f"{load[name].get('more_s', 0.0) * 1e3:.2f} ms more, "
        f"bias {load[name]['bias']:.1%}, swing {load[name]['swing']:.1%}"
        for name in ("prefill", "decode")
    )
    cases = result["cases"]
    failed = sum(case["failed"] for case in cases)
    inside = f"{len(cases)} cases, {covered['all']['inside']:.0%} of all figures inside; {failed} requests failed."
    if again := result.get("predicted_again"):
        earlier = again["earlier"]["all"]["inside"]
        inside += f" Predicted again by commit {again['commit']}; before they were served, {earlier:.0%} was inside."
    return "\n\n".join(
        [
            f"{inside} Under load, in {len(load['runs'])} runs: {times}.",
            table(["", "inside %", "below %", "above %", "median width %", "median off by"], rows),
        ]
    )


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
            f"Not as wanted: {'; '.join(broken)}." if broken else "All as wanted.",
            folded(
                "Where the time went, mean of each phase, ms",
                table(["of the knee", *(name.replace("_", " ") for name in names)], phases),
            ),
        ]
    )


def _against(predicted: float, measured: Sequence[float], digits: int) -> str:
    return f"{predicted:.{digits}f}: {'/'.join(f'{value:.{digits}f}' for value in measured)}"


def paper_splitwise(result: Mapping[str, Any]) -> str:
    """Its claims for conversation; folded its known runs beside ours, every claim and why, and live."""
    rows = result["given_rows"]
    same = sum(row["slo_met"][0] == row["slo_met"][1] for row in rows)
    near = sum(row["largest_difference"] < 0.003 for row in rows)
    known = [
        [f"{name} {_counts(row)}", row["splitwise"], f"{row['published']:g}", f"{row['table']:g}"]
        for name, row in result["given_rates_code"].items()
    ]
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
    ways = ["drawn, published / table", "real timestamps, published / table", "live policies, table"]
    return "\n\n".join(
        [
            table(["conversation", "paper", "here, published", "here, table"], said),
            folded(
                "Its known runs, and the largest rate of code at equal power on a grid of 10 requests/s",
                f"Of its {len(rows)} known runs, {same} have the same verdict here, and {near} agree within 0.3% in "
                "every percentile of TTFT, TBT and E2E.",
                table(["design", "Splitwise", "here, published", "here, table"], known),
            ),
            folded(
                "Each claim, and why", table(head, claimed), "\n".join(f"- {reason}" for reason in result["reasons"])
            ),
            folded(
                "The largest rate of its mixes at equal power, drawn, at real times, and live",
                table(["trace", "design", *ways], list(_other_ways(result))),
            ),
        ]
    )


def _counts(row: Mapping[str, Any]) -> str:
    prompt, token = row["machines"]
    return f"({prompt},{token})" if token else f"({prompt})"


def _other_ways(result: Mapping[str, Any]) -> Iterator[list[object]]:
    for name, rules in result["traces"].items():
        for design, row in rules["table"]["its_mixes_iso_power"].items():
            drawn = [rules[rule]["its_mixes_iso_power"][design]["rate"] for rule in ("published", "table")]
            replay = [result["replay"][name][rule][design]["rate"] for rule in ("published", "table")]
            both = [f"{rates[0]:g} / {rates[1]:g}" for rates in (drawn, replay)]
            yield [name, f"{design} {_counts(row)}", *both, f"{result['live'][name][design]['rate']:g}"]


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
    pairs = ["best pair", "best colocated, same profile"]
    return "\n\n".join(
        [
            table(["goodput per GPU", "published", "its rules, a burst", "long run"], [*figures, *gains]),
            folded(
                "Its runs: both met %, P90 of TTFT and TPOT ms",
                table(["run", its, "its rules here", "live policies"], runs),
            ),
            folded(
                "Its searches and placements, per GPU",
                table(["search", its, "its rules here", "configurations alike", "best pair, long run"], searches),
                table(
                    ["placement", "published prefill, decode (tp, pp)", "Algorithm 1: prefill", "decode", *pairs],
                    placements,
                ),
            ),
            folded(
                "Goodput per GPU by the number of requests: known, here",
                table(["placement", *counts, "its rules, long run", "live policies, long run"], bursts),
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


def newcomer(result: Mapping[str, Any]) -> str:
    steps = list(result["steps_s"].items())
    last = next(i for i, (name, _) in enumerate(steps) if name.startswith("kvrelay up"))
    ready_s = sum(seconds for _, seconds in steps[: last + 1])
    rows = [[name, seconds, sum(s for _, s in steps[: i + 1])] for i, (name, seconds) in enumerate(steps[: last + 1])]
    rows += [[name, seconds, ready_s + seconds] for name, seconds in steps[last + 1 :]]
    return table(["step", "seconds", "from nothing"], [[name, f"{s:.1f}", f"{whole:.0f}"] for name, s, whole in rows])


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


def simulator(result: Mapping[str, Any]) -> str:
    """By size of the cluster; what is beside other simulators is drawn."""
    rows = [[row["case"], f"{row['requests_per_cpu_s']:,}", row.get("uncompiled", "-")] for row in result["growth"]]
    return table(["under the live policies", "requests a CPU second", "not compiled"], rows)


ACCURACY = {
    "relative_error_median": "relative error of logits, median",
    "relative_error_p99": "the same, P99",
    "same_likeliest": "share of positions with the same likeliest token",
    "kl_mean_nats": "KL divergence, mean, nats",
    "nll_increase_nats": "loss, more by, nats",
}


def kv_fp8(result: Mapping[str, Any]) -> str:
    sides = (result["fp8_against_bfloat16"], result["bfloat16_against_float32"])
    rows = [[text, *(cell(side[name]) for side in sides)] for name, text in ACCURACY.items()]
    rows.append(["bytes of KV a token", *(f"{result['kv_bytes'][name]:,.0f}" for name in ("fp8", "bfloat16"))])
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
    shown = [row for row in rows if row[0] in SHOWN_BOUNDS]
    others = table(columns, [row for row in rows if row not in shown])
    told = (
        f"{result['faults']:,} faults in {result['duration_s'] / 60:.0f} minutes. Requests: {ended}. {verdict} Most "
        f"that a process grew while it lived: {growth}."
    )
    return "\n\n".join([table(columns, shown), folded(f"{len(rows) - len(shown)} more bounds", others), told])


def protocol(result: Mapping[str, Any]) -> str:
    """How many settings are exhausted; each is folded."""
    settings = result["settings"]
    kinds = {
        "exhausted": [row for row in settings.values() if row.get("left") == 0],
        "bounded": [row for row in settings.values() if row.get("left")],
        "broken": [row for row in settings.values() if "left" not in row],
    }
    sums = ("states", "histories", "left", "walks", "seconds")
    totals = [
        [name, len(rows), *(f"{sum(row.get(key, 0) for row in rows):,.0f}" for key in sums)]
        for name, rows in kinds.items()
        if rows
    ]
    columns = ("states", "histories", "left", "turns", "walks", "seconds")
    rows = [
        [f"{name} ({row['commit']})" if "commit" in row else name, *(row.get(c, "broken") for c in columns)]
        for name, row in settings.items()
    ]
    every = folded(f"All {len(rows)} settings", table(["setting", *columns], rows))
    return f"{table(['', 'settings', *sums], totals)}\n\n{every}"


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


def structured(result: Mapping[str, Any]) -> str:
    served, libraries = result["served"], result["libraries"]
    outcomes = ", ".join(f"{count:,} {how}" for how, count in served["outcomes"].items())
    told = (
        f"{outcomes}; workers killed {served['kills']} times, {served['computed_again']} answers computed again, "
        f"{served['with_the_same_tokens']} of them with the same tokens as without a loss."
    )
    steps = [[batch, row["without_ms"], row["with_ms"], spread(row["ratio"])] for batch, row in result["cost"].items()]
    beside = [
        [
            name,
            f"{of['kept']:,} of {of['schemas']:,}",
            f"{of['answers_taken']:,}",
            f"{of['grammar_ms']['p50']:.1f} / {of['grammar_ms']['p99']:.1f}",
            f"{1e3 * of['mask_ms']['p50']:.1f} / {1e3 * of['mask_ms']['p99']:.0f}",
        ]
        for name, of in libraries.items()
    ]
    columns = ["library", "schemas kept", "answers taken", "a grammar, ms", "what may follow a token, us"]
    return "\n\n".join(
        [
            told,
            table(["batch", "step, ms", "with a form", "speed of the latter"], steps),
            folded("Both libraries, the same schemas and answers, P50 / P99", table(columns, beside)),
        ]
    )


def speculation(result: Mapping[str, Any]) -> str:
    names = list(result["rows"][0]["ways"])
    rows = []
    for row in result["rows"]:
        cells = [f"{row['ways'][names[0]]['tokens_per_s']:.0f}"]
        for way in (row["ways"][name] for name in names[1:]):
            share = "" if way["accepted_share"] is None else f"; {way['drafted']}, {way['accepted_share']:.0%}"
            cells.append(f"{spread(way['ratio'])}{share}")
        rows.append([f"{row['temperature']:g}", row["batch"], *cells])
    columns = ["temperature", "batch", "tokens/s without", *(f"{name}; guesses, right" for name in names[1:])]
    return f"{table(columns, rows)}\n\nBatches with other tokens than without: {result['answers_that_differ']}."


def speed_rows(times: Mapping[str, Mapping[str, Any]], one: str, other: str) -> list[list[str]]:
    """Of bench.engine.compared, by step."""
    return [[step, f"{t[f'{one}_ms']:.1f}", f"{t[f'{other}_ms']:.1f}", spread(t["speed"])] for step, t in times.items()]


def int8(result: Mapping[str, Any]) -> str:
    parts = []
    for name, of in result["models"].items():
        speeds = speed_rows(of["times"], "bfloat16", "int8")
        against = (of["int8_against_bfloat16"], of["bfloat16_against_float32"])
        errors = [
            ["relative error of logits, median", *(f"{100 * side['relative_error_median']:.1f}%" for side in against)],
            ["positions with the same likeliest token", *(f"{side['same_likeliest']:.0%}" for side in against)],
            ["KL divergence, mean, nats", *(cell(side["kl_mean_nats"]) for side in against)],
        ]
        ratio = (
            of["perplexity"]["int8"] / of["perplexity"]["bfloat16"],
            of["perplexity"]["bfloat16"] / of["perplexity"]["float32"],
        )
        errors.append(["perplexity, a multiple of", *(f"{value:.4f}" for value in ratio)])
        weights = of["weight_mb"]
        parts += [
            f"{name}, {weights['int8']:.0f} MB of weights instead of {weights['bfloat16']:.0f}:",
            table(["step", "bfloat16, ms", "int8, ms", "speed"], speeds),
            folded("Accuracy", table(["", "int8 beside bfloat16", "bfloat16 beside float32"], errors)),
        ]
    return "\n\n".join(parts)


def adapters(result: Mapping[str, Any]) -> str:
    parts = []
    for kind, of in result["kinds"].items():
        rows = [
            [
                step,
                f"{t['alone_ms']:.1f}",
                f"{t['each its own_ms']:.1f}",
                spread(t["each its own_speed"]),
                f"{t['all the same_ms']:.1f}",
                spread(t["all the same_speed"]),
            ]
            for step, t in of["times"].items()
        ]
        heads = ["step", "alone, ms", "each row its own, ms", "speed", "all rows one, ms", "speed"]
        parts += [f"{kind}, {of['adapter_mb']:g} MB each:", table(heads, rows)]
    return "\n\n".join(parts)


def states(result: Mapping[str, Any]) -> str:
    parts = []
    for kind, of in result["kinds"].items():
        rows = speed_rows(of["times"], "generate", "kvrelay")
        page = f"{of['page_kv_mb']:g} MB of KV and {of['page_state_mb']:g} MB of states"
        parts += [
            f"{kind}, {of['params_m']:g}M parameters, pages of {of['page_tokens']:,} tokens, {page}:",
            table(["step", "transformers, ms", "kvrelay, ms", "speed"], rows),
        ]
    return "\n\n".join(parts)


def kv_int8(result: Mapping[str, Any]) -> str:
    rows = speed_rows(result["times"], "bfloat16", "int8")
    sides = (result["int8_against_bfloat16"], result["bfloat16_against_float32"])
    errors = [[text, *(cell(side[name]) for side in sides)] for name, text in ACCURACY.items()]
    errors.append(["bytes of KV a token", *(f"{result['kv_bytes'][name]:,.0f}" for name in ("int8", "bfloat16"))])
    return "\n\n".join(
        [
            table(["step", "pages in bfloat16, ms", "in int8, ms", "speed"], rows),
            f"{sides[0]['positions']:,} positions, {result['model']}:",
            table(["", "int8 against bfloat16", "bfloat16 against float32"], errors),
        ]
    )


def kept_kv(result: Mapping[str, Any]) -> str:
    columns = ("kept", "window, sinks, heavy: tokens", "values found", "pages relayed", "dropped", "kB relayed")
    rows = []
    for row in result["rows"]:
        kept = [row.get(f"kv_{key}_tokens", 0) for key in ("window", "sink", "heavy")]
        counts = [f"{row[key]:.1f}" for key in ("pages_moved", "pages_dropped")]
        share = f"{row['values_found']:.0%}"
        rows.append([row["policy"], slashed(kept), share, *counts, f"{row['bytes_moved'] / 1e3:.0f}"])
    asked = f"{result['requests']} prompts of {result['prompt_tokens']} tokens, pages of {result['page_size']}:"
    return f"{asked}\n\n{table(columns, rows)}"


def degrees(result: Mapping[str, Any]) -> str:
    by: dict[str, dict[tuple[str, bool], Mapping[str, Any]]] = {}
    for row in result["rows"]:
        by.setdefault(row["degrees"], {})[row["pages"], row["checksums"]] = row
    ways = [(pages, checked) for pages in ("consecutive", "scattered") for checked in (True, False)]
    columns = [f"{pages}, {'checked' if checked else 'unchecked'}" for pages, checked in ways]
    rows = [
        [pair, *(f"{found[way]['of_1_1']:.2f} ({found[way]['gbytes_per_s']:.1f})" for way in ways)]
        for pair, found in by.items()
    ]
    handoffs: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in result["handoffs"]:
        handoffs.setdefault(row["degrees"], {})[row["transport"]] = row
    transports = list(dict.fromkeys(row["transport"] for row in result["handoffs"]))
    whole = [[pair, *(_by_ranks(found[name]) for name in transports)] for pair, found in handoffs.items()]
    asked = f"{result['tokens']:,} tokens of {result['model']}"
    return (
        f"Handoffs of {asked}, GB/s (of each rank that sends, of each that receives):\n\n"
        f"{table(['degrees', *transports], whole)}\n\n"
        f"The copy alone, share of 1-1 (GB/s):\n\n{table(['degrees', *columns], rows)}"
    )


def _by_ranks(row: Mapping[str, Any]) -> str:
    return f"{row['gbytes_per_s']:.2f} ({row['by_sending_rank'][0]:.2f}, {row['by_receiving_rank']:.2f})"


def families(result: Mapping[str, Any]) -> str:
    by: dict[str, list[Mapping[str, str]]] = {verdict: [] for verdict in ("exact", "refused", "wrong", "not made")}
    for model in result["models"]:
        by[model["is"]].append(model)
    exact = ", ".join(f"`{model['model_type']}`" for model in by["exact"])
    reasons = [
        [f"`{model['model_type']}`", model["is"], model["why"]] for verdict in list(by)[1:] for model in by[verdict]
    ]
    return "\n\n".join(
        [
            f"By transformers {result['transformers']}. Exact, {len(by['exact'])}: {exact}.",
            folded(f"The {len(reasons)} others", table(["model type", "is", "why"], reasons)),
        ]
    )


def gpu_env(result: Mapping[str, Any]) -> str:
    columns = ("name", "capability", "multiprocessors", "memory_gib")
    return table(("GPU", *columns[1:]), [[gpu[key] for key in columns] for gpu in result["gpus"]])


def gpu_engine(result: Mapping[str, Any]) -> str:
    columns = ("what", "found", "wanted")
    return table(columns, [[row[key] for key in columns] for row in result["summary"]])


def gpu_peers(result: Mapping[str, Any]) -> str:
    return table(
        ("transformers", "", "ms"), [[r["peer"], f"{r['kind']} {r['size']}", f"{r['ms']:.1f}"] for r in result["rows"]]
    )


def gpu_transports(result: Mapping[str, Any]) -> str:
    columns = ("devices", "transport", "prompt_tokens", "pages", "gbytes_per_s", "share_of_plain_copy")
    rows = [[cell(row[key]) for key in columns] for row in result["bytes"]]
    return table([key.replace("_", " ") for key in columns], rows)


def gpu_cluster(result: Mapping[str, Any]) -> str:
    tokens, handed = result["tokens"], result["handoff"]
    rows = [
        ["greedy tokens of a request equal", f"{tokens['equal']} of {tokens['requests']}"],
        ["at a tie, wrong", f"{len(tokens['ties'])}, {len(tokens['wrong'])}"],
        [f"exposed of {handed['prompt_tokens']} tokens, ms", f"{handed['exposed_ms']:.2f}"],
        ["wanted, ms", f"{handed['wanted_exposed_ms']:g}"],
    ]
    return table(["two processes beside one engine", ""], rows)


def gpu_one_gpu(result: Mapping[str, Any]) -> str:
    rows = [
        [row["serving"], f"{row['rate']:g}", *(slashed(row[f"{key}_ms"]) for key in ("ttft", "tpot", "itl"))]
        for row in result["rows"]
    ]
    return table(["serving", "requests/s", *(f"{key} P50/P90/P99 ms" for key in ("TTFT", "TPOT", "ITL"))], rows)


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
    **by_cpu(arrangements=arrangements, coverage=coverage, engine=engine, peers=peers, verify_live=verify_live),
    "chaos": chaos,
    "closed_loops": closed_loops,
    "flood": flood,
    "e2e": e2e,
    "fairness": fairness,
    "accounts": accounts,
    "accounts_cost": accounts_cost,
    "fuzz": fuzz,
    "handoff": handoff,
    "paper_distserve": paper_distserve,
    "paper_splitwise": paper_splitwise,
    "placement_search": placement_search,
    "gpu_cluster": gpu_cluster,
    "gpu_engine": gpu_engine,
    "gpu_env": gpu_env,
    "gpu_one_gpu": gpu_one_gpu,
    "gpu_peers": gpu_peers,
    "gpu_transports": gpu_transports,
    "guards": guards,
    "growth": growth,
    "hybrids": hybrids,
    "kv_fp8": kv_fp8,
    "explain": explain,
    "moves": moves,
    "placements": placements,
    "replan": replan,
    "rolling": rolling,
    "models": models,
    "shift": shift,
    "structured": structured,
    "speculation": speculation,
    "speculation_heads": speculation,
    "int8": int8,
    "adapters": adapters,
    "states": states,
    "kept_kv": kept_kv,
    "degrees": degrees,
    "kv_int8": kv_int8,
    "families": families,
    "protocol": protocol,
    "roofline": roofline,
    "router": router,
    "http": http,
    "page": page,
    "clients": clients,
    "simulator": simulator,
    "startup": startup,
    "newcomer": newcomer,
    "static_batches": static_batches,
    "two_hosts": two_hosts,
    "verify_live_again": verify_live,
    "versions": two_versions,
    "versions_unused": versions,
}

if __name__ == "__main__":
    main()
