"""`kvrelay verify`: plays a plan's workload against a live cluster and shows predicted against measured.

Tables go to stdout and the bar to stderr; with --json stdout is one object. See placement/checks/verification.py.
Exit codes: 0 done, however far off the prediction was; 1 the cluster cannot be reached, or a request failed; 2 wrong
usage, or the cluster is not the one that is predicted; 130 interrupted.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from kvrelay.bench.metrics import Outcome
from kvrelay.bench.run import Settings
from kvrelay.calibrate import verifying
from kvrelay.cli.console import INTERRUPTED, USAGE, CliError, JsonOption, print_json, report
from kvrelay.cli.generate import EndpointOption, SecretOption, report_error
from kvrelay.cli.plan import progress
from kvrelay.client.client import DEFAULT_ENDPOINT, AsyncClient
from kvrelay.client.types import KvrelayError
from placement.catalogs.base import PlanError
from placement.checks.margin import Margin, load_margin, save_margin
from placement.checks.verification import Row, Verification
from placement.latency.base import LatencyError
from placement.plan import Slo
from placement.simulator.cluster import SetupError
from placement.workload.traces import WorkloadError

ASKED_WRONGLY = (PlanError, LatencyError, SetupError, WorkloadError)
NAMES = {"ttft": "Time to first token", "tpot": "Time per output token", "e2e": "End to end"}
NUM_PROMPTS, NUM_WARMUPS = 200, 6

HELP = """Play a plan's workload against a live cluster: predicted against measured.

The very same requests, of the same lengths at the same times, are simulated and sent. For every percentile, the share
within the targets and each phase of a request it prints what was predicted, with its interval, what was measured, and
by how much it was off. The error is kept in margin.json beside the plan: kvrelay plan --margin FILE goes by it.

Give a plan (plan.json that kvrelay plan --out wrote), or a profile (of kvrelay calibrate) and a workload.

Examples:

  kvrelay verify plan/plan.json --endpoint 127.0.0.1:50051

  kvrelay verify --profile profile.json --trace configs/workloads/azure-conv-2023.csv --trace-scale 0.25
  --request-rate 2 --ttft 500 --tpot 50
