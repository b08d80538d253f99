"""`kvrelay calibrate`: measures a running cluster and writes its profile. What is measured: kvrelay/calibrate/.

Tables go to stdout and the bar to stderr; with --json stdout is the profile.
Exit codes: 0 done; 1 the cluster cannot be reached or measured; 2 wrong usage; 130 interrupted.
"""

from __future__ import annotations

import asyncio
import math
import os
import platform
import secrets
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kvrelay.calibrate.calibration import CalibrationError, calibrate
from kvrelay.calibrate.correcting import check_measured, corrected_by
from kvrelay.calibrate.effort import QUICK, USUAL, Effort
from kvrelay.calibrate.probes import ProbeError
from kvrelay.calibrate.tables import profile_tables
from kvrelay.cli.connection import Router, refusals
from kvrelay.cli.console import FAILURE, USAGE, CliError, JsonOption, NoProgressOption, exit_codes, note, print_json
from kvrelay.cli.groups import grouped
from kvrelay.cli.planning.written import check_writable
from kvrelay.cli.progress import OnProgress, progress
from kvrelay.replan.replanner import added
from placement.latency.profile import Profile, ProfileError
from placement.latency.profile_file import profile_object, read_profile, write_profile

HELP = """Measure a running cluster: how long prefill, decode and handoff take.

It sends random prompts of several lengths, alone and together, and reads from the answers how long each phase took:
some minutes on a cluster that nobody else uses meanwhile. Where prefill and decode share a machine it also
measures by how much they slow each other. Then it has all of them at work, at several rates over and over for some
minutes: how much longer steps take then, how much of that repeats, and how much the machine swings from minute to
minute, widens what is predicted (--minutes: with more of them it is known better).

A cluster of one mixed worker is measured, too: its steps of both phases instead of handoffs, and no load. Some points
are kept out of the tables; what the tables say of those is an error that the planner goes by.

With --correct nothing is sent: what a profile says of steps under load is fitted again, to the requests that the
running cluster has served of late, minute by minute. Do that every now and then, and the profile follows the machine.

The profile is for kvrelay plan --profile, kvrelay simulate --profile and kvrelay verify --profile.

Examples:

  kvrelay calibrate --out profile.json

  kvrelay calibrate --endpoint 10.0.0.7:50051 --quick --json

  kvrelay calibrate --correct profile.json --out profile.json
"""


def register(app: typer.Typer) -> None:
    app.command("calibrate", help=HELP)(grouped(calibrate_command))


def calibrate_command(
    router: Router,
    out: Annotated[Path, typer.Option(help="Where to write the profile.")] = Path("profile.json"),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer points, looked at fewer times: a minute.")] = False,
    repeats: Annotated[int | None, typer.Option(help="How often each point is looked at. Default: 5.")] = None,
    minutes: Annotated[
        float | None, typer.Option(help="So long all workers are at work, at several rates. 0: not. Default: 3.")
    ] = None,
    correct: Annotated[
        Path | None,
        typer.Option(
            help="Send nothing: fit this profile to what the cluster has served of late, and write it to --out."
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of the prompts, which must be new to the cluster. Default: another each time.")
    ] = None,
    no_progress: NoProgressOption = False,
    as_json: JsonOption = False,
) -> None:
    ended = exit_codes(as_json, wrong=(ProfileError,), interrupted="interrupted; nothing was written")
    with ended, refusals(as_json):
        effort = _effort(QUICK if quick else USUAL, repeats, minutes)
        if correct is not None:
            profile = _correct(router, correct, out)
        else:
            profile = _measure(router, out, effort, _seed(seed), show=not no_progress)
    if as_json:
        print_json(profile_object(profile) | {"saved": str(out)})
        return
    for table in profile_tables(profile):
        Console().print(table)
    print(f"saved to {out}")
    others = " --profile PAIR" if profile.is_mixed else ""  # of a prefill and a decode worker
    note(f"plan with it: kvrelay plan --profile {out}{others} ...; check it: kvrelay verify --profile {out} ...")


def _effort(usual: Effort, repeats: int | None, minutes: float | None) -> Effort:
    if repeats is not None and repeats < 1:
        raise CliError(f"--repeats is {repeats}; give 1 or more", USAGE)
    if minutes is not None and not 0 <= minutes < math.inf:
        raise CliError(f"--minutes is {minutes:g}; give 0 or more", USAGE)
    return replace(
        usual,
        repeats=usual.repeats if repeats is None else repeats,
        minutes=usual.minutes if minutes is None else minutes,
    )


def _seed(seed: int | None) -> int:
    if seed is not None and seed < 0:
        raise CliError(f"--seed is {seed}; give 0 or more", USAGE)
    return secrets.randbits(32) if seed is None else seed


def _measure(router: Router, out: Path, effort: Effort, seed: int, *, show: bool) -> Profile:
    check_writable("--out", out)
    before = os.getloadavg()[0]
    try:
        with progress(show=show) as on_progress:
            profile = asyncio.run(_calibrate(router, effort, seed, on_progress))
    except (CalibrationError, ProbeError) as error:
        raise CliError(str(error), FAILURE) from None
    load = {"load_average_before": round(before, 2), "load_average_after": round(os.getloadavg()[0], 2)}
    profile = replace(profile, notes={**profile.notes, **load}, name=out.name)
    _write(profile, out)
    return profile


def _correct(router: Router, path: Path, out: Path) -> Profile:
    """With what was served since the cluster began, as far as its routers keep it."""
    check_writable("--out", out)
    known = read_profile(path)
    try:
        with ExitStack() as stack:
            clients = [stack.enter_context(router.client_of(each)) for each in router.endpoints()]
            check_measured(known, clients[0].model_info(), clients[0].status())
            load = added([client.load() for client in clients])
        profile = replace(corrected_by(known, load), name=out.name)
    except CalibrationError as error:
        raise CliError(str(error), FAILURE) from None
    _write(profile, out)
    return profile


def _write(profile: Profile, out: Path) -> None:
    try:
        write_profile(profile, out)
    except OSError as error:
        raise CliError(f"--out is {out}, which cannot be written ({error.strerror}); give another", FAILURE) from None


async def _calibrate(router: Router, effort: Effort, seed: int, on_progress: OnProgress) -> Profile:
    from importlib.metadata import version

    async with router.async_client() as client:
        return await calibrate(
            client,
            effort=effort,
            seed=seed,
            machine=machine(router.endpoint),
            commit=f"kvrelay {version('kvrelay')}",
            on_progress=on_progress,
        )


def machine(endpoint: str) -> dict[str, Any]:
    """Of the cluster, where it runs here; else only where it is."""
    host = endpoint.rpartition(":")[0]
    if host not in ("127.0.0.1", "localhost", "[::1]", platform.node()):
        return {"host": host}
    return {"host": platform.node(), "cpu": _cpu_name(), "cores": len(os.sched_getaffinity(0))}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
