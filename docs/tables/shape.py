"""What the tables share: how a table, a ratio and a figure are written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

KINDS_OF_CPU = ("", "_amx", "_avx2", "_avx512_fp16", "_zen4")  # bench.common's
Tables = Mapping[str, Callable[[Mapping[str, Any]], str]]


def by_cpu(**of_each: Any) -> dict[str, Any]:
    """Of results that have a file for each kind of CPU."""
    return {name + kind: it for name, it in of_each.items() for kind in KINDS_OF_CPU}


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [columns, ["---"] + ["---:"] * (len(columns) - 1), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def folded(summary: str, *parts: str) -> str:
    return "\n\n".join([f"<details><summary>{summary}</summary>", *parts, "</details>"])


def slashed(values: Mapping[str, float] | Sequence[float]) -> str:
    numbers = values.values() if isinstance(values, Mapping) else values
    return "/".join(f"{number:.0f}" for number in numbers)


def spread(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.2f}x ({ratio['least']:.2f}, {ratio['most']:.2f})"


def noise(result: Mapping[str, Any]) -> str:
    return f"Rounds played again: {len(result['played_again'])}; not to be had clean: {len(result['not_clean'])}."


def cell(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def speed_rows(times: Mapping[str, Mapping[str, Any]], one: str, other: str) -> list[list[str]]:
    """Of bench.engine.compared, by step."""
    return [[step, f"{t[f'{one}_ms']:.1f}", f"{t[f'{other}_ms']:.1f}", spread(t["speed"])] for step, t in times.items()]


def long_run(found: Sequence[float]) -> str:
    return f"{found[0]:g} ({found[1]:g} to {found[2]:g})"
