"""`kvrelay bench`: plays a trace or random lengths against a router and prints latencies, goodput and handoffs.

It owns the flags (named after `vllm bench serve`), what is printed and the exit code. Tables go to stdout and the
progress bar to stderr; with --json stdout is one object.

Exit codes: 0 done; 1 the server cannot be reached, or a request failed (unless --allow-failures); 2 wrong usage;
130 interrupted (every request that is out is cancelled).
"""

from __future__ import annotations

import asyncio
import errno
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kvrelay.bench import metrics, workload
from kvrelay.bench.metrics import Outcome
from kvrelay.bench.report import tables
from kvrelay.bench.run import Settings, run
from kvrelay.cli.console import INTERRUPTED, USAGE, JsonOption
from kvrelay.cli.generate import EndpointOption, SecretOption, report_error
from kvrelay.client.client import DEFAULT_ENDPOINT
from kvrelay.client.types import KvrelayError

_PROGRESS_PER_S = 2  # drawing takes time from the server on a small machine


class BenchCommand(typer.core.TyperCommand):
    """Lets --goodput take several values after one flag, as `vllm bench serve` does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return list(super().parse_args(ctx, repeat_flag(args, "--goodput")))


def repeat_flag(args: list[str], flag: str) -> list[str]:
    """`--flag a b --other` as `--flag a --flag b --other`."""
    spread: list[str] = []
    inside = False
    for arg in args:
        if arg.startswith("-"):
            inside = arg == flag
            spread.append(arg)
            continue
        if inside and spread[-1] != flag:
            spread.append(flag)
        spread.append(arg)
    return spread


HELP = """Play a trace or random lengths, and print latencies and goodput.

Arrivals are Poisson (or gamma, with --burstiness) at --request-rate, whatever the answers take. Times are the client's,
from when a request was due. Exit code 1: a request failed (unless --allow-failures).

Examples:

  kvrelay bench --num-prompts 100 --request-rate 4 --random-input-len 256 --random-output-len 64

  kvrelay bench --trace configs/workloads/azure-conv-2023.csv --trace-scale 0.25 --request-rate 2
  --goodput ttft:500 tpot:50
