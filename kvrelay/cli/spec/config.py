"""`kvrelay config show`: what a spec comes to, or what a cluster runs with, and where each value comes from."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from kvrelay.cli.connection import Router, refusals
from kvrelay.cli.console import USAGE, CliError, JsonOption, exit_codes, note, print_json
from kvrelay.cli.groups import grouped
from kvrelay.cli.spec.wanted import RoleCounts, SpecArgument, Wanted, build
from kvrelay.cli.spec_flags import ChangeFlags, PoolFlags, RouterFlags, SpecChanges, TransferFlags

HELP_CONFIG = "Look at what a cluster is started from, or runs with."
HELP = """Show every key of a spec, its value, and where the value comes from.

With a spec file, or flags as `kvrelay up` takes them: what `up` would start here. With neither: what the cluster at
--endpoint runs with. A value comes from a line of the file, with the environment variables used there; from a flag; is
a default; or is derived: what auto comes to. Values of variables that are named like secrets are hidden.

Examples:

  kvrelay config show cluster.yaml --changed

  kvrelay config show --json
"""

WIDE = 200  # where no terminal bounds it
Value = tuple[str, Any, str]  # key, value, source


def register(app: typer.Typer) -> None:
    config = typer.Typer(name="config", help=HELP_CONFIG, no_args_is_help=True)
    config.callback()(_none)
    config.command(help=HELP)(grouped(show))
    app.add_typer(config)


def _none() -> None:
    """So that `show` is a command of it."""


def show(
    router: Router,
    cluster_keys: ChangeFlags,
    pool_keys: PoolFlags,
    router_keys: RouterFlags,
    transfer_keys: TransferFlags,
    counts: RoleCounts,
    spec: SpecArgument = None,
    address: Annotated[
        str | None, typer.Option(help="As `up` takes it: what auto comes to in that Ray, not on this machine.")
    ] = None,
    changed: Annotated[bool, typer.Option("--changed", help="Only what is no default.")] = False,
    as_json: JsonOption = False,
) -> None:
    from cluster.spec.errors import SpecError

    changes = SpecChanges(cluster=cluster_keys, router=router_keys, pools=pool_keys, transfer=transfer_keys)
    with exit_codes(as_json, wrong=(SpecError,), interrupted="nothing was changed"), refusals(as_json):
        if spec is None and "model" not in changes.cluster:
            values = _of_cluster(router, changes)
        else:
            values = _of_files(spec, changes, counts, address)
        if changed:
            values = [value for value in values if value[2] != "default"]
        if as_json:
            print_json({key: {"value": value, "from": source} for key, value, source in values})
        else:
            _table(values)


def _of_files(path: Path | None, changes: SpecChanges, counts: RoleCounts, address: str | None) -> list[Value]:
    from cluster.deploy.deployment import this_machine
    from cluster.spec.errors import SpecError
    from cluster.spec.resolve import resolve
    from cluster.spec.sources import rows_of

    wanted: Wanted = build(path, changes, counts.asked)
    wanted = wanted.with_found_model(must_be_here=False).with_tokens_file()
    machine = this_machine() if address is None else None
    try:
        resolved = resolve(wanted.spec, machine)
    except SpecError:
        if machine is None or not machine.why_no_cuda:
            raise
        resolved = resolve(wanted.spec, None)  # for GPUs that are elsewhere: it is only looked at
    return [tuple(row) for row in rows_of(wanted.spec, resolved, wanted.sources)]


def _of_cluster(router: Router, changes: SpecChanges) -> list[Value]:
    if any((changes.cluster, changes.router, changes.pools, changes.transfer)):
        raise CliError("flags change a spec, and none is given; give a file or --model, or leave them out", USAGE)
    with router.client() as client:
        running = client.spec()
    if running.rollout.reason:
        note(f"note: {running.rollout.current} of {running.rollout.total} workers: {running.rollout.reason}")
    return [(value.key, value.value, value.source) for value in running.values]


def _table(values: Iterable[Value]) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("key", "value", "from", box=box.SIMPLE_HEAD)
    for key, value, source in values:
        table.add_row(*(escape(text) for text in (key, _scalar(value), source)))
    console = Console()
    (console if console.is_terminal else Console(width=WIDE)).print(table)


def _scalar(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("...").strip()
