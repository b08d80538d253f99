"""`kvrelay scale`: has a pool of so many workers, while the cluster serves."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrelay.cli import completing
from kvrelay.cli.cluster.leaving import POLL_S, ForceOption
from kvrelay.cli.connection import Router, refusals
from kvrelay.cli.console import FAILURE, CliError, JsonOption, NoProgressOption, exit_codes, note, print_json
from kvrelay.cli.groups import grouped
from kvrelay.cli.progress import progress
from kvrelay.client.types import KvrelayError

if TYPE_CHECKING:
    from kvrelay.client.client import Client
    from kvrelay.client.types import PendingWorker

HELP = """Have a pool of so many workers.

New ones are started as the spec has the pool's, and take requests once their weights are loaded. Where there are too
many the last ones are drained, as by `kvrelay drain`, and ended: no request fails, starts again or is computed twice.
Exit code 1: it was not done when the time was over, and goes on, or the pool has been told another size since.

Examples:

  kvrelay scale decode 3

  kvrelay scale prefill 1 --timeout 600
"""


def register(app: typer.Typer) -> None:
    app.command(help=HELP)(grouped(scale))


def scale(
    pool: Annotated[
        str, typer.Argument(help="Its name: its workers' without their number.", autocompletion=completing.pools)
    ],
    replicas: Annotated[int, typer.Argument(min=0, max=4096, help="Workers that it shall have.")],
    router: Router,
    force: ForceOption = False,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait until it has them; 0: none.")] = 300.0,
    no_progress: NoProgressOption = False,
    as_json: JsonOption = False,
) -> None:
    goes_on = f"{pool} goes on to {replicas} workers"
    with exit_codes(as_json, interrupted=goes_on), refusals(as_json), router.client() as client:
        began_s = time.monotonic()
        pending = _wait(client, pool, replicas, force, timeout, show=not (no_progress or as_json))
        took_s = round(time.monotonic() - began_s, 1)
        if pending and timeout:
            raise CliError(f"{', '.join(map(_standing, pending))} after {timeout:g} s; {goes_on}", FAILURE)
        if as_json:
            states: list[dict[str, Any]] = [{"name": p.name, "stage": p.stage, "reason": p.reason} for p in pending]
            print_json({"pool": pool, "replicas": replicas, "pending": states, "seconds": took_s})
        else:
            note(goes_on if pending else f"{pool} has {replicas} workers after {took_s:g} s")


def _wait(
    client: Client, pool: str, replicas: int, force: bool, timeout_s: float, *, show: bool
) -> tuple[PendingWorker, ...]:
    """Those that are still on their way when the time is over. Raises CliError once others want another size."""
    until_s = time.monotonic() + timeout_s
    with progress(show=show) as on_progress:
        most = len(pending := client.scale(pool, replicas, force=force))
        while (pending := _left(client, pool, replicas, pending)) and time.monotonic() < until_s:
            on_progress(", ".join(map(_standing, pending)), most - len(pending), most)
            time.sleep(POLL_S)
    return pending


def _left(client: Client, pool: str, replicas: int, before: tuple[PendingWorker, ...]) -> tuple[PendingWorker, ...]:
    """`before`: those that were on their way when it was last asked."""
    try:
        state = client.pool(pool)
    except KvrelayError as error:  # who keeps the pool begins again, and goes on
        if error.code != "UNAVAILABLE":
            raise
        return before
    if state.replicas != replicas:
        raise CliError(f"{pool} has been told another size since, and goes on to {state.replicas} workers", FAILURE)
    return state.pending


def _standing(worker: PendingWorker) -> str:
    why = f" ({worker.reason})" if worker.reason else ""
    return f"{worker.name} is {'leaving' if worker.stage == 'leaving' else f'at {worker.stage}'}{why}"
