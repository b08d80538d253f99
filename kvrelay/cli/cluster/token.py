"""`kvrelay token`: prints the token that a router here lets clients in with, for clients that are not kvrelay's."""

from __future__ import annotations

import typer

from kvrelay.cli.connection import Router, refusals
from kvrelay.cli.console import CliError
from kvrelay.cli.groups import grouped

HELP = """Print the token of the cluster that was started from here, for curl, OpenAI's clients and gRPC tools.

Examples:

  export OPENAI_API_KEY=$(kvrelay token)

  curl http://127.0.0.1:8000/v1/models -H "Authorization: Bearer $(kvrelay token)"
"""


def register(app: typer.Typer) -> None:
    app.command(help=HELP)(grouped(token))


def token(router: Router) -> None:
    from kvrelay.client.access import find_access
    from worker.wire.tokens import TokenError

    with refusals(as_json=False, wrong=(TokenError,)):
        found = find_access(router.endpoint, router.access()).token
    if not found:
        raise CliError(f"no token is known for {router.endpoint}: it needs none, or was not started from here by you")
    typer.echo(found)
