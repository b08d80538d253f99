"""Draws where the time of one request went: a line for each span, its place in the whole, and its details beneath."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvrelay.client.types import ExplainedRequest, Span

WIDTH = 32  # of the bars, in characters
MOST_DETAILS = 12  # of a span, the longest; --json has all


def waterfall(told: ExplainedRequest) -> Group:
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("what", "where"):
        table.add_column(column, no_wrap=True)
    for column in ("from, ms", "ms"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, min_width=WIDTH)
    table.add_column("why", overflow="fold")
    for span, depth in _rows(told.spans):
        name = f"{'  ' * depth}{span.name.replace('_', ' ')}{f' #{span.attempt}' if span.attempt > 1 else ''}"
        took = f"{1e3 * (span.end_s - span.begin_s):.2f}"
        bar = bar_of(span, told.e2e_s, "░" if depth else "█")
        cells = name, span.worker, f"{1e3 * span.begin_s:.2f}", took, bar, span.words
        table.add_row(*map(Text, cells), style="dim" * bool(depth))
    return Group(Text(heading(told)), table)


def heading(told: ExplainedRequest) -> str:
    parts = [f"{told.request_id}{f' choice {told.choice}' if told.choice else ''}: {told.state}"]
    parts += [f"TTFT {1e3 * told.ttft_s:.1f} ms"] if told.ttft_s else ["no first token"]
    parts += [f"TPOT {1e3 * told.tpot_s:.2f} ms"] if told.tpot_s else []
    parts += [f"E2E {1e3 * told.e2e_s:.1f} ms", f"{told.prompt_tokens} tokens ({told.cached_tokens} cached)"]
    parts += [f"{told.output_tokens} answered"]
    parts += [f"{told.attempts} attempts"] * (told.attempts > 1) + [f"{told.moves} moves"] * (told.moves > 0)
    return ", ".join(parts) + f"\n{told.why}"


def _rows(spans: tuple[Span, ...]) -> Iterator[tuple[Span, int]]:
    for span in spans:
        yield span, 0
        longest = sorted(span.details, key=lambda each: each.begin_s - each.end_s)[:MOST_DETAILS]
        for detail in sorted(longest, key=lambda each: each.begin_s):
            yield detail, 1


def bar_of(span: Span, e2e_s: float, mark: str) -> str:
    """At least one mark, where it began."""
    scale = WIDTH / e2e_s if e2e_s else 0.0
    begin = min(WIDTH - 1, int(span.begin_s * scale))
    length = max(1, min(WIDTH - begin, round((span.end_s - span.begin_s) * scale)))
    return " " * begin + mark * length
