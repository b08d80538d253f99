"""`kvrelay roll`: has workers replaced one after another, while the cluster serves."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated

import typer

from kvrelay.cli.connection import Router, refusals
from kvrelay.cli.console import JsonOption, NoProgressOption, exit_codes, note, print_json
from kvrelay.cli.groups import grouped
from kvrelay.cli.spec.rollout import GOES_ON, MaxSurge, RollTimeout, wait_until_done

HELP = """Replace the workers of pools, or all of them, one after another, with nothing lost.

A worker more is started first where there is room, so that a pool never has fewer; once routers send it requests, each
of the others is drained, as by `kvrelay drain`, ended, and started anew under its name and in its place. No request
fails, starts again or is computed twice. If a new worker does not become ready it stops, and the old ones stay. Exit
code 1: it stopped, or was not done when the time was over; then it goes on.

Examples:

  kvrelay roll

  kvrelay roll decode --max-surge 0
"""


def register(app: typer.Typer) -> None:
    app.command(help=HELP)(grouped(roll))


def roll(
    router: Router,
    pools: Annotated[list[str] | None, typer.Argument(help="Their names. Default: all.")] = None,
    max_surge: MaxSurge = None,
    timeout: RollTimeout = 1800.0,
    no_progress: NoProgressOption = False,
    as_json: JsonOption = False,
) -> None:
    with exit_codes(as_json, interrupted=GOES_ON), refusals(as_json), router.client() as client:
        began_s = time.monotonic()
        client.roll(*(pools or ()), max_surge=max_surge)
        rollout = wait_until_done(client, timeout, show=not (no_progress or as_json))
        took_s = round(time.monotonic() - began_s, 1)
        if as_json:
            print_json({"pools": pools or [], "rollout": asdict(rollout), "seconds": took_s})
        else:
            note(GOES_ON if rollout.running else f"all workers were replaced after {took_s:g} s")
