"""`kvrelay status`: asks a router what it knows of itself and of the workers, and shows it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any

import typer

from kvrelay import known_clusters
from kvrelay.cli.connection import Entrance
from kvrelay.cli.console import ENDPOINT_VARIABLE, FAILURE, CliError, JsonOption, print_json, report
from kvrelay.cli.groups import grouped
from kvrelay.client.client import DEFAULT_ENDPOINT

TIMEOUT_S = 5.0
PIPED_WIDTH = 160  # columns; a program or a file cuts nothing

LATE_S = 1.0  # a step or an event loop that is later is told

HELP = """Show what a router knows: its requests, every worker's state, queue and pages, and what is wrong and why.

Without --endpoint it asks the routers of the clusters that were started from here. Exit code 1: one did not answer.

Examples:

  kvrelay status

  kvrelay status --endpoint 10.0.0.5:50051 --json

  kvrelay status --watch 2
"""


def register(app: typer.Typer) -> None:
    app.command(help=HELP)(grouped(status))


def status(
    entrance: Entrance,
    endpoint: Annotated[str | None, typer.Option(envvar=ENDPOINT_VARIABLE, help="host:port of a router.")] = None,
    as_json: JsonOption = False,
    watch: Annotated[float | None, typer.Option(min=0.1, help="Show it again every so many seconds.")] = None,
) -> None:
    while watch is not None:
        try:
            _show_all(entrance, endpoint, as_json, is_again=True)
        except CliError as error:  # it may be back at the next look
            report(error, as_json)
        except typer.Exit:
            pass
        time.sleep(watch)
    _show_all(entrance, endpoint, as_json)


def _show_all(entrance: Entrance, endpoint: str | None, as_json: bool, *, is_again: bool = False) -> None:
    """One that does not answer hides no other. Raises CliError for it, or has told of it as JSON and raises Exit."""
    told = [_answer(where, entrance) for where in ([endpoint] if endpoint else _endpoints())]
    failed = [answer["error"] for answer in told if "error" in answer]
    if failed and len(told) == 1:
        raise CliError(failed[0])
    if as_json:
        print_json(told[0] if len(told) == 1 else {"routers": told})
        if failed:
            raise typer.Exit(FAILURE)
        return
    if is_again and sys.stdout.isatty():
        print("\033[2J\033[H", end="")
    for answer in told:
        if "error" not in answer:
            _show(answer)
    if failed:
        raise CliError("\n".join(failed))


def _answer(endpoint: str, entrance: Entrance) -> dict[str, Any]:
    try:
        return _ask(endpoint, entrance)
    except CliError as error:
        return {"endpoint": endpoint, "error": str(error)}


def _endpoints() -> list[str]:
    return [where for cluster in known_clusters.alive() for where in cluster.endpoints] or [DEFAULT_ENDPOINT]


def _ask(endpoint: str, entrance: Entrance) -> dict[str, Any]:
    from kvrelay.client.types import KvrelayError

    try:
        with entrance.client_of(endpoint) as client:
            status = client.status(timeout_s=TIMEOUT_S)
    except KvrelayError as error:
        is_nobody = error.message.startswith("nothing answers")
        why = "nothing answers; is the cluster up? (kvrelay up)" if is_nobody else error.message
        raise CliError(f"no status from {endpoint}: {why}") from None
    return {"endpoint": endpoint, **asdict(status)}


def _name(worker: dict[str, Any]) -> str:
    """With its degrees, where it runs in several processes."""
    keys = (("TP", "tensor_parallel"), ("PP", "pipeline_parallel"))
    degrees = [f"{short} {worker['limits'][key]}" for short, key in keys if worker["limits"].get(key, "1") != "1"]
    return f"{worker['name']} ({' x '.join(degrees)})" if degrees else str(worker["name"])


def _models(answer: dict[str, Any]) -> str:
    return ", ".join(answer["models"]) if answer["models"][1:] else answer["model"] or "no model yet"


def _show(answer: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    heading = (
        f"{answer['router_id']} at {answer['endpoint']}: {_models(answer)}, up "
        f"{answer['uptime_s']:.0f} s, {answer['num_queued']} queued, {answer['num_in_flight']} in flight"
    )
    table = Table(title=heading, title_justify="left", box=box.SIMPLE_HEAD)
    several = answer["models"][1:]
    for column in ("worker", *(["model"] if several else []), "role", "state", "address"):
        table.add_column(column, no_wrap=True)
    for column in ("wait", "run", "free", "cached", "leased", "fenced", "out", "all", "lost"):
        table.add_column(column, justify="right", no_wrap=True)
    for worker in answer["workers"]:
        numbers = [worker["num_waiting"], worker["num_running"], worker["available_pages"] - worker["cached_pages"]]
        numbers += [worker[f"{kind}_pages"] for kind in ("cached", "leased", "fenced", "quarantined", "total")]
        numbers += [worker["losses"]]
        model = [worker["model"] or answer["models"][0]] if several else []
        table.add_row(_name(worker), *model, worker["role"], worker["state"], worker["address"], *map(str, numbers))
    console = Console(markup=False)  # an address of IPv6 is in brackets
    console = console if console.is_terminal else Console(markup=False, width=PIPED_WIDTH)
    console.print(table)
    for sentence in troubles(answer):
        console.print(sentence, soft_wrap=True, highlight=False)


def troubles(answer: dict[str, Any]) -> list[str]:
    """What is wrong, one sentence each: of the router, then of each worker."""
    lag_s = answer["loop_lag_s"]
    of_router = [f"{answer['router_id']}: its event loop is {lag_s:.1f} s late"] if lag_s > LATE_S else []
    return of_router + [sentence for worker in answer["workers"] for sentence in _troubles_of(worker)]


def _troubles_of(worker: dict[str, Any]) -> Iterator[str]:
    name = worker["name"]
    if worker["reason"]:
        yield f"{name} is {worker['state']}: {worker['reason']}"
    if worker["circuit"] not in ("", "closed"):
        yield f"{name}: its circuit is {worker['circuit'].replace('_', ' ')}; others get its requests"
    for pair in worker["pairs"]:
        how_often = f"{pair['failures']} failed, the last {pair['age_s']:.0f} s ago"
        yield f"{name} cannot hand over to {pair['peer']}: {how_often}: {pair['reason']}"
    if worker["fenced_pages"]:
        yield f"{name}: {worker['fenced_pages']} pages are fenced: no lease holds them, a sender may still write them"
    if worker["quarantined_pages"]:
        yield f"{name}: {worker['quarantined_pages']} pages are out of use: a sender that hangs may still write them"
    if worker["step_age_s"] > LATE_S:
        yield f"{name}: its step has been running for {worker['step_age_s']:.1f} s"
    if worker["loop_lag_s"] > LATE_S:
        yield f"{name}: its event loop is {worker['loop_lag_s']:.1f} s late"
