"""Beside other servers: at the rates that they keep, and their engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tables.shape import Tables, by_cpu, folded, noise, slashed, spread, table

PICTURES = {
    **by_cpu(
        arrangements="The P90s of TTFT and of TPOT over the request rate, of our arrangements and of other servers",
        engine="Tokens a second of prefill and decode, ours and others'",
        peers="Other servers' times over ours, with their least and most",
    ),
}


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


TABLES: Tables = {
    **by_cpu(arrangements=arrangements, engine=engine, peers=peers),
}
