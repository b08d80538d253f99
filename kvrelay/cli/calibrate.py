"""`kvrelay calibrate`: measures a running cluster and writes its profile. What is measured: kvrelay/calibrate/.

Tables go to stdout and the bar to stderr; with --json stdout is the profile.
Exit codes: 0 done; 1 the cluster cannot be reached or measured; 2 wrong usage; 130 interrupted.
"""

from __future__ import annotations

import asyncio
import os
import platform
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from kvrelay.calibrate.calibration import CalibrationError, calibrate
from kvrelay.calibrate.effort import QUICK, USUAL, Effort
from kvrelay.calibrate.probes import ProbeError
from kvrelay.cli.console import FAILURE, INTERRUPTED, USAGE, CliError, JsonOption, note, print_json, report
from kvrelay.cli.generate import EndpointOption, SecretOption, report_error
from kvrelay.cli.plan import progress
from kvrelay.client.client import DEFAULT_ENDPOINT, AsyncClient
from kvrelay.client.types import KvrelayError
from placement.latency.profile import Profile, ProfileLatency
from placement.latency.profile_file import profile_object, write_profile

HELP = """Measure a running cluster: how long prefill, decode and handoff take.

It sends random prompts of several lengths, alone and together, and reads from the answers how long each phase took:
a couple of minutes on a cluster that nobody else uses meanwhile. Where prefill and decode share a machine it also
measures by how much they slow each other. Some points are kept out of the tables; what the tables say of those is
the error that the planner goes by.

The profile is for kvrelay plan --profile, kvrelay simulate --profile and kvrelay verify --profile.

Examples:

  kvrelay calibrate --out profile.json

  kvrelay calibrate --endpoint 10.0.0.7:50051 --quick --json
"""


def register(app: typer.Typer) -> None:
    app.command("calibrate", help=HELP)(calibrate_command)


def calibrate_command(
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    out: Annotated[Path, typer.Option(help="Where to write the profile.")] = Path("profile.json"),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer points, looked at fewer times: half a minute.")] = False,
    repeats: Annotated[int | None, typer.Option(help="How often each point is looked at. Default: 5.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of the prompts, which must be new to the cluster. Default: another each time.")
    ] = None,
    no_progress: Annotated[bool, typer.Option("--no-progress", help="Draw no progress bar.")] = False,
    secret: SecretOption = "",
    as_json: JsonOption = False,
) -> None:
    try:
        profile = _measure(endpoint, out, quick, repeats, seed, secret, show=not no_progress)
    except (CliError, CalibrationError, ProbeError) as error:
        raise typer.Exit(report(_cli_error(error), as_json)) from None
    except KvrelayError as error:
        raise typer.Exit(report_error(error, as_json)) from None
    except KeyboardInterrupt:
        raise typer.Exit(report(CliError("interrupted; nothing was written", INTERRUPTED), as_json)) from None
    if as_json:
        print_json(profile_object(profile) | {"saved": str(out)})
        return
    for table in tables(profile):
        Console().print(table)
    print(f"saved to {out}")
    note(f"plan with it: kvrelay plan --profile {out} ...; check it: kvrelay verify --profile {out} ...")


def _cli_error(error: Exception) -> CliError:
    return error if isinstance(error, CliError) else CliError(str(error), FAILURE)


def _measure(
    endpoint: str, out: Path, quick: bool, repeats: int | None, seed: int | None, secret: str, *, show: bool
) -> Profile:
    if repeats is not None and repeats < 1:
        raise CliError(f"--repeats is {repeats}; give 1 or more", USAGE)
    if seed is not None and seed < 0:
        raise CliError(f"--seed is {seed}; give 0 or more", USAGE)
    seed = secrets.randbits(32) if seed is None else seed
    _check_writable(out)
    effort = QUICK if quick else USUAL
    effort = replace(effort, repeats=repeats) if repeats is not None else effort
    before = os.getloadavg()[0]
    with progress(show=show) as on_progress:
        profile = asyncio.run(_calibrate(endpoint, secret, effort, seed, on_progress))
    load = {"load_average_before": round(before, 2), "load_average_after": round(os.getloadavg()[0], 2)}
    profile = replace(profile, notes={**profile.notes, **load}, name=out.name)
    write_profile(profile, out)
    return profile


def _check_writable(out: Path) -> None:
    """Before minutes are spent."""
    folder = out.parent
    if out.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise CliError(f"--out is {out}, where no file can be written; give another", USAGE)


async def _calibrate(endpoint: str, secret: str, effort: Effort, seed: int, on_progress: Any) -> Profile:
    from importlib.metadata import version

    async with AsyncClient(endpoint, secret=secret) as client:
        return await calibrate(
            client,
            effort=effort,
            seed=seed,
            machine=machine(endpoint),
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


def tables(profile: Profile) -> list[Table]:
    """What a person wants to see of it: times of typical steps, and how far off the tables were."""
    latency = ProfileLatency(profile)
    prefill = _table("Prefill", "tokens in a step", "cached before", "ms", "tokens/s", "table ms", "")
    for p in profile.prefill:
        start = p.chunks[0][1]
        table_s = latency.prefill_s(p.chunks) - profile.prefill_overhead_s
        what = f"{len(p.chunks)} x {p.chunks[0][0]}" if len(p.chunks) > 1 else f"{p.tokens}"
        prefill.add_row(what, f"{start}", _ms(p.seconds), f"{p.tokens / p.seconds:.0f}", _ms(table_s), _held(p))
    decode = _table("Decode", "requests", "context tokens", "ms a step", "tokens/s", "table ms", "")
    for d in profile.decode:
        table_s = latency.decode_line(d.batch_size, d.context_tokens).step_s
        sizes = (f"{d.batch_size}", f"{d.context_tokens}")
        decode.add_row(*sizes, _ms(d.seconds), f"{d.batch_size / d.seconds:.0f}", _ms(table_s), _held(d))
    handoff = _table("Handoff", "tokens", "MB", "ms moving", "GB/s", "ms not hidden")
    for t in profile.transfer:
        speed = f"{t.bytes / t.seconds / 1e9:.2f}" if t.seconds else "-"
        handoff.add_row(f"{t.tokens}", f"{t.bytes / 1e6:.2f}", _ms(t.seconds), speed, _ms(t.exposed_s))
    rest = _table("Between", "", "")
    rest.add_row("two prefill steps (ms)", _ms(profile.prefill_overhead_s))
    rest.add_row("two processes, one way (ms)", _ms(profile.message_s))
    rest.add_row("a handoff, beside its bytes (ms)", _ms(profile.handoff_s))
    rest.add_row("client and router, both ways (ms)", _ms(profile.client_s))
    for s in profile.slowdown:
        both = f"prefill {s.prefill:.2f}, decode {s.decode:.2f} times as long"
        rest.add_row(f"both at once, {s.batch_size} requests decoding", both)
    error = profile.error
    wrong = f"prefill {error.prefill:.1%}, decode {error.decode:.1%}, handoff {error.transfer:.1%}"
    rest.add_row("error, nine in ten of the points held out", wrong)
    return [prefill, decode, *([handoff] if profile.transfer else []), rest]


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, show_header=any(columns))
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
    return table


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f}"


def _held(point: Any) -> str:
    return "held out" if point.held_out else ""
