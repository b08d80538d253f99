"""`kvrelay drain`: has a worker left by its requests, and waits until it is."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from kvrelay.cli.connection import Router, refusals
from kvrelay.cli.console import FAILURE, CliError, JsonOption, NoProgressOption, exit_codes, note, print_json
from kvrelay.cli.groups import grouped
from kvrelay.cli.progress import progress

POLL_S = 0.2

HELP = """Have a worker left: routers send it nothing new and move what it decodes to others, with no token lost.

What it reads is read to the end and handed over. Where no other decode worker has pages, requests stay until one has or
they end: the command waits --timeout seconds. The worker stays drained until --undo, or until its process is started
again. Exit code 1: it still had requests when the time was over; it goes on draining.

Examples:

  kvrelay drain decode-0

  kvrelay drain decode-0 --undo
"""


def register(app: typer.Typer) -> None:
    app.command(help=HELP)(grouped(drain))


def drain(
    worker: Annotated[str, typer.Argument(help="Its name, as `kvrelay status` shows it.")],
    router: Router,
    undo: Annotated[bool, typer.Option("--undo", help="Let it take requests again.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Even if it is the only one: new requests wait then.")] = False,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait until nothing runs there; 0: none.")] = 120.0,
    no_progress: NoProgressOption = False,
    as_json: JsonOption = False,
) -> None:
    stopped = f"{worker} goes on draining; `kvrelay drain {worker} --undo` takes it back"
    with exit_codes(as_json, interrupted=stopped), refusals(as_json), router.client() as client:
        client.drain(worker, undo=undo, force=force)
        if undo:
            _tell(worker, "takes requests again", {"draining": False}, as_json)
            return
        began_s = time.monotonic()
        with progress(show=not (no_progress or as_json)) as on_progress:
            most = left = _left(client, worker)
            while left and time.monotonic() < began_s + timeout:
                time.sleep(POLL_S)
                left = _left(client, worker)
                most = max(most, left)
                on_progress(f"{worker}: requests that have left", most - left, most)
        if left and timeout:
            raise CliError(f"{worker} still has {left} requests after {timeout:g} s; {stopped}", FAILURE)
        took_s = round(time.monotonic() - began_s, 1)
        words = f"is left by all in {took_s:g} s: stop it, or take it back by --undo" if not left else "drains"
        _tell(worker, words, {"draining": True, "requests_left": left, "seconds": took_s}, as_json)


def _left(client: Any, worker: str) -> int:
    """Requests that wait or run there, of any router; before it has said that it drains, one at least."""
    for each in client.status().workers:
        if each.name == worker and each.state != "lost":
            held = each.num_waiting + each.num_running
            return int(held or each.state != "draining")
    return 0


def _tell(worker: str, words: str, facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json({"worker": worker, **facts})
    else:
        note(f"{worker} {words}")
