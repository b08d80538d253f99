"""`kvrelay doctor`: whether this machine, a spec and a running cluster are as they should be. What is checked:
kvrelay/doctor/. It shows and decides the exit code.

The table goes to stdout, what it is about to do and the bar to stderr; with --json stdout is one object.
Exit codes: 0 nothing is bad; 1 something is (with --strict: or doubtful); 2 wrong usage; 130 interrupted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrelay import known_clusters
from kvrelay.cli.connection import Entrance
from kvrelay.cli.console import (
    ENDPOINT_VARIABLE,
    FAILURE,
    USAGE,
    CliError,
    JsonOption,
    NoProgressOption,
    exit_codes,
    note,
    print_json,
)
from kvrelay.cli.groups import grouped
from kvrelay.cli.progress import progress

if TYPE_CHECKING:
    from cluster.spec.assumed import Assumed
    from kvrelay.doctor.finding import Finding

AT_MOST_S = 60.0
PIPED_WIDTH = 160  # columns; a program or a file cuts nothing
HERE = ("127.0.0.1", "localhost", "[::1]")

HELP = """Check this machine, a spec and a running cluster, and say how to mend what is wrong.

Without a cluster: versions, CPU and kernels, GPUs, limits, clock, other work; with SPEC also whether it fits: cores,
memory, ports, and with --address what that Ray has. Of a cluster that runs (--endpoint, or the one that was started
from here) also every worker's state and clock, and what a few small requests through each pair of workers measure: the
link's GB/s and latency, a prefill and a decode step. They are held against what the plan assumed (a spec that
kvrelay plan wrote, or --profile) and against each other.

Examples:

  kvrelay doctor

  kvrelay doctor plan/cluster.yaml

  kvrelay doctor plan/cluster.yaml --endpoint 10.0.0.5:50051 --strict --json
"""


def register(app: typer.Typer) -> None:
    app.command(help=HELP)(grouped(doctor))


def doctor(
    entrance: Entrance,
    spec: Annotated[Path | None, typer.Argument(help="A cluster spec, YAML, that shall run or runs.")] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(envvar=ENDPOINT_VARIABLE, help="host:port of a router. Default: that started from here."),
    ] = None,
    address: Annotated[str | None, typer.Option(help="The Ray that SPEC is to join: auto, or HOST:PORT.")] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Hold workers against what kvrelay calibrate measured, and not against SPEC.")
    ] = None,
    live: Annotated[
        bool | None, typer.Option("--live/--no-live", help="Measure a running cluster. Default: where there is one.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, help="To measure at most.")] = AT_MOST_S,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 for what is doubtful, too.")] = False,
    no_progress: NoProgressOption = False,
    as_json: JsonOption = False,
) -> None:
    from kvrelay.doctor.finding import is_failed, plain
    from kvrelay.doctor.table import summary

    with exit_codes(as_json, interrupted="interrupted"):
        wanted, assumed = _read(spec, profile, address)
        where = _endpoint(endpoint, wanted, live)
        findings = [] if _is_elsewhere(where) and wanted is None else _static(wanted, address, is_serving=bool(where))
        if where:
            findings += measured(entrance, where, wanted, assumed, seconds, show=not (no_progress or as_json))
        is_bad = is_failed(findings, strict=strict)
        if as_json:
            print_json({"ok": not is_bad, "summary": summary(findings), "checks": plain(findings)})
        else:
            show(findings)
    if is_bad:
        raise typer.Exit(FAILURE)


def _read(path: Path | None, profile: Path | None, address: str | None) -> tuple[Any, Mapping[str, Assumed]]:
    """The spec, if one is given, and what workers are held against."""
    from cluster.spec.errors import SpecError
    from cluster.spec.load import load_spec
    from kvrelay.doctor.assumed import of_profile, of_spec
    from placement.latency.base import LatencyError
    from placement.latency.profile_file import read_profile

    if address is not None and path is None:
        raise CliError("--address is for a spec that is to run there; give SPEC, too", USAGE)
    try:
        spec = load_spec(path) if path is not None else None
        given = of_profile(read_profile(profile)) if profile is not None else of_spec(spec) if spec is not None else {}
    except (SpecError, LatencyError) as error:
        raise CliError(str(error), USAGE) from None
    return spec, given


def _endpoint(given: str | None, spec: Any, live: bool | None) -> str:
    """Of the cluster that is measured; empty: none is."""
    if live is False:
        return ""
    if given:
        return given
    running = [cluster for cluster in known_clusters.alive() if cluster.endpoints]
    if spec is not None:
        running = [cluster for cluster in running if cluster.name == spec.name]
    if len(running) > 1:
        names = ", ".join(cluster.name for cluster in running)
        raise CliError(f"{names} run here; say which one by --endpoint, or give --no-live", USAGE)
    if not running and live:
        raise CliError("no cluster that was started from here runs; give --endpoint", USAGE)
    return running[0].endpoints[0] if running else ""


def _is_elsewhere(endpoint: str) -> bool:
    return bool(endpoint) and endpoint.rpartition(":")[0] not in HERE


def _static(spec: Any, address: str | None, *, is_serving: bool) -> list[Finding]:
    from kvrelay.doctor.static import static_checks

    note("looking at this machine; kernels are built at first use, which takes a minute")
    return static_checks(spec, address=address, is_serving=is_serving)


def measured(
    entrance: Entrance, endpoint: str, spec: Any, assumed: Mapping[str, Assumed], at_most_s: float, *, show: bool
) -> list[Finding]:
    """Of the cluster that answers there, and is of this spec if one is known. That none answers is a finding, too."""
    from kvrelay.client.client import AsyncClient
    from kvrelay.client.types import KvrelayError
    from kvrelay.doctor.live.checks import live_checks, unanswered

    replicas = {pool.label: pool.replicas for pool in spec.pools} if spec is not None else {}

    async def check() -> list[Finding]:
        access = entrance.access()
        async with AsyncClient(endpoint, token=access.token, tls=access.tls) as client:
            return await live_checks(
                client, assumed=assumed, replicas=replicas, at_most_s=at_most_s, tell=note, on_progress=on_progress
            )

    try:
        with progress(show=show) as on_progress:
            return asyncio.run(check())
    except KvrelayError as error:
        return [unanswered(endpoint, error)]


def show(findings: list[Finding], *, to_stderr: bool = False) -> None:
    from rich.console import Console

    from kvrelay.doctor.table import findings_table, summary

    console = Console(stderr=to_stderr)
    console = console if console.is_terminal else Console(stderr=to_stderr, width=PIPED_WIDTH)
    console.print(findings_table(findings))
    console.print(summary(findings))
