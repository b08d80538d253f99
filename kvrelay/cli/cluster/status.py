"""`kvrelay status`: asks a router what it knows of itself and of the workers, and shows it."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Annotated, Any

import typer

from kvrelay.cli.connection import Entrance
from kvrelay.cli.console import ENDPOINT_VARIABLE, CliError, JsonOption, print_json
from kvrelay.cli.groups import grouped
from kvrelay.client import known_clusters
from kvrelay.client.client import DEFAULT_ENDPOINT

TIMEOUT_S = 5.0
PIPED_WIDTH = 160  # columns; a program or a file cuts nothing

HELP = """Show what a router knows: its requests, and every worker's state, queue and pages.

Without --endpoint it asks the routers of the clusters that were started from here. Exit code 1: one did not answer.

Examples:

  kvrelay status

  kvrelay status --endpoint 10.0.0.5:50051 --json
"""


def register(app: typer.Typer) -> None:
    app.command(help=HELP)(grouped(status))


def status(
    entrance: Entrance,
    endpoint: Annotated[str | None, typer.Option(envvar=ENDPOINT_VARIABLE, help="host:port of a router.")] = None,
    as_json: JsonOption = False,
) -> None:
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what fails is told in our own words
    answers = [_ask(where, entrance) for where in ([endpoint] if endpoint else _endpoints())]
    if as_json:
        print_json(answers[0] if len(answers) == 1 else {"routers": answers})
        return
    for answer in answers:
        _show(answer)


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
    """With its degree, where it runs in several processes."""
    degree = worker["limits"].get("tensor_parallel", "1")
    return str(worker["name"]) if degree == "1" else f"{worker['name']} (TP {degree})"


def _show(answer: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    heading = (
        f"{answer['router_id']} at {answer['endpoint']}: {answer['model'] or 'no model yet'}, up "
        f"{answer['uptime_s']:.0f} s, {answer['num_queued']} queued, {answer['num_in_flight']} in flight"
    )
    table = Table(title=heading, title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("worker", "state", "address"):
        table.add_column(column, no_wrap=True)
    for column in ("wait", "run", "free", "cached", "all", "lost"):
        table.add_column(column, justify="right", no_wrap=True)
    for worker in answer["workers"]:
        numbers = [worker["num_waiting"], worker["num_running"], worker["available_pages"] - worker["cached_pages"]]
        numbers += [worker["cached_pages"], worker["total_pages"], worker["losses"]]
        table.add_row(_name(worker), worker["state"], worker["address"], *map(str, numbers))
    console = Console()
    console = console if console.is_terminal else Console(width=PIPED_WIDTH)
    console.print(table)
    for worker in answer["workers"]:
        if worker["reason"]:
            console.print(f"{worker['name']} is {worker['state']}: {worker['reason']}", soft_wrap=True)
