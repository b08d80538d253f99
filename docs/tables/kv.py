"""KV: how it is relayed, and what is lost where it is kept in fewer bits or pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tables.shape import Tables, cell, folded, slashed, speed_rows, table

PICTURES = {
    "handoff": "The exposed part of handoffs with and without prefill, and GB/s of each transport by size",
    "kv_fp8": "Errors of fp8 pages beside those of bfloat16",
}
HIDDEN = ("prefill_ms", "handoff_alone_ms", "exposed_ms")
BASES = {"shared_memory": "memcpy", "tcp": "raw_tcp"}
ACCURACY = {
    "relative_error_median": "relative error of logits, median",
    "relative_error_p99": "the same, P99",
    "same_likeliest": "share of positions with the same likeliest token",
    "kl_mean_nats": "KL divergence, mean, nats",
    "nll_increase_nats": "loss, more by, nats",
}


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


def _share(speeds: Mapping[str, float], way: str) -> str:
    base = BASES.get(way.partition("/")[0], "raw_gloo")
    return f"{speeds[way]:.1f}, {speeds[way] / speeds[base]:.0%}"


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


def kv_fp8(result: Mapping[str, Any]) -> str:
    sides = (result["fp8_against_bfloat16"], result["bfloat16_against_float32"])
    rows = [[text, *(cell(side[name]) for side in sides)] for name, text in ACCURACY.items()]
    rows.append(["bytes of KV a token", *(f"{result['kv_bytes'][name]:,.0f}" for name in ("fp8", "bfloat16"))])
    of = f"{sides[0]['positions']:,} positions of {result['prompts']} prompts, {result['model']}"
    note = ", random weights: a rehearsal of how it is measured" if result["is_rehearsal"] else ""
    return f"{of}{note}.\n\n{table(['', 'fp8 against bfloat16', 'bfloat16 against float32'], rows)}"


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


TABLES: Tables = {
    "handoff": handoff,
    "kv_fp8": kv_fp8,
    "kept_kv": kept_kv,
    "degrees": degrees,
    "kv_int8": kv_int8,
}
