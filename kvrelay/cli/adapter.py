"""`kvrelay adapter`: which LoRA adapters requests may name, while the cluster serves."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrelay.cli import completing
from kvrelay.cli.connection import Router, refusals
from kvrelay.cli.console import USAGE, CliError, JsonOption, exit_codes, note, print_json
from kvrelay.cli.groups import grouped

if TYPE_CHECKING:
    from kvrelay.client.adapters import AdapterInfo
    from kvrelay.client.client import Client

HELP = "Which LoRA adapters requests may name, beside the model itself."
ADD = """Let requests name an adapter from now on: a directory as PEFT saves one.

Routers and workers read it where they run, under the same path. Two tokens are asked of it, so that what does not fit
the model is told here, and nothing changes then. Exit code 2: it cannot be served.

Examples:

  kvrelay adapter add sql ./adapters/sql

  kvrelay generate --adapter sql "List the customers"
"""
REMOVE = """Let no request name these adapters any more. Those that run keep theirs.

Example:

  kvrelay adapter remove sql
"""
LIST = """Show the adapters that requests may name.

Exit code 1: one of them cannot be read where the router runs.

Example:

  kvrelay adapter list --json
"""
REFUSED = ("INVALID_ARGUMENT", "FAILED_PRECONDITION", "NOT_FOUND")


def register(app: typer.Typer) -> None:
    adapter = typer.Typer(name="adapter", help=HELP, no_args_is_help=True)
    adapter.command("add", help=ADD)(grouped(add))
    adapter.command("remove", help=REMOVE)(grouped(remove))
    adapter.command("list", help=LIST)(grouped(show))
    app.add_typer(adapter)


def add(
    router: Router,
    name: Annotated[str, typer.Argument(help="What requests will call it.")],
    path: Annotated[Path, typer.Argument(help="Its directory.")],
    no_try: Annotated[bool, typer.Option("--no-try", help="Ask nothing of it.")] = False,
    as_json: JsonOption = False,
) -> None:
    whole = str(path.expanduser().absolute())
    goes_on = f"{name} may have been added; `kvrelay adapter list` says"
    with exit_codes(as_json, interrupted=goes_on), refusals(as_json), router.client() as client:
        before = {each.name for each in client.adapters()}
        _set(client, add={name: whole})
        took_s = None if no_try else _try(client, name, is_new=name not in before)
        if as_json:
            print_json({"name": name, "path": whole, "seconds": took_s})
        else:
            note(f"{name} is served" + ("" if took_s is None else f"; its first two tokens took {took_s:.2f} s"))


def _set(client: Client, *, add: dict[str, str] | None = None, remove: Sequence[str] = ()) -> None:
    """Raises CliError for what cannot be."""
    from kvrelay.client.types import KvrelayError

    try:
        client.set_adapters(add=add or {}, remove=remove)
    except KvrelayError as error:
        if error.code not in REFUSED:
            raise
        raise CliError(error.message, USAGE) from None


def _try(client: Client, name: str, *, is_new: bool) -> float:
    """Seconds for two tokens: one of the worker that reads the prompt, and one behind the handoff. Raises CliError,
    KvrelayError; whatever comes between, one that is new is removed again."""
    from kvrelay.client.types import KvrelayError

    began_s = time.monotonic()
    try:
        client.generate([0], adapter=name, max_tokens=2, ignore_eos=True, temperature=0.0)
    except (KvrelayError, KeyboardInterrupt) as error:
        if is_new:
            _take_back(client, name)
        if not isinstance(error, KvrelayError) or error.code not in REFUSED or error.code == "NOT_FOUND":
            raise  # where it is not found, a router may not have heard of it yet
        raise CliError(error.message, USAGE) from None
    return round(time.monotonic() - began_s, 3)


def _take_back(client: Client, name: str) -> None:
    from kvrelay.client.types import KvrelayError

    try:
        _set(client, remove=[name])
    except (CliError, KvrelayError):
        note(f"{name} was added, and could not be removed again; `kvrelay adapter list` says whether it is there")
    else:
        note(f"{name} is not added: two tokens could not be had of it")


def remove(
    router: Router,
    names: Annotated[list[str], typer.Argument(help="Their names.", autocompletion=completing.adapters)],
    as_json: JsonOption = False,
) -> None:
    goes_on = f"{', '.join(names)} may have been removed; `kvrelay adapter list` says"
    with exit_codes(as_json, interrupted=goes_on), refusals(as_json), router.client() as client:
        _set(client, remove=names)
        if as_json:
            print_json({"removed": names})
        else:
            note(f"{', '.join(names)}: no request may name it any more")


def show(router: Router, as_json: JsonOption = False) -> None:
    with exit_codes(as_json, interrupted=""), refusals(as_json), router.client() as client:
        adapters = client.adapters()
        if as_json:
            rows: list[dict[str, Any]] = [asdict(each) for each in adapters]
            print_json({"adapters": rows})
        elif adapters:
            _print_table(adapters)
        else:
            note("there is none; add one by `kvrelay adapter add NAME DIRECTORY`")
        if any(each.why_not for each in adapters):
            raise typer.Exit(1)


def _print_table(adapters: Sequence[AdapterInfo]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    for title, justify in (("name", "left"), ("rank", "right"), ("parameters", "right"), ("directory", "left")):
        table.add_column(title, justify=justify)  # type: ignore[arg-type]
    for each in adapters:
        where = f"{each.path} ({each.why_not})" if each.why_not else each.path
        table.add_row(*map(Text, [each.name, str(each.rank), f"{each.num_params:,}", where]))
    console = Console()
    (console if console.is_terminal else Console(width=160)).print(table)
