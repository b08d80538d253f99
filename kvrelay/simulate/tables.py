"""What `kvrelay simulate` prints: who serves, then a column for each rate: latencies, phases, shares, counters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvrelay.plan.amounts import is_known
from kvrelay.simulate.simulation import Sweep, SweepResult
from placement.plan import Interval, RatePoint

PERCENTILES = ("50", "90", "99")
LABEL_WIDTH, RATE_WIDTH = 28, 23
BUSY = {
    "prefill": "prefill busy",
    "decode": "decode busy",
    "mixed": "mixed busy",
    "link": "links busy",
    "prefill_kv": "prefill KV held",
    "decode_kv": "decode KV held",
    "mixed_kv": "mixed KV held",
}


def summary(result: SweepResult, sweep: Sweep) -> Iterator[str]:
    """Who serves, and where the times come from."""
    workers = " + ".join(
        f"{count} x {label} ({result.kv_tokens.get(label, 0):,} tokens of KV each)"
        for label, count in result.workers.items()
    )
    yield workers
    for source in result.sources:
        yield f"times: {source}, within {result.error:.0%} nine times in ten"
    targets = [f"{name} {_ms(limit)} ms" for name, limit in _targets(sweep) if math.isfinite(limit)]
    if targets:
        yield f"targets: {' and '.join(targets)} for {100 * sweep.slo.attainment:.4g}% of requests"


def _targets(sweep: Sweep) -> list[tuple[str, float]]:
    return [("TTFT", sweep.slo.ttft_s), ("TPOT", sweep.slo.tpot_s)]


def tables(result: SweepResult, sweep: Sweep, width: int) -> Iterator[Table]:
    """A column for each rate, as many side by side as `width` characters hold."""
    fit = max(1, (width - LABEL_WIDTH) // RATE_WIDTH)
    for start in range(0, len(result.points), fit):
        yield _table(result, sweep, slice(start, start + fit))


def _table(result: SweepResult, sweep: Sweep, shown: slice) -> Table:
    points = result.points[shown]
    counted = list(zip(result.counters[shown], result.counted[shown], strict=True))
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("requests/s")
    for point in points:
        table.add_column(f"{point.rate:g}", justify="right", no_wrap=True)
    if result.clients:
        table.add_row("clients", *map(str, result.clients[shown]), end_section=True)
    _add_latencies(table, points, sweep)
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


def _add_latencies(table: Table, points: Sequence[RatePoint], sweep: Sweep) -> None:
    """Values with their 90% intervals."""
    if any(math.isfinite(limit) for _, limit in _targets(sweep)):
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


def _interval(interval: Interval) -> str:
    is_open = interval.low == 0 and math.isinf(interval.high)  # too few requests to tell
    return f"{_ms(interval.value)} ({'not known' if is_open else f'{_ms(interval.low)}-{_ms(interval.high)}'})"


def _share(interval: Interval) -> str:
    between = f"{interval.low:.0%}-{interval.high:.0%}" if is_known(interval) else "not known"
    return f"{interval.value:.1%} ({between})"
