"""Tables of a plan, for a person at a terminal. It computes nothing; kvrelay.plan.words has the sentences."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvrelay.plan import amounts, words
from placement.plan import KINDS, Goodput, Plan

MAX_ROWS = 8


def tables(plan: Plan) -> Iterator[RenderableType]:
    """The answer, the figures, what a request would see, the alternatives, advice."""
    yield Padding(Text(" ".join(words.answer(plan))), (1, 0, 1, 0))
    yield _figures(plan)
    yield _latency(plan)
    yield _alternatives(plan)
    if plan.refused:
        yield _refused(plan)
    yield Text(words.binding(plan))
    for sentence in (*plan.advice, *words.warnings(plan)):
        yield Text(f"- {sentence}")


def _table(title: str, *columns: str, first: int = 0) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, show_header=bool(columns))
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", min_width=first if not i else None, overflow="fold")
    return table


def _figures(plan: Plan) -> Table:
    chosen, at_rate = plan.chosen, plan.at_rate
    table = _table("The plan")
    table.add_column()
    table.add_column(justify="left")
    for pool in chosen.candidate.pools:
        kv = f"{pool.num_pages * pool.page_size:,} tokens of KV each"
        table.add_row(f"{pool.role.capitalize()} workers", f"{pool.replicas} x {pool.degrees}, {pool.hardware}, {kv}")
    unit = chosen.candidate.unit
    table.add_row(f"{unit[0].upper()}{unit[1:]}s", f"{chosen.candidate.gpus}")
    table.add_row("Goodput (requests/s)", amounts.between(chosen.goodput))
    table.add_row(f"Goodput per {unit} (requests/s)", amounts.num(chosen.per_gpu))
    if chosen.usd_per_hour:
        table.add_row("Cost (USD/hour)", f"{chosen.usd_per_hour:,.2f}")
    if chosen.watts:
        table.add_row("Power (kW)", amounts.num(chosen.watts / 1e3))
    table.add_row("Rate planned for (requests/s)", amounts.num(at_rate.rate))
    table.add_row("Requests that meet their targets", words.attained(plan))
    table.add_row("Binding", plan.binding)
    table.add_row("Headroom", amounts.percent(plan.headroom))
    return table


def _latency(plan: Plan) -> Table:
    table = _table(f"At {amounts.num(plan.at_rate.rate)} requests/s", "", "target", "P50", "P90", "P99", first=6)
    for name, target, cells in words.percentile_rows(plan):
        table.add_row(name, target, *cells)
    for name, met in plan.at_rate.by_class.items():
        table.add_row(f"class {name}", "", "", "", f"{amounts.percent(met)} meet both")
    return table


def _alternatives(plan: Plan) -> Table:
    unit = plan.chosen.candidate.unit
    table = _table("Placements", "", "placement", f"{unit}s", "goodput", f"per {unit}", "USD/hour")
    table.columns[1].justify = "left"
    table.columns[1].no_wrap = False
    shown = list(enumerate(plan.tried, start=1))
    best = [words.best_of(plan.tried, kind) for kind in KINDS]
    for rank, placement in shown:
        if rank <= MAX_ROWS or any(placement is kept for kept in best):
            table.add_row(*_row(rank, placement), style="bold" if placement.candidate == plan.chosen.candidate else "")
    if len(shown) > table.row_count:
        table.caption = f"{len(shown) - table.row_count} more in --json and --out"
        table.caption_justify = "left"
    return table


def _row(rank: int, placement: Goodput) -> tuple[str, ...]:
    none = f"0: {placement.limit}" if placement.limit else "0"
    goodput = words.goodput_of(placement) if placement.goodput.value else none
    label, gpus = placement.candidate.label, f"{placement.candidate.gpus}"
    cost = amounts.if_known(placement.usd_per_hour, f"{placement.usd_per_hour:,.2f}")
    return f"{rank}", label, gpus, goodput, amounts.num(placement.per_gpu), cost


def _refused(plan: Plan) -> Table:
    table = _table("Not tried")
    table.add_column()
    table.add_column(overflow="fold")
    for name, reason in plan.refused.items():
        table.add_row(name, reason)
    return table
