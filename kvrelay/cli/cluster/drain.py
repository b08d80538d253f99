"""`kvrelay drain`: has a worker left by its requests, and waits until it is."""

from __future__ import annotations

from typing import Annotated

import typer

from kvrelay.cli.cluster.leaving import ForceOption, TimeoutOption, WorkerArgument, still_drains, tell, wait_until
from kvrelay.cli.connection import Router, refusals
from kvrelay.cli.console import USAGE, CliError, JsonOption, NoProgressOption, exit_codes
from kvrelay.cli.groups import grouped

HELP = """Have a worker left: routers send it nothing new and move what it decodes to others, with no token lost.

Prompts that it has not read to their end go to mixed workers, which read the rest, and without any are read to the end
and handed over. Where no other decode worker has pages, requests stay until one has or they end: the command waits
--timeout seconds. The worker stays drained until --undo, or until its process is started again; with --remove its
process is ended for good then, and its pool is one smaller. Exit code 1: it still had requests when the time was over,
and goes on draining, or it was taken back.

Examples:

  kvrelay drain decode-0

  kvrelay drain decode-0 --undo

  kvrelay drain decode-0 --remove
"""


def register(app: typer.Typer) -> None:
    app.command(help=HELP)(grouped(drain))


def drain(
    worker: WorkerArgument,
    router: Router,
    undo: Annotated[bool, typer.Option("--undo", help="Let it take requests again.")] = False,
    remove: Annotated[bool, typer.Option("--remove", help="End it then, for good.")] = False,
    force: ForceOption = False,
    timeout: TimeoutOption = 120.0,
    no_progress: NoProgressOption = False,
    as_json: JsonOption = False,
) -> None:
    with exit_codes(as_json, interrupted=still_drains(worker)), refusals(as_json), router.client() as client:
        if undo and remove:
            raise CliError("--undo and --remove do not go together; give one", USAGE)
        client.drain(worker, undo=undo, force=force, remove=remove)
        if undo:
            tell(worker, "takes requests again", {"draining": False}, as_json)
            return
        show = not (no_progress or as_json)
        left, took_s = wait_until(
            client, worker, lambda each: each.state == "drained" and not remove, timeout, show=show, may_end=remove
        )
        done = "has ended" if remove else "is left by all: stop it, or take it back by --undo;"
        words = "drains" if left else f"{done} after {took_s:g} s"
        tell(worker, words, {"draining": True, "requests_left": left, "seconds": took_s}, as_json)
