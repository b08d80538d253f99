"""What every command shares: how a failure is told, and how plain data is printed. stdout is for answers only."""

from __future__ import annotations

import io
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import typer

FAILURE = 1
USAGE = 2
INTERRUPTED = 130
ENDPOINT_VARIABLE = "KVRELAY_ENDPOINT"

NoProgressOption = Annotated[bool, typer.Option("--no-progress", help="Draw no progress bar.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]


class CliError(Exception):
    """A command ends without having done what was asked: one sentence for a person, and the exit code."""

    def __init__(self, sentence: str, code: int = FAILURE) -> None:
        super().__init__(sentence)
        self.code = code


def write_to_any_terminal() -> None:
    """An answer's letter that the terminal's encoding does not have is a question mark there, and no end of it."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def print_json(value: Any) -> None:
    print(json.dumps(value), flush=True)


def note(text: str) -> None:
    """For a person, not for a program that reads stdout. Nobody has to be there: the terminal may be gone."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def report(error: CliError, as_json: bool) -> int:
    """Tell a person, and with --json a program; returns the exit code."""
    for line in str(error).splitlines():
        note(f"error: {line}")
    if as_json:
        print_json({"error": {"message": str(error)}})
    return error.code


@contextmanager
def exit_codes(as_json: bool, *, wrong: tuple[type[Exception], ...] = (), interrupted: str) -> Iterator[None]:
    """What cannot be done ends the command, told: a CliError, what `wrong` says was asked wrongly, Ctrl-C, SIGTERM."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except CliError as error:
        raise typer.Exit(report(error, as_json)) from None
    except wrong as error:
        raise typer.Exit(report(CliError(str(error), USAGE), as_json)) from None
    except KeyboardInterrupt:
        raise typer.Exit(report(CliError(interrupted, INTERRUPTED), as_json)) from None
    finally:
        signal.signal(signal.SIGTERM, before)
