"""`kvrelay bench`: plays a trace or random lengths against a router and prints latencies, goodput and handoffs.

It owns the flags (named after `vllm bench serve`), what is printed and the exit code. Tables go to stdout and the
progress bar to stderr; with --json stdout is one object.

Exit codes: 0 done; 1 the server cannot be reached, or a request failed (unless --allow-failures); 2 wrong usage;
130 interrupted (every request that is out is cancelled).
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kvrelay.bench import metrics, results
from kvrelay.bench.openai import OpenAITarget
from kvrelay.bench.options import PlayOptions, WorkloadOptions
from kvrelay.bench.report import tables
from kvrelay.bench.run import run
from kvrelay.bench.workload import WorkloadError
from kvrelay.cli.connection import Router, refusals
from kvrelay.cli.console import JsonOption, note
from kvrelay.cli.groups import Flags, grouped
from kvrelay.cli.measuring import series
from kvrelay.cli.measuring.series import SeriesFlags
from kvrelay.cli.progress import request_progress
from kvrelay.client.access import KEY_VARIABLE


class Backend(StrEnum):
    kvrelay = "kvrelay"
    openai = "openai"


class BenchCommand(typer.core.TyperCommand):
    """Lets --goodput and --compare take several values after one flag, as `vllm bench serve` does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return list(super().parse_args(ctx, repeat_flag(repeat_flag(args, "--goodput"), "--compare")))


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

  kvrelay bench --backend openai --base-url http://127.0.0.1:8000/v1 --num-prompts 100 --request-rate 4

  kvrelay bench --compare 127.0.0.1:50051 http://127.0.0.1:9000/v1 --rates 1,2,4,8 --num-prompts 100
  --goodput ttft:500 tpot:50 --save-result
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What is printed of the answers."""

    goodput: Annotated[list[str] | None, typer.Option(help="Targets in ms: --goodput ttft:500 tpot:50 e2el:5000.")] = (
        None
    )
    percentile_metrics: Annotated[str, typer.Option(help="Of ttft, tpot, itl, e2el.")] = "ttft,tpot,itl,e2el"
    metric_percentiles: Annotated[str, typer.Option(help="Which percentiles.")] = "50,90,99"

    def parsed(self) -> tuple[dict[str, float], list[str], list[float]]:
        """Targets in seconds, metrics, percentiles. Raises MetricsError."""
        return (
            metrics.parse_goodput(self.goodput or ()),
            metrics.parse_metrics(self.percentile_metrics),
            metrics.parse_percentiles(self.metric_percentiles),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    """Another server than a router of ours."""

    backend: Annotated[
        Backend, typer.Option(help="kvrelay: a router, over gRPC. openai: any server of OpenAI's API, over HTTP.")
    ] = Backend.kvrelay
    base_url: Annotated[
        str | None, typer.Option(help=f"With openai: such as http://127.0.0.1:8000/v1. The key: {KEY_VARIABLE}'s.")
    ] = None
    model: Annotated[str | None, typer.Option(help="With openai: what it is called. Default: the first served.")] = None
    vocab_size: Annotated[
        int | None, typer.Option(help="With openai: prompts' token ids are below it, the same for any server. 32000.")
    ] = None

    def given(self, *keys: str) -> dict[str, Any]:
        return {key: value for key in keys if (value := getattr(self, key)) is not None}

    def target(self, endpoint: str) -> str | OpenAITarget:
        """Raises WorkloadError."""
        given = self.given("base_url", "model", "vocab_size")
        if self.backend is Backend.kvrelay:
            for key in given:
                raise WorkloadError(f"--{key.replace('_', '-')} goes with --backend openai; give both or neither")
            return endpoint
        if self.base_url is None:
            raise WorkloadError("--backend openai needs --base-url, such as http://127.0.0.1:8000/v1")
        return OpenAITarget(**given)


WORKLOAD = Flags(
    defaults={"num_prompts": 1000, "random_input_len": 1024, "random_output_len": 128},
    help={
        "trace": "Azure CSV, any CSV with lengths, or Mooncake JSONL: its lengths instead of random ones.",
        "trace_timestamps": "Send at the trace's own times instead of --request-rate.",
        "seed": "The same seed, the same workload; a new one, prompts nobody cached.",
    },
)
PLAYING = Flags(
    *("max_concurrency", "ignore_eos", "temperature", "num_warmups", "timeout_s"), flags={"timeout_s": "--timeout"}
)


def register(app: typer.Typer) -> None:
    app.command(cls=BenchCommand, help=HELP)(grouped(bench))


def bench(
    router: Router,
    other: Other,
    workload: Annotated[WorkloadOptions, WORKLOAD],
    playing: Annotated[PlayOptions, PLAYING],
    figures: Figures,
    several: SeriesFlags,
    allow_failures: Annotated[bool, typer.Option("--allow-failures", help="Exit 0 though requests failed.")] = False,
    save_result: Annotated[bool, typer.Option("--save-result", help="Write figures and requests to a file.")] = False,
    result_dir: Annotated[Path, typer.Option(help="Where --save-result writes.")] = Path(),
    no_progress: Annotated[bool, typer.Option("--no-progress", "--disable-tqdm", help="Draw no progress bar.")] = False,
    as_json: JsonOption = False,
) -> None:
    wrong, interrupted = (WorkloadError, metrics.MetricsError), "interrupted; all requests were cancelled"
    with refusals(as_json, wrong=wrong, interrupted=interrupted):
        shown = figures.parsed()
        if save_result:
            results.make_directory(result_dir)
        watch = partial(request_progress, show=not no_progress)
        if several.is_asked:
            of_openai = other.given("model", "vocab_size")
            target = router.endpoint if several.compare else other.target(router.endpoint)
            asked = several.series(target, of_openai, workload.request_rate, shown[0])
            result = series.play(asked, workload, playing, router.access(), show=not no_progress)
            saved, failed = _save_series(result, result_dir) if save_result else (None, False)
            series.show(result, saved, as_json)
            failed |= not allow_failures and any(turn["failed"] for turn in result["turns"])
            raise typer.Exit(1 if failed else 0)
        target = other.target(router.endpoint)
        played = run(target, workload, playing, access=router.access(), watch=watch)
        model, outcomes, duration_s = asyncio.run(played)
    if len(outcomes) < (workload.num_prompts or 0):
        note(f"{workload.trace} has {len(outcomes)} requests; played those")
    settings = results.settings_object(workload, playing)
    where = target if isinstance(target, str) else target.base_url
    result = {"endpoint": where, "model": model.name, "settings": settings}
    result |= metrics.summarise(outcomes, duration_s, *shown)
    is_lost = False
    if save_result:
        try:
            result["saved"] = str(results.save(result_dir, result, outcomes))
        except OSError as error:  # a full disk takes the file, not the figures
            note(f"error: the result cannot be saved in {result_dir}: {(error.strerror or str(error)).lower()}")
            is_lost = True
    _show(result, as_json)
    if is_lost or (result["failed"] and not allow_failures):
        raise typer.Exit(1)


def _save_series(result: dict[str, Any], directory: Path) -> tuple[Path | None, bool]:
    """Where it is, and whether it is nowhere: a full disk takes the file, not the figures."""
    try:
        return results.save_series(directory, result), False
    except OSError as error:
        note(f"error: the result cannot be saved in {directory}: {(error.strerror or str(error)).lower()}")
        return None, True


def _show(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(result))
        return
    console = Console()
    for table in tables(result):
        console.print(table)
    if "saved" in result:
        print(f"saved to {result['saved']}")
