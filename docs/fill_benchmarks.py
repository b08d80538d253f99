"""`python docs/fill_benchmarks.py`: writes the tables of docs/benchmarks.md from bench/results/*.json, no more.

Each stands between `<!-- NAME -->` and `<!-- /NAME -->`, with the result's picture above (`python -m bench.plots` draws
those); docs/tables/ makes it. A result that is not there leaves a sentence that says so. What is long is folded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tables.registry import PICTURES, TABLES

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "bench" / "results"


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


def heading(result: Mapping[str, Any]) -> str:
    machine = result.get("machine", {})
    parts = [f"{machine['cores']} cores of {machine['cpu']}"] if machine else []
    parts += [f"commit {result['commit']}"] if result.get("commit") else []
    if result.get("has_uncommitted_changes"):
        parts[-1] += " with changes"
    return f"*{', '.join(parts) or 'Measured'}.*"


if __name__ == "__main__":
    main()
