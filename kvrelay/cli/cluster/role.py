"""`kvrelay role`: has a worker do another part of the work, while the cluster serves."""

from __future__ import annotations

from typing import Annotated

import typer

from kvrelay.cli.cluster.leaving import ForceOption, TimeoutOption, WorkerArgument, still_drains, tell, wait_until
from kvrelay.cli.connection import Router, refusals
from kvrelay.cli.console import JsonOption, NoProgressOption, exit_codes
from kvrelay.cli.groups import grouped
from kvrelay.client.types import WorkerState

HELP = """Change what a worker does: prefill, decode, or mixed for both.

It is drained first, as by `kvrelay drain`: no request fails, starts again or is computed twice. Its weights stay
loaded, its pages cached, and its name what it was. Its knobs have what pools of that role were given in the spec, else
what its own pool was given. Started again, it is what the spec says. A mixed worker whose chunks change is not drained.

Examples:

  kvrelay role decode-1 prefill

  kvrelay role prefill-0 mixed --chunk-tokens 64
"""

MOST_CHUNK_TOKENS = 1 << 20  # more than any step has


def register(app: typer.Typer) -> None:
    app.command(help=HELP)(grouped(role))


def role(
    worker: WorkerArgument,
    role: Annotated[str, typer.Argument(help="prefill, decode or mixed.")],
    router: Router,
    chunk_tokens: Annotated[
        int | None,
        typer.Option(
            min=0, max=MOST_CHUNK_TOKENS, help="Of prompts that a mixed worker computes in a step that decodes, too."
        ),
    ] = None,
    force: ForceOption = False,
    timeout: TimeoutOption = 120.0,
    no_progress: NoProgressOption = False,
    as_json: JsonOption = False,
) -> None:
    with exit_codes(as_json, interrupted=still_drains(worker)), refusals(as_json), router.client() as client:
        client.set_role(worker, role, chunk_tokens, force=force)

        def is_so(each: WorkerState) -> bool:
            chunks = each.limits.get("chunk_tokens") if chunk_tokens is not None else None
            return (each.role, each.state) == (role, "ready") and chunks in (None, str(chunk_tokens))

        left, took_s = wait_until(client, worker, is_so, timeout, show=not (no_progress or as_json))
        what = f"{role} worker" if chunk_tokens is None else f"{role} worker with chunks of {chunk_tokens}"
        words = f"is to be a {what}" if left else f"is a {what} after {took_s:g} s"
        tell(worker, words, {"role": role, "requests_left": left, "seconds": took_s}, as_json)
