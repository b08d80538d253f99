"""`kvrelay role`: has a worker do another part of the work, while the cluster serves."""

from __future__ import annotations

from typing import Annotated

import typer

from kvrelay.cli.cluster.leaving import ForceOption, TimeoutOption, WorkerArgument, still_drains, tell, wait_until
from kvrelay.cli.connection import Router, refusals
from kvrelay.cli.console import JsonOption, NoProgressOption, exit_codes
from kvrelay.cli.groups import grouped

HELP = """Change what a worker does: prefill, decode, or mixed for both.

It is drained first, as by `kvrelay drain`: no request fails, starts again or is computed twice. Its weights stay
loaded, its pages cached, and its name what it was. Its knobs have what pools of that role were given in the spec, else
what its own pool was given. Started again, it is what the spec says.

Examples:

  kvrelay role decode-1 prefill

  kvrelay role prefill-0 mixed --json
"""


def register(app: typer.Typer) -> None:
    app.command(help=HELP)(grouped(role))


def role(
    worker: WorkerArgument,
    role: Annotated[str, typer.Argument(help="prefill, decode or mixed.")],
    router: Router,
    force: ForceOption = False,
    timeout: TimeoutOption = 120.0,
    no_progress: NoProgressOption = False,
    as_json: JsonOption = False,
) -> None:
    with exit_codes(as_json, interrupted=still_drains(worker)), refusals(as_json), router.client() as client:
        client.set_role(worker, role, force=force)
        show = not (no_progress or as_json)
        left, took_s = wait_until(
            client, worker, lambda each: (each.role, each.state) == (role, "ready"), timeout, show=show
        )
        words = f"drains, to be a {role} worker" if left else f"is a {role} worker after {took_s:g} s"
        tell(worker, words, {"role": role, "requests_left": left, "seconds": took_s}, as_json)
