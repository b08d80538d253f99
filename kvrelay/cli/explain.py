"""`kvrelay explain`: where the time of a request went, which were slow, and where a cluster's tail comes from."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrelay.cli.connection import Router, refusals
from kvrelay.cli.console import USAGE, CliError, JsonOption, exit_codes, note, print_json
from kvrelay.cli.groups import grouped

if TYPE_CHECKING:
    from kvrelay.client.client import Client
    from kvrelay.client.types import ExplainedRequest

HELP = """Say where the time of a request went: what it waited for and why, who computed it, what was slow.

REQUEST_ID is the client's own id, or the one it was told (kvrelay-request-id, X-Request-Id). Routers keep the last
requests and the slow ones. --slow lists these; --live says which part of P50 and P99 of TTFT and TPOT, of what came
lately, went where, and what one more worker, or one of another role, would bring them to, by the simulator.

Examples:

  kvrelay explain 5f2c1a9e0b7d4c3a

  kvrelay explain --slow

  kvrelay explain --live --window 300
"""
QUANTILES = (0.99, 0.5)
PIPED_WIDTH = 160  # columns; a program or a file cuts nothing


def register(app: typer.Typer) -> None:
    app.command(help=HELP)(grouped(explain))


def explain(
    router: Router,
    request_id: Annotated[str | None, typer.Argument(help="The request's id.", show_default=False)] = None,
    slow: Annotated[bool, typer.Option("--slow", help="List the last slow requests, and those that failed.")] = False,
    live: Annotated[bool, typer.Option("--live", help="Say where P50 and P99 of late come from.")] = False,
    window: Annotated[float, typer.Option(min=1, help="With --live: seconds that it looks back.")] = 300.0,
    last: Annotated[int, typer.Option(min=1, help="With --slow: so many.")] = 20,
    as_json: JsonOption = False,
) -> None:
    with exit_codes(as_json, interrupted="it was not told"), refusals(as_json), ExitStack() as stack:
        if (request_id is not None) + slow + live != 1:
            raise CliError("give one of REQUEST_ID, --slow and --live", USAGE)
        clients = [stack.enter_context(router.client_of(each)) for each in router.endpoints()]
        if request_id is not None:
            _show(_found(clients, request_id), as_json)
        elif slow:
            _list(clients, last, as_json)
        else:
            _say(clients, window, as_json)


def _found(clients: Sequence[Client], request_id: str) -> tuple[ExplainedRequest, ...]:
    """Of the router that had it last. Raises KvrelayError where none had it."""
    from kvrelay.client.types import KvrelayError

    answers, error = [], None
    for client in clients:
        try:
            answers.append(client.explain(request_id))
        except KvrelayError as failure:
            if failure.code != "NOT_FOUND":
                note(f"{client.endpoint}: {failure.message}")
            error = failure if error is None or failure.code == "NOT_FOUND" else error
    if not answers:
        assert error is not None, "there is a router"
        raise error
    return min(answers, key=lambda choices: choices[0].age_s)


def _show(choices: Sequence[ExplainedRequest], as_json: bool) -> None:
    if as_json:
        print_json({"choices": [asdict(each) for each in choices]})
        return
    from kvrelay.explain.waterfall import waterfall

    for each in choices:
        _console().print(waterfall(each))


def _list(clients: Sequence[Client], last: int, as_json: bool) -> None:
    told = sorted((each for client in clients for each in client.slow(last)), key=lambda each: each.age_s)[:last]
    if as_json:
        print_json({"requests": [asdict(each) for each in told]})
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    for column in ("request", "state", "ago, s", "TTFT, ms", "TPOT, ms", "E2E, ms", "why"):
        table.add_column(column, justify="right" if "s" in column[-2:] else "left", overflow="fold")
    for each in told:
        times = [1e3 * each.ttft_s, 1e3 * each.tpot_s, 1e3 * each.e2e_s]
        cells = each.request_id, each.state, f"{each.age_s:.0f}", *(f"{ms:.1f}" for ms in times), each.why
        table.add_row(*map(Text, cells))
    _console().print(table)


def _say(clients: Sequence[Client], window_s: float, as_json: bool) -> None:
    from kvrelay.explain.live import Tail, tail_of
    from kvrelay.explain.what_if import what_if
    from kvrelay.replan.replanner import NotYet, added
    from placement.simulator.cluster import SetupError

    loads = [client.load(window_s) for client in clients]
    load, window_s = added(loads), min(window_s, *(each.whole_s for each in loads))  # of a busy router it is shorter
    found = [tail_of(load, metric, quantile) for metric in ("ttft", "tpot") for quantile in QUANTILES]
    tails = [each for each in found if isinstance(each, Tail)]
    played, why = None, ""
    if tails:
        try:
            played = what_if(clients[0].status(), load, tails, len(clients))
        except (NotYet, SetupError) as error:
            why = f"what would bring it down cannot be said: {error}"
    if as_json:
        print_json(_told(found, None if played is None else asdict(played), why, window_s))
        return
    for each in found:
        if isinstance(each, str):
            print(f"Not enough was measured: {each}.")
            continue
        words = each.words(window_s)
        print(f"{words[0].upper()}{words[1:]}.")
        print(f"  {played.words(each)}." if played is not None else f"  {why}.")


def _told(found: Sequence[Any], played: dict[str, Any] | None, why: str, window_s: float) -> dict[str, Any]:
    tails = [each if isinstance(each, str) else asdict(each) | {"words": each.words(window_s)} for each in found]
    return {
        "window_s": window_s,
        "tails": [each for each in tails if not isinstance(each, str)],
        "not_enough": [each for each in tails if isinstance(each, str)],
        "what_if": played,
        "why_not": why,
    }


def _console() -> Any:
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=PIPED_WIDTH)