"""


def register(app: typer.Typer) -> None:
    app.command(cls=BenchCommand, help=HELP)(bench)


def bench(
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    num_prompts: Annotated[int, typer.Option(help="How many requests; of a trace, the first so many.")] = 1000,
    request_rate: Annotated[float, typer.Option(help="Requests per second; inf sends all at once.")] = float("inf"),
    burstiness: Annotated[float, typer.Option(help="Shape of the gamma gaps: 1 is Poisson, below is burstier.")] = 1.0,
    max_concurrency: Annotated[int | None, typer.Option(help="Requests that are out at once, at most.")] = None,
    random_input_len: Annotated[int, typer.Option(help="Prompt tokens of random requests.")] = 1024,
    random_output_len: Annotated[int, typer.Option(help="Output tokens of random requests.")] = 128,
    random_range_ratio: Annotated[float, typer.Option(help="Lengths from len * (1 - R) to len * (1 + R).")] = 0.0,
    random_prefix_len: Annotated[int, typer.Option(help="Tokens that all random prompts begin with, added.")] = 0,
    trace: Annotated[
        Path | None, typer.Option(help="Azure CSV or Mooncake JSONL: its lengths instead of random ones.")
    ] = None,
    trace_timestamps: Annotated[
        bool, typer.Option("--trace-timestamps", help="Send at the trace's own times instead of --request-rate.")
    ] = False,
    trace_speedup: Annotated[float, typer.Option(help="With --trace-timestamps: so many times as fast.")] = 1.0,
    trace_scale: Annotated[float, typer.Option(help="Multiply the trace's lengths, for small machines.")] = 1.0,
    max_input_len: Annotated[int | None, typer.Option(help="Cut prompts to this length.")] = None,
    max_output_len: Annotated[int | None, typer.Option(help="Cut outputs to this length.")] = None,
    goodput: Annotated[
        list[str] | None, typer.Option(help="Targets in ms: --goodput ttft:500 tpot:50 e2el:5000.")
    ] = None,
    percentile_metrics: Annotated[str, typer.Option(help="Of ttft, tpot, itl, e2el.")] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[str, typer.Option(help="Which percentiles.")] = "50,90,99",
    seed: Annotated[int, typer.Option(help="The same seed, the same workload; a new one, prompts nobody cached.")] = 0,
    ignore_eos: Annotated[bool, typer.Option(help="Generate the whole length, as the lengths asked for need.")] = True,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    num_warmups: Annotated[int, typer.Option(help="Requests before the clock starts.")] = 0,
    timeout: Annotated[float | None, typer.Option(help="Seconds after which a request is given up.")] = None,
    allow_failures: Annotated[bool, typer.Option("--allow-failures", help="Exit 0 though requests failed.")] = False,
    save_result: Annotated[bool, typer.Option("--save-result", help="Write figures and requests to a file.")] = False,
    result_dir: Annotated[Path, typer.Option(help="Where --save-result writes.")] = Path(),
    no_progress: Annotated[bool, typer.Option("--no-progress", "--disable-tqdm", help="Draw no progress bar.")] = False,
    secret: SecretOption = "",
    as_json: JsonOption = False,
) -> None:
    settings = Settings(
        num_prompts=num_prompts,
        request_rate=request_rate,
        burstiness=burstiness,
        max_concurrency=max_concurrency,
        random_input_len=random_input_len,
        random_output_len=random_output_len,
        random_range_ratio=random_range_ratio,
        random_prefix_len=random_prefix_len,
        trace=trace,
        trace_timestamps=trace_timestamps,
        trace_speedup=trace_speedup,
        trace_scale=trace_scale,
        max_input_len=max_input_len,
        max_output_len=max_output_len,
        seed=seed,
        ignore_eos=ignore_eos,
        temperature=temperature,
        num_warmups=num_warmups,
        timeout_s=timeout,
    )
    try:
        slos_s = metrics.parse_goodput(goodput or ())
        names = metrics.parse_metrics(percentile_metrics)
        percentiles = metrics.parse_percentiles(metric_percentiles)
        if save_result:
            _make_directory(result_dir)
        running = run(endpoint, settings, secret=secret, watch=partial(_progress, show=not no_progress))
        model, outcomes, duration_s = asyncio.run(running)
    except (workload.WorkloadError, metrics.MetricsError) as error:
        report_error(KvrelayError("INVALID_ARGUMENT", str(error)), as_json)
        raise typer.Exit(USAGE) from None
    except KvrelayError as error:
        raise typer.Exit(report_error(error, as_json)) from None
    except KeyboardInterrupt:
        report_error(KvrelayError("CANCELLED", "interrupted; all requests were cancelled"), as_json)
        raise typer.Exit(INTERRUPTED) from None
    if len(outcomes) < num_prompts:
        print(f"{trace} has {len(outcomes)} requests; played those", file=sys.stderr)
    result = {"endpoint": endpoint, "model": model.name, "settings": _settings_object(settings)}
    result |= metrics.summarise(outcomes, duration_s, slos_s, names, percentiles)
    if save_result:
        result["saved"] = str(_save(result_dir, result, outcomes))
    _show(result, as_json)
    if result["failed"] and not allow_failures:
        raise typer.Exit(1)


@contextmanager
def _progress(total: int, *, show: bool) -> Iterator[Callable[[Outcome], None]]:
    """A bar on stderr; yields what takes an Outcome."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(
        *columns,
        TimeRemainingColumn(),
        console=Console(stderr=True),
        refresh_per_second=_PROGRESS_PER_S,
        disable=not show,
        transient=True,
    )
    failed = 0
    with bar:
        task = bar.add_task("requests", total=total)

        def on_end(outcome: Outcome) -> None:
            nonlocal failed
            failed += not outcome.succeeded
            bar.update(task, advance=1, description=f"requests, {failed} failed" if failed else "requests")

        yield on_end


def _settings_object(settings: Settings) -> dict[str, Any]:
    values = {name: getattr(settings, name) for name in Settings.__dataclass_fields__}
    values["trace"] = None if settings.trace is None else str(settings.trace)
    values["request_rate"] = settings.request_rate if math.isfinite(settings.request_rate) else "inf"
    return values


def _make_directory(path: Path) -> None:
    """Before the run, so that its result has a place."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise workload.WorkloadError(
            f"--result-dir is {path}, where nothing can be written ({error.strerror}); give another"
        ) from None


def _save(directory: Path, result: dict[str, Any], outcomes: list[Outcome]) -> Path:
    """Named as `vllm bench serve` names its results; every request is in it, with the times of its tokens."""
    when = datetime.now()
    model = str(result["model"]).rsplit("/", 1)[-1] or "model"
    path = directory / f"{result['settings']['request_rate']}qps-{model}-{when:%Y%m%d-%H%M%S}.json"
    requests = [
        {
            "request_id": outcome.request_id,
            "due_s": outcome.due_s,
            "ended_s": outcome.ended_s,
            "input_len": outcome.input_len,
            "output_len": outcome.output_len,
            "token_times_s": outcome.token_times_s,
            "code": outcome.code,
            "message": outcome.message,
            "phases_s": dict(outcome.timeline.phases_s) if outcome.timeline else None,
        }
        for outcome in outcomes
    ]
    path.write_text(json.dumps(result | {"date": when.isoformat(timespec="seconds"), "requests_detail": requests}))
    return path


def _show(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(result))
        return
    console = Console()
    for table in tables(result):
        console.print(table)
    if "saved" in result:
        print(f"saved to {result['saved']}")
