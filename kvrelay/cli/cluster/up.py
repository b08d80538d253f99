"""`kvrelay up`: from a spec, or from flags, to a cluster that serves. It owns the flags and which process does what.

    foreground   this process starts Ray (or joins one), shows progress, serves until Ctrl-C, ends all it started
    --detach     the same in a background process of its own session, whose progress is relayed here until it is ready
    --detach --address   the actors are left in the Ray that was joined; no process of ours stays

Exit codes: 0 stopped when asked (`down`, SIGTERM, SIGHUP); 1 it could not start or serve; 2 the spec or a flag is
wrong; 130 Ctrl-C.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvrelay.cli.cluster import secrets, state
from kvrelay.cli.console import USAGE, CliError, JsonOption, note
from kvrelay.cli.groups import grouped
from kvrelay.cli.spec.wanted import RoleCounts, SpecArgument, build
from kvrelay.cli.spec_flags import ClusterFlags, PoolFlags, RouterFlags, SpecChanges, TransferFlags

HELP = """Start a cluster and serve until Ctrl-C.

Give a spec file, or --model with how many workers of each kind. Without --address kvrelay starts a Ray of its own on
this machine and ends it afterwards; with --address it joins one that runs, on as many machines as that has.

Examples:

  kvrelay up --model ./model --prefill 1 --decode 1

  kvrelay up configs/local-2p2d.yaml --port 50052

  kvrelay up --model Qwen/Qwen3-0.6B --detach && kvrelay generate "Hello" && kvrelay down

  kvrelay up cluster.yaml --address auto --detach
"""


def register(app: typer.Typer) -> None:
    app.command(help=HELP)(grouped(up))


def up(
    cluster: ClusterFlags,
    pool: PoolFlags,
    router: RouterFlags,
    transfer: TransferFlags,
    counts: RoleCounts,
    spec: SpecArgument = None,
    address: Annotated[str | None, typer.Option(help="Join this Ray: auto, or HOST:PORT.")] = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return when ready; end it with kvrelay down.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="As kvrelay doctor: what is bad here ends it; measures the cluster when it is ready."
        ),
    ] = False,
    log_dir: Annotated[
        Path | None,
        typer.Option(help="Where every process logs. Default: with the state, or with --address where Ray keeps it."),
    ] = None,
    as_json: JsonOption = False,
    report_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    from cluster.spec.errors import SpecError
    from cluster.spec.resolve import why_not_served

    changes = SpecChanges(cluster=cluster, router=router, pools=pool, transfer=transfer)
    try:
        built = build(spec, changes, counts.asked)
        if why := why_not_served(built.spec) or _why_not_replanned(built.spec, is_left=detach and address is not None):
            raise SpecError(why)
    except SpecError as error:
        raise CliError(str(error), USAGE) from None
    built = built.with_found_model(must_be_here=address is None).with_tokens_file()
    wanted, drawn = built.spec, secrets.draw(built.spec, must_be_here=address is None)
    if why := secrets.why_overheard(wanted, is_joined=address is not None):
        note(f"note: {why}")
    state.check_name(wanted.name, is_joined=address is not None)
    if detach and address is None and report_fd is None:
        from kvrelay.cli.cluster import daemon

        raise typer.Exit(daemon.start_and_wait(wanted.name, as_json))
    from kvrelay.cli.cluster import serving, views

    secrets.keep_from_children()
    view = views.choose(as_json=as_json, report_fd=report_fd)
    mode = "daemon" if report_fd is not None else "joined" if address and detach else "foreground"
    logs = str(log_dir.absolute()) if log_dir is not None else "" if address else str(state.log_dir(wanted.name))
    raise typer.Exit(
        serving.serve(
            built,
            address=address,
            drawn=drawn,
            log_dir=logs,
            mode=mode,  # type: ignore[arg-type]
            view=view,
            checks=check,
        )
    )


def _why_not_replanned(spec: Any, *, is_left: bool) -> str:
    if spec.replan == "off" or not is_left:
        return ""
    return (
        f"replan is {spec.replan}, and with --address and --detach no process of kvrelay's stays to do it; leave "
        "--detach out, or run `kvrelay replan` beside the cluster"
    )
