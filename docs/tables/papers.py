"""Splitwise's and DistServe's own results, run again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tables.shape import Tables, folded, long_run, table

PICTURES = {
    "paper_distserve": "Goodput per GPU: published, of a burst, and in the long run",
    "paper_splitwise": "Requests a second of Splitwise's mixes, by the published rule, by the table, and live",
}


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
            long_run(found),
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
        + [long_run(found) for found in row["long_run_per_gpu"].values()]
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


def _gain(rates: Mapping[str, float]) -> str:
    return f"{rates['DistServe'] / rates['vLLM']:.2f}" if rates.get("vLLM") else "vLLM keeps the targets at no rate"


TABLES: Tables = {
    "paper_distserve": paper_distserve,
    "paper_splitwise": paper_splitwise,
}
