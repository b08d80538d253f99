"""`kvrelay plan`: how many prefill and decode workers, with which parallelism, at what cost, and how sure that is.

It owns the flags (lengths and traces named as those of `kvrelay bench`), what is printed and the exit code. The answer
goes to stdout, progress to stderr; with --json stdout is one object.

Exit codes: 0 planned; 1 it failed; 2 asked wrongly, or for what cannot be (one sentence says why); 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from kvrelay.cli.console import INTERRUPTED, USAGE, CliError, JsonOption, note, print_json, report
from placement.papers.registry import CATALOGS

PARAGRAPHS = (
    "Size the prefill and decode pools for a model, a kind of GPU, a workload and two latency targets.",
    "Say how much there may be with one of --num-gpus, --rate and --budget; what requests look like with --trace, or "
    "with --random-input-len and --random-output-len; and what is fast enough with --ttft, --tpot and --attainment. "
    "Several kinds of --hardware are mixed where that is better. A file says the same with keys named as the flags; "
    "flags win.",
    "With --out a folder is written: cluster.yaml for kvrelay up, plan.json for kvrelay verify, report.html and its "
    "plots. Exit code 2: what is asked for cannot be; one sentence says why.",
    "Examples:",
    "  kvrelay plan --model llama-3.1-8b --hardware h100-sxm --num-gpus 8 "
    "--trace configs/workloads/azure-conv-2023.csv --ttft 250ms --tpot 25ms",
    "  kvrelay plan --model ./model --hardware h100-sxm --rate 40 --random-input-len 1024 --random-output-len 128 "
    "--ttft 0.5s --tpot 40ms --objective cost --out plan",
    "  kvrelay plan configs/plans/llama-70b-chat.yaml --num-gpus 16 --json",
    "  kvrelay plan --profile profile.json --num-gpus 2 --trace configs/workloads/azure-conv-2023.csv "
    "--trace-scale 0.25 --ttft 500ms --tpot 50ms",
)
HELP = "\n\n".join(PARAGRAPHS)


def register(app: typer.Typer) -> None:
    app.command(help=HELP)(plan)


def plan(
    request: Annotated[
        Path | None, typer.Argument(metavar="SPEC", help="A plan request, YAML. See configs/plans.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="A model directory, or a name of configs/models.")] = None,
    hardware: Annotated[
        str | None, typer.Option(help="A file, or a name of configs/hardware; several with commas between them.")
    ] = None,
    num_gpus: Annotated[int | None, typer.Option(help="Use so many GPUs at most.")] = None,
    rate: Annotated[float | None, typer.Option(help="Serve so many requests per second.")] = None,
    budget: Annotated[float | None, typer.Option(help="Spend so many USD an hour at most.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Azure CSV, any CSV with lengths, or Mooncake JSONL.")] = None,
    trace_scale: Annotated[float | None, typer.Option(help="Multiply the trace's lengths, for small machines.")] = None,
    trace_timestamps: Annotated[
        bool | None, typer.Option("--trace-timestamps", help="Keep the trace's own bursts instead of gamma gaps.")
    ] = None,
    num_prompts: Annotated[int | None, typer.Option(help="Only the trace's first so many requests.")] = None,
    max_input_len: Annotated[int | None, typer.Option(help="Cut prompts to this length.")] = None,
    max_output_len: Annotated[int | None, typer.Option(help="Cut outputs to this length.")] = None,
    random_input_len: Annotated[int | None, typer.Option(help="Prompt tokens of random requests.")] = None,
    random_output_len: Annotated[int | None, typer.Option(help="Output tokens of random requests.")] = None,
    random_range_ratio: Annotated[
        float | None, typer.Option(help="Lengths from len * (1 - R) to len * (1 + R). Default: 0.")
    ] = None,
    burstiness: Annotated[
        float | None, typer.Option(help="Shape of the gamma gaps: 1 is Poisson, below is burstier. Default: 1.")
    ] = None,
    ttft: Annotated[str | None, typer.Option(help="Time to first token: 250ms, 0.25s; a bare number is ms.")] = None,
    tpot: Annotated[str | None, typer.Option(help="Time per output token after it: 25ms.")] = None,
    attainment: Annotated[
        float | None, typer.Option(help="Share of requests that must meet both. Default: 0.9.")
    ] = None,
    classes: Annotated[
        list[str] | None,
        typer.Option("--class", help="Requests with targets of their own, NAME:SHARE:TTFT:TPOT. May be repeated."),
    ] = None,
    objective: Annotated[
        str | None, typer.Option(help="goodput, cost or power. Default: cost with --rate, else goodput.")
    ] = None,
    latency: Annotated[
        str | None,
        typer.Option(help=f"roofline, profile or {', '.join(CATALOGS)} (its own figures). Default: by what is given."),
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="What kvrelay calibrate measured, instead of a roofline.")
    ] = None,
    margin: Annotated[Path | None, typer.Option(help="What kvrelay verify found; it widens the intervals.")] = None,
    max_pp: Annotated[int | None, typer.Option(help="Pipeline stages to try, at most. Default: 1.")] = None,
    tensor_parallel: Annotated[
        int | None, typer.Option(help="This degree alone. Default: all; of mixed machines, a whole node.")
    ] = None,
    colocated: Annotated[
        bool | None, typer.Option(help="Also try workers that do both, for comparison. Default: yes.")
    ] = None,
    algorithm: Annotated[
        str | None, typer.Option(help="DistServe's: high or low node-affinity. Default: auto, by the links.")
    ] = None,
    max_batch_tokens: Annotated[int | None, typer.Option(help="Prompt tokens of a prefill step, at most.")] = None,
    max_batch_size: Annotated[int | None, typer.Option(help="Requests of a decode step, at most.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed, the same plan. Default: 0.")] = None,
    processes: Annotated[
        int | None, typer.Option(help="Simulate in so many; 0: in this one. Default: one a core.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the spec, the plan, the report and plots here.")] = None,
    no_progress: Annotated[bool, typer.Option("--no-progress", help="Draw no progress bar.")] = False,
    as_json: JsonOption = False,
) -> None:
    flags = {key: value for key, value in locals().items() if key not in ("request", "out", "no_progress", "as_json")}
    try:
        _plan(request, flags, out, as_json=as_json, show=not no_progress)
    except KeyboardInterrupt:
        error = CliError("interrupted; nothing was written", INTERRUPTED)
        raise typer.Exit(report(error, as_json)) from None


def _plan(path: Path | None, flags: dict[str, Any], out: Path | None, *, as_json: bool, show: bool) -> None:
    from kvrelay.plan.folder import check_folder, plan_object, save
    from kvrelay.plan.planning import ASKED_WRONGLY, make_plan
    from kvrelay.plan.reading import build_request, parse_class

    try:
        flags["classes"] = [parse_class(text) for text in flags["classes"] or ()] or None
        wanted = build_request(path, flags)
        if out is not None:
            check_folder(out)
        with progress(show=show) as on_progress:
            found = make_plan(wanted, on_progress)
        saved = save(found, wanted, out) if out is not None else None
    except ASKED_WRONGLY as error:
        raise typer.Exit(report(CliError(str(error), USAGE), as_json)) from None
    if as_json:
        print_json(plan_object(found) | ({"saved": [str(file) for file in saved.files]} if saved else {}))
    else:
        _show(found)
    for sentence in saved.notes if saved else ():
        note(sentence)
    if saved and not as_json:
        print(f"written: {', '.join(str(file) for file in saved.files)}")


def _show(found: Any) -> None:
    from rich.console import Console

    from kvrelay.plan.tables import tables

    console = Console()
    for table in tables(found):
        console.print(table, highlight=False)


@contextmanager
def progress(*, show: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr; yields what takes (what, done, total). Where stderr is no terminal nothing is drawn."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    bar = Progress(
        *columns, console=console, transient=True, refresh_per_second=4, disable=not (show and sys.stderr.isatty())
    )
    tasks: dict[str, Any] = {}
    with bar:

        def on_progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                for task in tasks.values():
                    bar.update(task, visible=False)
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield on_progress