"""


def register(app: typer.Typer) -> None:
    app.command(help=HELP)(verify)


def verify(
    plan: Annotated[Path | None, typer.Argument(help="plan.json of kvrelay plan --out.")] = None,
    profile: Annotated[Path | None, typer.Option(help="What kvrelay calibrate measured, instead of a plan.")] = None,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    num_prompts: Annotated[int, typer.Option(help="How many requests; of a trace, the first so many.")] = NUM_PROMPTS,
    request_rate: Annotated[float | None, typer.Option(help="Requests per second. Default: the plan's.")] = None,
    burstiness: Annotated[float | None, typer.Option(help="Shape of the gamma gaps. Default: 1.")] = None,
    trace: Annotated[Path | None, typer.Option(help="With --profile: Azure CSV, Mooncake JSONL.")] = None,
    trace_scale: Annotated[float | None, typer.Option(help="Multiply the trace's lengths. Default: 1.")] = None,
    max_input_len: Annotated[int | None, typer.Option(help="Cut prompts to this length.")] = None,
    max_output_len: Annotated[int | None, typer.Option(help="Cut outputs to this length.")] = None,
    random_input_len: Annotated[int | None, typer.Option(help="Prompt tokens of random requests.")] = None,
    random_output_len: Annotated[int | None, typer.Option(help="Output tokens of random requests.")] = None,
    random_range_ratio: Annotated[float | None, typer.Option(help="Lengths from len * (1-R) to len * (1+R).")] = None,
    ttft: Annotated[str | None, typer.Option(help="Time to first token: 250ms, 0.25s; a bare number is ms.")] = None,
    tpot: Annotated[str | None, typer.Option(help="Time per output token after it: 25ms.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of lengths and arrivals. Default: the plan's, or 0.")] = None,
    margin: Annotated[Path | None, typer.Option(help="Where the error is kept. Default: margin.json.")] = None,
    no_progress: Annotated[bool, typer.Option("--no-progress", help="Draw no progress bar.")] = False,
    secret: SecretOption = "",
    as_json: JsonOption = False,
) -> None:
    given = {
        "num_prompts": num_prompts,
        "request_rate": request_rate,
        "burstiness": burstiness,
        "trace": trace,
        "trace_scale": trace_scale,
        "max_input_len": max_input_len,
        "max_output_len": max_output_len,
        "random_input_len": random_input_len,
        "random_output_len": random_output_len,
        "random_range_ratio": random_range_ratio,
        "seed": seed,
    }
    changed = {key: value for key, value in given.items() if value is not None}
    try:
        question = _question(plan, profile, changed, ttft, tpot)
        path = margin or (plan or profile or Path()).with_name("margin.json")
        kept = load_margin(path) if path.exists() else Margin()
        found = _verified(question, endpoint, secret, show=not no_progress)
    except ASKED_WRONGLY as error:
        raise typer.Exit(report(CliError(str(error), USAGE), as_json)) from None
    except KvrelayError as error:
        raise typer.Exit(report_error(error, as_json)) from None
    except KeyboardInterrupt:
        raise typer.Exit(report(CliError("interrupted; nothing was written", INTERRUPTED), as_json)) from None
    if not found.failed:
        kept = kept.with_run(verifying.margin_run(question, found))
        _save(kept, path, as_json)
    if as_json:
        print_json(found.to_json() | {"margin": {"file": str(path), "error": kept.error, "runs": len(kept.runs)}})
    else:
        _show(found, kept, path)
    if found.failed:
        raise typer.Exit(1)


def _question(
    plan: Path | None, profile: Path | None, changed: dict[str, Any], ttft: str | None, tpot: str | None
) -> verifying.Question:
    targets = {"ttft_s": _target("--ttft", ttft), "tpot_s": _target("--tpot", tpot)}
    targets_s = {key: value for key, value in targets.items() if value is not None}
    if plan is not None and profile is not None:
        raise PlanError(f"{plan} and --profile {profile} do not go together; give one of them")
    if plan is not None:
        if "trace" in changed or "random_input_len" in changed:
            raise PlanError("--trace and --random-input-len go with --profile; a plan says its own workload")
        question = verifying.of_plan(plan, changed)
        return replace(question, slo=replace(question.slo, **targets_s)) if targets_s else question
    if profile is None:
        raise PlanError("nothing says what was predicted; give a plan.json, or --profile FILE and a workload")
    if "request_rate" not in changed:
        raise PlanError("--profile needs --request-rate, in requests per second")
    if "trace" not in changed and "random_input_len" not in changed:
        raise PlanError("--profile needs a workload; give --trace FILE, or --random-input-len and --random-output-len")
    return verifying.of_profile(profile, Settings(**changed), Slo(**targets_s))


def _target(key: str, text: str | None) -> float | None:
    from kvrelay.plan.durations import parse_duration

    if text is None:
        return None
    try:
        value: Any = parse_duration(text)
    except ValueError as error:
        raise PlanError(f"{key} is {text!r}; {error}") from None
    return float(value)


def _verified(question: verifying.Question, endpoint: str, secret: str, *, show: bool) -> Verification:
    settings = replace(question.settings, num_warmups=NUM_WARMUPS, prompt_seed=secrets.randbits(32))
    with progress(show=show) as on_progress:
        asyncio.run(_check(question, endpoint, secret))
        on_progress("simulated", 0, 1)
        prediction = verifying.foretell(question)
        on_progress("simulated", 1, 1)
        playing = verifying.play(endpoint, settings, secret=secret, watch=lambda total: _watch(total, on_progress))
        measured = asyncio.run(playing)
    return verifying.judge(question, prediction, measured)


async def _check(question: verifying.Question, endpoint: str, secret: str) -> None:
    async with AsyncClient(endpoint, secret=secret) as client:
        verifying.check_alike(question, await client.status())


@contextmanager
def _watch(total: int, on_progress: Callable[[str, int, int], None]) -> Iterator[Callable[[Outcome], None]]:
    done = 0

    def on_end(outcome: Outcome) -> None:
        nonlocal done
        done += 1
        on_progress("requests answered", done, total)

    on_progress("requests answered", 0, total)
    yield on_end


def _save(kept: Margin, path: Path, as_json: bool) -> None:
    try:
        save_margin(kept, path)
    except OSError as error:
        sentence = f"--margin is {path}, which cannot be written ({error.strerror}); give another"
        raise typer.Exit(report(CliError(sentence, USAGE), as_json)) from None


# What a person sees


def _show(found: Verification, kept: Margin, path: Path) -> None:
    console = Console()
    for table in tables(found):
        console.print(table)
    if found.failed:
        print(
            f"{found.failed} of {found.num_requests} requests failed and count as infinitely late; {path} is as it was"
        )
        return
    print(f"kept in {path}: the next plan's times may be wrong by {kept.error:.1%} (kvrelay plan --margin {path})")
    if found.is_past_knee:
        print("this run was past the knee, where times grow without end: it is kept, but does not count")


def tables(found: Verification) -> list[Table]:
    times = _table(f"{found.num_requests} requests at {found.rate:.2f}/s (ms)", "", *_COLUMNS)
    for row in found.rows:
        times.add_row(f"{NAMES[row.metric]}, P{row.percentile:g}", *_cells(row))
    wanted = _targets(found.slo)
    if wanted:
        share = found.attainment
        times.add_section()
        times.add_row(
            f"Within {wanted} (%)",
            f"{100 * share.value:.1f}",
            f"{100 * share.low:.1f} to {100 * share.high:.1f}",
            f"{100 * found.measured_attainment:.1f}",
            f"{100 * (found.measured_attainment - share.value):+.1f} points",
        )
    phases = _table("Where the time went, mean of each phase (ms)", "", "predicted", "measured", "off by")
    for name, (predicted_s, measured_s) in found.phases_s.items():
        off = f"{1000 * (measured_s - predicted_s):+.1f}"
        phases.add_row(name.replace("_", " "), f"{1000 * predicted_s:.1f}", f"{1000 * measured_s:.1f}", off)
    return [times, phases]


_COLUMNS = ("predicted", "it may be", "measured", "off by")


def _cells(row: Row) -> tuple[str, ...]:
    inside = "" if row.is_inside else " !"
    predicted = row.predicted
    return (
        f"{1000 * predicted.value:.1f}",
        f"{1000 * predicted.low:.1f} to {1000 * predicted.high:.1f}",
        f"{1000 * row.measured:.1f}",
        f"{row.error:+.1%}{inside}",
    )


def _targets(slo: Slo) -> str:
    named = {"TTFT": slo.ttft_s, "TPOT": slo.tpot_s}
    return ", ".join(f"{name} {1000 * at:g} ms" for name, at in named.items() if at != float("inf"))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
    return table
