"""What the commands that talk to a router share: where it listens, the secret, and how its refusals are told."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import typer

from kvrelay.cli.console import ENDPOINT_VARIABLE, FAILURE, INTERRUPTED, USAGE
from kvrelay.client.client import DEFAULT_ENDPOINT
from kvrelay.client.types import KvrelayError

SECRET_VARIABLE = "KVRELAY_SECRET"
_EXIT_CODES = {"INVALID_ARGUMENT": USAGE, "DEADLINE_EXCEEDED": 124}

SecretOption = Annotated[
    str,
    typer.Option("--secret", envvar=SECRET_VARIABLE, help="The cluster's secret, where clients need it.", hidden=True),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    endpoint: Annotated[
        str, typer.Option("--endpoint", envvar=ENDPOINT_VARIABLE, help="Where a router listens, host:port.")
    ] = DEFAULT_ENDPOINT
    secret: SecretOption = ""


@contextmanager
def refusals(
    as_json: bool, *, wrong: tuple[type[Exception], ...] = (), interrupted: str | None = None
) -> Iterator[None]:
    """What the router refuses ends the command, told; so does what `wrong` says was asked for in vain, and, with a
    sentence for it, Ctrl-C."""
    try:
        yield
    except wrong as error:
        raise typer.Exit(_told(KvrelayError("INVALID_ARGUMENT", str(error)), as_json)) from None
    except KvrelayError as error:
        raise typer.Exit(_told(error, as_json)) from None
    except KeyboardInterrupt:
        if interrupted is None:
            raise
        _told(KvrelayError("CANCELLED", interrupted), as_json)
        raise typer.Exit(INTERRUPTED) from None


def _told(error: KvrelayError, as_json: bool) -> int:
    """To a person (stderr) and, with --json, a program (stdout); returns the exit code."""
    wait = "" if error.retry_after_s is None else f" (retry after {error.retry_after_s:g} s)"
    print(f"error: {error.message}{wait}", file=sys.stderr)
    if as_json:
        print(json.dumps({"error": error.to_dict()}))
    return _EXIT_CODES.get(error.code, FAILURE)
