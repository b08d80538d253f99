"""Findings as a table for a person."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from rich import box
from rich.table import Table

from kvrelay.doctor.finding import VERDICTS, Finding

COLOURS = {"good": "green", "doubtful": "yellow", "bad": "bold red", "unknown": "dim"}
MOST_ALIKE = 12  # good ones of a part that are shown one by one


def findings_table(findings: Iterable[Finding]) -> Table:
    """In their order, what is alike and good made short."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("part", "check", "verdict", "found", "mend"):
        table.add_column(column, no_wrap=column in ("part", "verdict"), overflow="fold")
    for part, group in groupby(findings, key=lambda finding: finding.part):
        for number, finding in enumerate(_shortened(list(group))):
            verdict = f"[{COLOURS[finding.verdict]}]{finding.verdict}[/]"
            table.add_row("" if number else part, finding.name, verdict, *map(_plain, (finding.found, finding.mend)))
    return table


def _plain(text: str) -> str:
    return text.replace("[", r"\[")


def _shortened(findings: Sequence[Finding]) -> Iterator[Finding]:
    good = [finding for finding in findings if finding.verdict == "good"]
    if len(good) <= MOST_ALIKE:
        yield from findings
        return
    yield from (finding for finding in findings if finding.verdict != "good")
    yield Finding(part=good[0].part, name=f"{len(good)} others", verdict="good", found="each with --json")


def summary(findings: Sequence[Finding]) -> str:
    counts = {verdict: sum(finding.verdict == verdict for finding in findings) for verdict in VERDICTS}
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count) or "nothing was checked"
