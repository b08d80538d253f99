"""`python docs/fill_reliability.py`: writes the table of bounds in docs/reliability.md from kvrelay/chaos/bounds.py."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from kvrelay.chaos.bounds import BOUNDS, MEASURES

PAGE = Path(__file__).resolve().parent / "reliability.md"
HEAD = ("fault", "in", "noticed", "next token", "pages free", "how, and what the client sees")


def main() -> None:
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def filled(page: str) -> str:
    for heading, rows in {"Bounds": bounds(), "Measures": measures()}.items():
        pattern = re.compile(rf"(^##+ {heading}\n.*?)^\|.*?(?=^[^|]|\Z)", re.MULTILINE | re.DOTALL)
        assert pattern.search(page), f"docs/reliability.md has no table under {heading}"
        page = pattern.sub(lambda found, rows=rows: found[1] + rows, page, count=1)  # type: ignore[misc]
    return page


def bounds() -> str:
    rows = [(b.what, b.phases, shown(b.noticed), shown(b.next_token), shown(b.pages), b.how) for b in BOUNDS]
    return table(HEAD, rows)


def measures() -> str:
    return table(("name", "meaning"), [(f"`{name}`", meaning) for name, meaning in MEASURES.items()])


def shown(time: str) -> str:
    return f"`{time}`" if time else "-"


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
