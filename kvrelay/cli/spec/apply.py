"""`kvrelay apply`: has a running cluster run with another spec. It shows what changes, asks, and waits."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrelay import known_clusters
from kvrelay.cli.cluster import state
from kvrelay.cli.connection import Router, refusals
from kvrelay.cli.console import USAGE, CliError, JsonOption, NoProgressOption, exit_codes, note, print_json
from kvrelay.cli.groups import grouped
from kvrelay.cli.spec.rollout import GOES_ON, MaxSurge, RollTimeout, wait_until_done
from kvrelay.cli.spec.wanted import RoleCounts, SpecArgument, Wanted, build
from kvrelay.cli.spec_flags import ChangeFlags, PoolFlags, RouterFlags, SpecChanges, TransferFlags

if TYPE_CHECKING:
    from kvrelay.client.client import Client
    from kvrelay.client.specs import SpecChange

HELP = """Change what a running cluster runs with, to what a spec says.

Give the spec and the flags that `kvrelay up` would take. What differs from what the cluster runs with is shown in three
groups: what changes now; what changes by replacing workers one after another, as `kvrelay roll` does; and what cannot
change while it runs. With one of the last nothing is changed at all. Applied again it does nothing, or goes on where it
was interrupted. Exit codes: 0 done, or nothing to do; 1 it stopped, the time was over, or the cluster has been told
otherwise since; 2 refused, nothing has changed.

Examples:

  kvrelay apply cluster.yaml --dry-run

  kvrelay apply cluster.yaml --yes
"""
GROUPS = {"now": "changes now", "rolling": "changes as workers are replaced", "fixed": "cannot change while it runs"}


def register(app: typer.Typer) -> None:
    app.command(help=HELP)(grouped(apply))


def apply(
    router: Router,
    cluster_keys: ChangeFlags,
    pool_keys: PoolFlags,
    router_keys: RouterFlags,
    transfer_keys: TransferFlags,
    counts: RoleCounts,
    spec: SpecArgument = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would change.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    max_surge: MaxSurge = None,
    timeout: RollTimeout = 1800.0,
    no_progress: NoProgressOption = False,
    as_json: JsonOption = False,
) -> None:
    from cluster.spec.errors import SpecError

    changes = SpecChanges(cluster=cluster_keys, router=router_keys, pools=pool_keys, transfer=transfer_keys)
    with exit_codes(as_json, wrong=(SpecError,), interrupted=GOES_ON), refusals(as_json):
        wanted = build(spec, changes, counts.asked).with_found_model(must_be_here=False).with_tokens_file()
        found, is_settled = _look(router, wanted)
        if not as_json:
            _show(found, is_settled)
        if is_settled or dry_run or any(change.how == "fixed" for change in found):
            raise typer.Exit(_left_as_it_is(found, as_json))
        _ask(yes=yes, as_json=as_json)
        began_s = time.monotonic()
        with router.client() as client:
            _apply(client, wanted, max_surge=max_surge)
        _note_tokens_file(router, wanted)
        with router.client() as client:  # who may be let in by another token now
            rollout = wait_until_done(client, timeout, show=not (no_progress or as_json))
            if not rollout.running:
                _check_runs(client, wanted)
        took_s = round(time.monotonic() - began_s, 1)
        if as_json:
            print_json({"applied": True, **_facts(found), "rollout": asdict(rollout), "seconds": took_s})
        else:
            note(GOES_ON if rollout.running else f"the cluster runs with it after {took_s:g} s")


def _look(router: Router, wanted: Wanted) -> tuple[Sequence[SpecChange], bool]:
    """What would change; and whether there is nothing to do, not even to go on with what was begun."""
    with router.client() as client:
        found = _apply(client, wanted, dry_run=True)
        rollout = client.spec().rollout
    return found, not (found or rollout.running or rollout.reason)


def _ask(*, yes: bool, as_json: bool) -> None:
    """Raises CliError when the answer is no, and where nobody is there to ask."""
    if yes:
        return
    if as_json or not sys.stdin.isatty():
        raise CliError("nothing was changed: give --yes to change it, or --dry-run to look", USAGE)
    if not typer.confirm("Change it?"):
        raise CliError("nothing was changed", USAGE)


def _left_as_it_is(changes: Sequence[SpecChange], as_json: bool) -> int:
    """Tells so; returns the exit code."""
    fixed = [change.key for change in changes if change.how == "fixed"]
    if as_json:
        print_json({"applied": False, **_facts(changes)})
    if fixed:
        note(f"error: nothing was changed: {', '.join(fixed)} cannot change while the cluster runs")
    return USAGE if fixed else 0


def _facts(changes: Sequence[SpecChange]) -> dict[str, Any]:
    return {"changes": [asdict(change) for change in changes]}


def _note_tokens_file(router: Router, wanted: Wanted) -> None:
    """Where the cluster was started from here, its own clients find the new one."""
    known, path = known_clusters.at(router.endpoint), wanted.spec.router.tokens_file
    if known is not None and path and path != known.tokens_file:
        state.write(replace(known, tokens_file=path))


def _apply(client: Client, wanted: Wanted, **how: Any) -> Sequence[SpecChange]:
    """Raises CliError for what the cluster cannot run with."""
    from kvrelay.client.types import KvrelayError

    try:
        return client.apply_spec(wanted.spec.model_dump_json(exclude_unset=True), wanted.sources, **how)
    except KvrelayError as error:
        if error.code != "FAILED_PRECONDITION":
            raise
        raise CliError(error.message, USAGE) from None


def _check_runs(client: Client, wanted: Wanted) -> None:
    """Raises CliError where somebody has changed it again meanwhile: what has settled is theirs."""
    if others := [change.key for change in _apply(client, wanted, dry_run=True)]:
        raise CliError(
            f"the cluster has been told otherwise since of {', '.join(others)}; `kvrelay config show` says what it "
            "runs with"
        )


def _show(changes: Sequence[SpecChange], is_settled: bool) -> None:
    if is_settled:
        note("nothing to do: the cluster runs with it")
    for how, title in GROUPS.items():
        group = [change for change in changes if change.how == how]
        if group:
            print(f"{title}:")
        for change in group:
            print(f"  {change.key}: {_shown(change.before)} -> {_shown(change.after)}")
            if change.reason:
                print(f"    {change.reason}")
    sys.stdout.flush()


def _shown(value: object) -> str:
    return "none" if value is None else str(value)
