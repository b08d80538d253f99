"""What breaks, and how soon it is whole again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tables.shape import Tables, folded, table

PICTURES = {
    "chaos": "The longest time of each fault as a share of its bound: all are below 1",
    "protocol": "States looked at in each setting, exhausted or bounded",
    "two_hosts": "Seconds until a stream failed, a request was refused and it served again, for both cuts",
}
SHOWN_BOUNDS = (  # of chaos; the others are folded
    *("worker-killed", "worker-stopped", "rank-killed", "router-killed", "router-stopped"),
    *("engine-failed", "engine-hung", "pair-cut", "link-reset", "segment"),
)
CHAOS_TIMES = ("noticed", "next_token", "pages")


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


def _times(cells: Sequence[Mapping[str, Any]], what: str) -> str:
    """The worst of the cells' P50, P99 and longest, and their bound."""
    measured = [cell[what] for cell in cells if cell[what]["max"] is not None]
    if not measured:
        return "-"
    worst = [max(figures[key] for figures in measured) for key in ("p50", "p99", "max")]
    bounds = {figures["bound"] for figures in measured} - {None}
    return f"{'/'.join(f'{time_s:.2f}' for time_s in worst)} of {max(bounds):.2f}" if bounds else "-"


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


TABLES: Tables = {
    "chaos": chaos,
    "protocol": protocol,
    "two_hosts": two_hosts,
}
