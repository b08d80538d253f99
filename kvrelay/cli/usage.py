"""`kvrelay usage`: what each key used of a cluster, and what that costs."""

from __future__ import annotations

import csv
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvrelay.cli.connection import Router, refusals
from kvrelay.cli.console import USAGE, CliError, JsonOption, exit_codes, print_json
from kvrelay.cli.groups import grouped

if TYPE_CHECKING:
    from kvrelay.client.usage import KeyUsage, Prices

HELP = """Say what each key used: requests, tokens of prompts, cached and generated, seconds of workers, and the cost.

Asks all routers of the cluster that are known here. An operator's token sees all keys, another one its own. Usage is
kept by the hour: hours that have a part in the time are counted whole. Costs come with `router.prices` of the spec.

Examples:

  kvrelay usage --since 1d

  kvrelay usage --since 2026-11-01 --until 2026-12-01 --by day --csv
"""
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
COLUMNS = {
    "requests": "requests",
    "prompt_tokens": "prompt",
    "cached_tokens": "cached",
    "generated_tokens": "generated",
    "prefill_s": "prefill, s",
    "handoff_s": "handoff, s",
    "decode_s": "decode, s",
}
GROUPS: dict[str, Callable[[KeyUsage], str]] = {
    "key": lambda used: used.key,
    "day": lambda used: f"{_utc(used.hour_s):%Y-%m-%d}",
    "hour": lambda used: f"{_utc(used.hour_s):%Y-%m-%dT%H:00Z}",
}
Since = Annotated[
    str, typer.Option(help="An age, such as 1d, 12h, 30m, by the clock here, or a time in UTC, such as 2026-11-01.")
]
Until = Annotated[str | None, typer.Option(help="Likewise. Default: no end.", show_default=False)]


def register(app: typer.Typer) -> None:
    app.command(help=HELP)(grouped(usage))


def usage(
    router: Router,
    since: Since = "1d",
    until: Until = None,
    by: Annotated[Literal["key", "day", "hour"], typer.Option(help="What a line is of.")] = "key",
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    as_json: JsonOption = False,
) -> None:
    with exit_codes(as_json, interrupted="it was not told"), refusals(as_json), ExitStack() as stack:
        if as_csv and as_json:
            raise CliError("give one of --csv and --json", USAGE)
        now_s = time.time()
        since_s = time_of(since, now_s, "since")
        until_s = time_of(until, now_s, "until") if until is not None else 0.0
        if until is not None and until_s <= since_s:
            raise CliError(f"--until is {until}, which is not after --since {since}; give a later one", USAGE)
        from kvrelay.client.usage import grouped_by, of_all

        clients = [stack.enter_context(router.client_of(each)) for each in router.endpoints()]
        told = [client.usage(since_s, until_s) for client in clients]
        _show(grouped_by(of_all(told), GROUPS[by]), by, told[-1].prices, as_csv=as_csv, as_json=as_json)


def time_of(text: str, now_s: float, flag: str) -> float:
    """Seconds since 1970. Raises CliError."""
    if age := re.fullmatch(r"(\d{1,9}(?:\.\d+)?)([smhdw])", text):
        return max(0.0, now_s - float(age[1]) * SECONDS[age[2]])
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise CliError(
            f"--{flag} is {text!r}; give an age such as 1d or 12h, or a time such as 2026-11-01", USAGE
        ) from None
    return max(0.0, (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp())


def _show(groups: Mapping[str, KeyUsage], by: str, prices: Prices | None, *, as_csv: bool, as_json: bool) -> None:
    rows = [{by: name, **_cells(used, prices)} for name, used in groups.items()]
    if as_json:
        print_json({"by": by, "currency": prices.currency if prices else None, "usage": rows})
    elif as_csv:
        cost = ["cost", "currency"] if prices else []
        writer = csv.DictWriter(sys.stdout, [by, *COLUMNS, *cost], lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, "currency": prices.currency} if prices else row for row in rows)
    else:
        _print_table(rows, by, prices)


def _cells(used: KeyUsage, prices: Prices | None) -> dict[str, Any]:
    cells = {name: getattr(used, name) for name in COLUMNS}
    cells |= {name: round(value, 6) for name, value in cells.items() if isinstance(value, float)}
    return cells | ({"cost": round(prices.cost(used), 6)} if prices else {})


def _print_table(rows: Sequence[Mapping[str, Any]], by: str, prices: Prices | None) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(by)
    for title in (*COLUMNS.values(), *([f"cost, {prices.currency}"] if prices else [])):
        table.add_column(title, justify="right")
    for row in rows:
        numbers = [f"{v:,.1f}" if name.endswith("_s") else f"{v:,}" for name, v in row.items() if name in COLUMNS]
        cost = [f"{row['cost']:,.4f}"] if prices else []
        table.add_row(*map(Text, [row[by] or "(no key)", *numbers, *cost]))
    console = Console()
    (console if console.is_terminal else Console(width=160)).print(table)


def _utc(seconds: int) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
