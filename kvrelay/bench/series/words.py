"""Ratios and knees in words and in a terminal's tables."""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.table import Table

from kvrelay.bench.series.comparing import percentile_of

Row = Mapping[str, Any]


def spread(row: Row) -> str:
    return f"{row['ratio']:.2f}x ({row['least']:.2f} to {row['most']:.2f})"


def ratio_cells(name: str, row: Row) -> tuple[str, ...]:
    a, b = (f"{row[key]:.3f}" if name == "attainment" else f"{row[key]:.1f}" for key in ("a", "b"))
    return name, a, b, f"{row['ratio']:.3f}", f"{row['least']:.3f} to {row['most']:.3f}", row["better"]


def knee_words(found: Row, wanted: float) -> str:
    share = f"{100 * wanted:.4g}%"
    if found["where"] == "above":
        return f"{share} of requests meet the targets at {found['rate']:g} requests/s still; play higher rates"
    if found["where"] == "below":
        return f"at {found['rate']:g} requests/s fewer than {share} of requests meet the targets; play lower rates"
    return (
        f"{share} of requests meet the targets up to {found['rate']:.3g} requests/s "
        f"({found['low']:.3g} to {found['high']:.3g})"
    )


def series_tables(result: Mapping[str, Any]) -> Iterator[Table]:
    """Each server at each rate, all rounds together; then ratios. Servers are A and B: a terminal is narrow."""
    letters = letters_of(result)
    called = "; ".join(f"{letter} is {name}" for name, letter in letters.items())
    table = _table(f"Each server at each rate, all rounds together (ms); {called}")
    names = ("", "req/s", "sent", "failed", "TTFT P50", "P90", "TPOT P50", "P90", "tok/s", "met")
    for name in names:
        table.add_column(name, justify="left" if not name else "right")
    for (side, rate), turns in _grouped(result).items():
        table.add_row(letters[side], f"{float(rate):g}", *_cells(turns))
    yield table
    for each in result.get("compared", ()):
        yield _ratios(result, each)


def letters_of(result: Mapping[str, Any]) -> dict[str, str]:
    """Of each side."""
    names = [side["name"] for side in result["sides"]]
    return dict(zip(names, string.ascii_uppercase, strict=False))


def _grouped(result: Mapping[str, Any]) -> dict[tuple[str, Any], list[Row]]:
    groups: dict[tuple[str, Any], list[Row]] = {}
    letters = letters_of(result)
    for turn in sorted(result["turns"], key=lambda turn: (float(turn["rate"]), letters[turn["side"]])):
        groups.setdefault((turn["side"], turn["rate"]), []).append(turn)
    return groups


def _cells(turns: list[Row]) -> Iterator[str]:
    requests = sum(turn["requests"] for turn in turns)
    yield str(requests)
    yield str(sum(turn["failed"] for turn in turns))
    for metric in ("ttft", "tpot"):
        for p in (50, 90):
            yield f"{percentile_of(turns, metric, p):.1f}"
    yield f"{sum(turn['output_throughput'] for turn in turns) / len(turns):.1f}"
    met = [turn["attainment"] * turn["requests"] for turn in turns if "attainment" in turn]
    yield f"{sum(met) / requests:.1%}" if met else "-"


def _ratios(result: Mapping[str, Any], each: Row) -> Table:
    table = _table(f"At {float(each['rate']):g} requests/s: B over A, round by round")
    for name in ("", *letters_of(result).values(), "ratio", "least to most", "better is"):
        table.add_column(name, justify="left" if not name else "right")
    for name, row in each["figures"].items():
        table.add_row(*ratio_cells(name, row))
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
