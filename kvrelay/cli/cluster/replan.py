"""`kvrelay replan` watches a cluster and says which workers it should have, or has them change; `kvrelay decisions`
shows what it said."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrelay.cli.connection import Router, refusals
from kvrelay.cli.console import USAGE, CliError, JsonOption, exit_codes, note, print_json
from kvrelay.cli.groups import grouped
from kvrelay.cli.planning.targets import Targets
from kvrelay.replan.options import EVERY_S, MOST_CHANGES, NICE, REFUSED, WINDOW_S, Asked, Policy

if TYPE_CHECKING:
    from kvrelay.replan.journal import Journal
    from kvrelay.replan.replanner import Replanner

HELP = """Say which workers should have other roles or chunks for what has come lately, or have them change.

Every --every seconds it asks the routers for the requests of the last --window seconds, and for what steps take. Where
fewer than --attainment of them met --ttft and --tpot, it plays them against other arrangements of roles in the
simulator, and names the best one if the gain is more than chance and than the price of the change. --act has workers
change their roles, one after another, as by `kvrelay role`: no request fails or starts again. With --most-devices pools
grow and shrink, too, as by `kvrelay scale`. It looks on until Ctrl-C.

Examples:

  kvrelay replan --ttft 500ms --tpot 50ms --once

  kvrelay replan --ttft 500ms --tpot 50ms --act --most-devices 8
"""
HELP_DECISIONS = """Show what `kvrelay replan` has decided, why, and what came of it.

Examples:

  kvrelay decisions

  kvrelay decisions --last 100 --json
"""
ANSWER_TIMEOUT_S = 5.0
Last = Annotated[int, typer.Option("--last", min=1, help="How many, the newest last.")]


def register(app: typer.Typer) -> None:
    app.command(help=HELP)(grouped(replan))
    app.command(help=HELP_DECISIONS)(grouped(decisions))


def replan(
    router: Router,
    targets: Targets,
    attainment: Annotated[float, typer.Option(min=0.01, max=0.999, help="Share that shall meet both.")] = 0.9,
    act: Annotated[bool, typer.Option("--act", help="Have workers change, instead of only saying so.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Look once.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = EVERY_S,
    window: Annotated[float, typer.Option(min=1, help="Seconds that it looks back.")] = WINDOW_S,
    most_changes: Annotated[int, typer.Option(min=1, max=8, help="Workers that may change at once.")] = MOST_CHANGES,
    most_devices: Annotated[
        int | None,
        typer.Option(
            min=2, max=4096, help="GPUs that all workers may take: pools grow and shrink.", show_default=False
        ),
    ] = None,
    policy: Annotated[
        Policy, typer.Option(help="Whose rule decides: kvrelay's, or distserve's, to compare with.")
    ] = "kvrelay",
    as_json: JsonOption = False,
) -> None:
    from kvrelay.client.types import KvrelayError
    from kvrelay.replan.replanner import NotYet, OtherCluster, begin
    from placement.catalogs.base import PlanError
    from placement.plan import Slo
    from placement.simulator.cluster import SetupError

    with exit_codes(as_json, wrong=(PlanError,), interrupted="it looks no more"), refusals(as_json):
        given = targets.given_s()
        if not given:
            raise CliError("no targets: give --ttft, --tpot or both", USAGE)
        if policy == "distserve" and most_devices is not None:
            raise CliError("--most-devices is for --policy kvrelay: distserve has no rule for fewer devices", USAGE)
        os.nice(NICE)
        asked = Asked(
            slo=Slo(**given, attainment=attainment),
            acts=act,
            most_changes=most_changes,
            most_devices=most_devices,
            policy=policy,
            window_s=window,
        )
        with ExitStack() as stack:
            clients = [stack.enter_context(router.client_of(each)) for each in router.endpoints()]
            replanner: Replanner | None = None
            while True:
                try:
                    replanner = replanner or begin(clients, asked)
                    if replanner is None:
                        raise CliError(
                            f"somebody else has the workers of {router.endpoint} change already: leave --act out"
                        )
                    _show(asdict(replanner.look()), as_json)
                except OtherCluster as error:
                    note(str(error))
                    replanner = None  # its lock goes with it
                except (NotYet, SetupError) as error:
                    if once:
                        raise CliError(str(error)) from None
                    note(str(error))
                except KvrelayError as error:  # a router may be back at the next look
                    if once or error.code in REFUSED:
                        raise
                    note(f"error: {error.message}")
                if once:
                    return
                time.sleep(every)


def decisions(router: Router, last: Last = 20, as_json: JsonOption = False) -> None:
    with refusals(as_json):
        entries = _journal_at(router).last(last)
    if as_json:
        print_json(entries)
        return
    if not entries:
        note(f"nothing was decided for {router.endpoint}; see kvrelay replan --help")
    for entry in entries:
        _show(entry, as_json=False)


def _journal_at(router: Router) -> Journal:
    """Of the cluster that is there, or was. Raises KvrelayError: it is there, and does not let us in."""
    from kvrelay.client.types import KvrelayError
    from kvrelay.replan.journal import journal_of, last_journal_at

    try:
        with router.client() as client:
            return journal_of(client.status(timeout_s=ANSWER_TIMEOUT_S), router.endpoint)
    except KvrelayError as error:
        if error.code in REFUSED:
            raise
        return last_journal_at(router.endpoint)


def _show(entry: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(entry)
        return
    for line in lines_of(entry):
        print(line)


def lines_of(entry: dict[str, Any]) -> Iterator[str]:
    """For people."""
    from kvrelay.replan.journal import changes_of

    rate = f"{entry['rate']:g}/s  " if entry["requests"] else ""
    yield f"{entry['at']}  {rate}{entry['reason']}"
    for line in changes_of(entry):
        yield f"  {line}"
