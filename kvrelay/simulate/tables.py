"""What `kvrelay simulate` prints: who serves, then a column for each rate: latencies, phases, shares, counters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvrelay.simulate.simulation import Found, Question
from placement.plan import Interval, RatePoint

PERCENTILES = ("50", "90", "99")
LABEL_WIDTH, RATE_WIDTH = 28, 23
BUSY = {
    "prefill": "prefill busy",
    "decode": "decode busy",
    "colocated": "busy",
    "link": "links busy",
    "prefill_kv": "prefill KV held",
    "decode_kv": "decode KV held",
    "colocated_kv": "KV held",
}


def summary(found: Found, question: Question) -> Iterator[str]:
    """Who serves, and where the times come from."""
    how = f", {question.sharing.replace('_', ' ')}" if question.sharing else ""
    workers = " + ".join(
        f"{count} x {label} ({found.kv_tokens.get(label, 0):,} tokens of KV each)"
        for label, count in found.workers.items()
    )
    yield f"{workers}{how}"
    for source in found.sources:
        yield f"times: {source}, within {found.error:.0%} nine times in ten"
    targets = [f"{name} {_ms(limit)} ms" for name, limit in _targets(question) if math.isfinite(limit)]
    if targets:
        yield f"targets: {' and '.join(targets)} for {question.slo.attainment:.0%} of requests"


def _targets(question: Question) -> list[tuple[str, float]]:
    return [("TTFT", question.slo.ttft_s), ("TPOT", question.slo.tpot_s)]


def tables(found: Found, question: Question, width: int) -> Iterator[Table]:
    """A column for each rate, as many side by side as `width` characters hold."""
    fit = max(1, (width - LABEL_WIDTH) // RATE_WIDTH)
    for start in range(0, len(found.points), fit):
        yield _table(found, question, slice(start, start + fit))


def _table(found: Found, question: Question, shown: slice) -> Table:
    points = found.points[shown]
    counted = list(zip(found.counters[shown], found.counted[shown], strict=True))
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("requests/s")
    for point in points:
        table.add_column(f"{point.rate:g}", justify="right", no_wrap=True)
    _add_latencies(table, points, question)
    table.add_row("requests simulated", *(_requests(point) for point in points), end_section=True)
    for name in points[0].phases_s:
        table.add_row(f"{name.replace('_', ' ')}, mean ms", *(_ms(point.phases_s[name]) for point in points))
    table.rows[-1].end_section = True
    for key, label in BUSY.items():
        if key in points[0].busy:
            table.add_row(label, *(f"{point.busy[key]:.0%}" for point in points))
    table.rows[-1].end_section = True
    for name in sorted({name for counters, _ in counted for name in counters}):
        each = (f"{counters.get(name, 0) / requests:.3g}" for counters, requests in counted)
        table.add_row(f"{name.replace('_', ' ')}, a request", *each)
    if not all(point.is_settled for point in points):
        table.caption = "* not settled: the queue grows without end, or the limit of requests was hit"
        table.caption_justify = "left"
    return table


def _add_latencies(table: Table, points: Sequence[RatePoint], question: Question) -> None:
    """Values with their 90% intervals."""
    if any(math.isfinite(limit) for _, limit in _targets(question)):
        table.add_row("meet both targets", *(_share(point.attainment) for point in points))
    for at in PERCENTILES:
        table.add_row(f"TTFT P{at}, ms", *(_interval(point.ttft_s[at]) for point in points))
    for at in PERCENTILES:
        table.add_row(f"TPOT P{at}, ms", *(_interval(point.tpot_s[at]) for point in points))


def _requests(point: RatePoint) -> str:
    return f"{point.num_requests:,}" + ("" if point.is_settled else " *")


def _ms(seconds: float) -> str:
    ms = seconds * 1e3
    if not math.isfinite(ms):
        return "never"
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"


def _interval(found: Interval) -> str:
    return f"{_ms(found.value)} ({_ms(found.low)}-{_ms(found.high)})"


def _share(found: Interval) -> str:
    return f"{found.value:.1%} ({found.low:.0%}-{found.high:.0%})"
