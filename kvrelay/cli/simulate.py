"""`kvrelay simulate`: what a cluster spec would do under a load, by the same policies that serve, without a cluster.

It owns the flags (lengths and traces named as those of `kvrelay bench`), what is printed and the exit code. Tables go
to stdout, progress to stderr; with --json stdout is one object.

Exit codes: 0 simulated; 1 it failed; 2 asked wrongly, or a spec that such hardware cannot run (one sentence says why);
130 interrupted.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrelay.cli.console import INTERRUPTED, USAGE, CliError, JsonOption, note, print_json, report

if TYPE_CHECKING:
    from kvrelay.simulate.simulation import Found, Question

PARAGRAPHS = (
    "Simulate a cluster spec under a load: attainment, TTFT and TPOT at each rate, where the time goes, what binds.",
    "The policies are those that serve, on a virtual clock; no model is loaded and no GPU is needed. Times come from "
    "--hardware (with the model's config.json: a roofline) or from --profile (measured by kvrelay calibrate). Every "
    "figure has an interval: where the truth lies nine times in ten, by chance and by how wrong the times may be.",
    "Without --num-requests the figures are of the long run; with it, of exactly so many requests from an empty "
    "cluster, as kvrelay bench --num-prompts plays them.",
    "Examples:",
    "  kvrelay simulate cluster.yaml --hardware h100-sxm --trace configs/workloads/azure-conv-2023.csv --rate 4 "
    "--ttft 500ms --tpot 50ms",
    "  kvrelay simulate cluster.yaml --hardware h200-sxm --model llama-3.1-8b --random-input-len 1024 "
    "--random-output-len 128 --rates 2,4,8,16 --ttft 250ms --tpot 25ms --colocated chunked",
    "  kvrelay simulate configs/local-1p1d.yaml --model ./model --profile profile.json "
    "--trace configs/workloads/azure-conv-2023.csv --trace-scale 0.25 --rate 2 --num-requests 200 --seeds 5",
)
HELP = "\n\n".join(PARAGRAPHS)
SHARINGS = ("prefill_first", "chunked")


def register(app: typer.Typer) -> None:
    app.command(help=HELP)(simulate)


def simulate(
    cluster: Annotated[Path, typer.Argument(metavar="CLUSTER", help="A cluster spec, as kvrelay up takes it.")],
    hardware: Annotated[str | None, typer.Option(help="A file, or a name of configs/hardware.")] = None,
    profile: Annotated[
        Path | None, typer.Option(help="What kvrelay calibrate measured, instead of --hardware.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Instead of the spec's: a directory, or a name of configs/models.")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Requests per second.")] = None,
    rates: Annotated[str | None, typer.Option(help="Several rates, with commas between them.")] = None,
    ttft: Annotated[str | None, typer.Option(help="Time to first token: 250ms, 0.25s; a bare number is ms.")] = None,
    tpot: Annotated[str | None, typer.Option(help="Time per output token after it: 25ms.")] = None,
    attainment: Annotated[float, typer.Option(help="Share of requests that should meet both.")] = 0.9,
    trace: Annotated[Path | None, typer.Option(help="Azure CSV, any CSV with lengths, or Mooncake JSONL.")] = None,
    trace_scale: Annotated[float, typer.Option(help="Multiply the trace's lengths, for small machines.")] = 1.0,
    trace_timestamps: Annotated[
        bool, typer.Option("--trace-timestamps", help="Keep the trace's own bursts; without a rate, its own pace.")
    ] = False,
    max_input_len: Annotated[int | None, typer.Option(help="Cut prompts to this length.")] = None,
    max_output_len: Annotated[int | None, typer.Option(help="Cut outputs to this length.")] = None,
    random_input_len: Annotated[int | None, typer.Option(help="Prompt tokens of random requests.")] = None,
    random_output_len: Annotated[int | None, typer.Option(help="Output tokens of random requests.")] = None,
    random_range_ratio: Annotated[float, typer.Option(help="Lengths from len * (1 - R) to len * (1 + R).")] = 0.0,
    burstiness: Annotated[float, typer.Option(help="Shape of the gamma gaps: 1 is Poisson, below is burstier.")] = 1.0,
    num_requests: Annotated[
        int | None, typer.Option(help="Exactly so many, from an empty cluster. Default: the long run.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Repeat with so many seeds, and take the mean.")] = 1,
    seed: Annotated[int, typer.Option(help="The first seed; the same one, the same answer.")] = 0,
    colocated: Annotated[
        str | None, typer.Option(help="Simulate the same workers doing both instead: prefill_first or chunked.")
    ] = None,
    no_progress: Annotated[bool, typer.Option("--no-progress", help="Draw no progress bar.")] = False,
    as_json: JsonOption = False,
) -> None:
    from kvrelay.simulate.simulation import ASKED_WRONGLY, Load, found_object, simulate_spec, source_of, traffic_of

    load = Load(
        trace=trace,
        trace_scale=trace_scale,
        trace_timestamps=trace_timestamps,
        max_input_len=max_input_len,
        max_output_len=max_output_len,
        random_input_len=random_input_len,
        random_output_len=random_output_len,
        random_range_ratio=random_range_ratio,
        burstiness=burstiness,
    )
    try:
        from cluster.spec.load import load_spec

        question = _question(rate, rates, (ttft, tpot), attainment, num_requests, seeds, seed, colocated)
        spec = load_spec(cluster)
        source = source_of(spec, hardware=hardware, profile=profile, model=model)
        traffic = traffic_of(load, seed)
        with _progress(show=not no_progress) as on_progress:
            found = simulate_spec(spec, source, traffic, question, on_progress)
    except ASKED_WRONGLY as error:
        raise typer.Exit(report(CliError(str(error), USAGE), as_json)) from None
    except KeyboardInterrupt:
        raise typer.Exit(report(CliError("interrupted", INTERRUPTED), as_json)) from None
    if as_json:
        print_json(found_object(found, question, cluster=str(cluster), workload=traffic.source.name))
        return
    _show(found, question)
    for sentence in found.notes:
        note(f"note: {sentence}")


def _question(
    rate: float | None,
    rates: str | None,
    targets: tuple[str | None, str | None],
    attainment: float,
    num_requests: int | None,
    seeds: int,
    seed: int,
    colocated: str | None,
) -> Question:
    """Raises PlanError naming the flag."""
    from kvrelay.simulate.simulation import Question
    from placement.catalogs.base import PlanError
    from placement.plan import Slo

    if not 0 < attainment < 1:
        raise PlanError(f"--attainment is {attainment:g}; give a share above 0 and below 1, such as 0.9")
    for flag, value, least in (("--num-requests", num_requests, 1), ("--seeds", seeds, 1), ("--seed", seed, 0)):
        if value is not None and value < least:
            raise PlanError(f"{flag} is {value}; give {least} or more")
    if colocated is not None and colocated not in SHARINGS:
        raise PlanError(f"--colocated is {colocated!r}; give {' or '.join(SHARINGS)}")
    ttft_s, tpot_s = (_duration(flag, text) for flag, text in zip(("--ttft", "--tpot"), targets, strict=True))
    return Question(
        slo=Slo(ttft_s=ttft_s, tpot_s=tpot_s, attainment=attainment),
        rates=_rates(rate, rates),
        num_requests=num_requests,
        seeds=tuple(range(seed, seed + seeds)),
        sharing=colocated,  # type: ignore[arg-type]
    )


def _duration(flag: str, text: str | None) -> float:
    import math

    from kvrelay.plan.durations import parse_duration
    from placement.catalogs.base import PlanError

    try:
        seconds: Any = parse_duration(text)
    except ValueError as error:
        raise PlanError(f"{flag} is {text!r}; {error}") from None
    return math.inf if seconds is None else float(seconds)


def _rates(rate: float | None, rates: str | None) -> tuple[float, ...]:
    import math

    from placement.catalogs.base import PlanError

    if rate is not None and rates is not None:
        raise PlanError("--rate and --rates do not go together; give one of the two")
    written = [str(rate)] if rate is not None else (rates or "").split(",") if rates is not None else []
    flag = "--rate" if rate is not None else "--rates"
    found = []
    for text in written:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (value > 0 and math.isfinite(value)):
            raise PlanError(f"{flag} has {text.strip()!r}; give requests per second above 0, such as 4 or 1,2,4")
        found.append(value)
    return tuple(found)


def _progress(*, show: bool) -> Any:
    from kvrelay.cli.plan import progress

    return progress(show=show)


def _show(found: Found, question: Question) -> None:
    from rich.console import Console

    from kvrelay.simulate.tables import summary, tables

    console = Console()
    for line in summary(found, question):
        print(line)
    for table in tables(found, question, console.width):
        console.print(table, highlight=False)
