"""`kvrelay simulate`: what a cluster spec would do under a load, by the same policies that serve, without a cluster.

It owns the flags (lengths and traces named as those of `kvrelay bench`), what is printed and the exit code. Tables go
to stdout, progress to stderr; with --json stdout is one object.

Exit codes: 0 simulated; 1 it failed; 2 asked wrongly, or a spec that such hardware cannot run (one sentence says why);
130 interrupted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvrelay.bench.options import WorkloadOptions
from kvrelay.cli.console import JsonOption, NoProgressOption, exit_codes, note, print_json
from kvrelay.cli.groups import Flags, grouped
from kvrelay.cli.planning.targets import Targets
from kvrelay.cli.progress import progress
from kvrelay.cli.spec_flags import PolicyFlags, RouterPolicyFlags, SpecChanges

if TYPE_CHECKING:
    from kvrelay.simulate.simulation import Sweep, SweepResult
    from placement.workload.closed_loop import ClosedLoop

PARAGRAPHS = (
    "Simulate a cluster spec under a load: attainment, TTFT and TPOT at each rate, where the time goes, what binds.",
    "The policies are those that serve, on a virtual clock; no model is loaded and no GPU is needed. Times come from "
    "--hardware (with the model's config.json: a roofline) or from --profile (measured by kvrelay calibrate). Every "
    "figure has an interval: where the truth lies nine times in ten, by chance and by how wrong the times may be.",
    "Without --num-requests the figures are of the long run; with it, of exactly so many requests from an empty "
    "cluster, as kvrelay bench --num-prompts plays them.",
    "With --max-concurrency there are so many clients, each of whom waits for its answer before it asks again, as for "
    "kvrelay bench and vllm bench serve: requests/s is then what they get.",
    "Examples:",
    "  kvrelay simulate cluster.yaml --hardware h100-sxm --trace configs/workloads/azure-conv-2023.csv --rate 4 "
    "--ttft 500ms --tpot 50ms",
    "  kvrelay simulate cluster.yaml --hardware h200-sxm --model llama-3.1-8b --random-input-len 1024 "
    "--random-output-len 128 --rates 2,4,8,16 --ttft 250ms --tpot 25ms --colocated",
    "  kvrelay simulate cluster.yaml --hardware h100-sxm --random-input-len 2000 --random-output-len 200 "
    "--max-concurrency 1,10,50",
    "  kvrelay simulate configs/local-1p1d.yaml --model ./model --profile profile.json "
    "--trace configs/workloads/azure-conv-2023.csv --trace-scale 0.25 --rate 2 --num-requests 200 --seeds 5",
)
HELP = "\n\n".join(PARAGRAPHS)
MOST_REQUESTS, MOST_SEEDS = 10_000_000, 10_000  # minutes of simulating, and a gigabyte


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is simulated, as it is typed."""

    rate: Annotated[float | None, typer.Option(help="Requests per second.")] = None
    rates: Annotated[str | None, typer.Option(help="Several rates, with commas between them.")] = None
    max_concurrency: Annotated[
        str | None,
        typer.Option(
            help="So many clients, each of whom waits for its answer before it asks again; several with commas between "
            "them. Without a rate they ask at once."
        ),
    ] = None
    think_time: Annotated[
        str | None, typer.Option(help="That such a client lets pass before it asks again: 2s; a bare number is ms.")
    ] = None
    attainment: Annotated[float, typer.Option(help="Share of requests that should meet both.")] = 0.9
    num_requests: Annotated[
        int | None, typer.Option(help="Exactly so many, from an empty cluster. Default: the long run.")
    ] = None
    seeds: Annotated[int, typer.Option(help="Repeat with so many seeds, and take the mean.")] = 1
    colocated: Annotated[
        bool, typer.Option("--colocated", help="Simulate as many workers that do both (role mixed) instead.")
    ] = False
    acceptance_rate: Annotated[
        float | None,
        typer.Option(
            help="Chance of a token guessed ahead (--num-speculative-tokens) to be right where those before it are, "
            "from 0 to 1. Default: no guesses are simulated."
        ),
    ] = None


WORKLOAD = Flags(
    *("trace", "trace_scale", "trace_timestamps", "max_input_len", "max_output_len", "random_input_len"),
    *("random_output_len", "random_range_ratio", "burstiness", "seed"),
    help={
        "trace_timestamps": "Keep the trace's own bursts; without a rate, its own pace.",
        "seed": "The first seed; the same one, the same answer.",
    },
)


def register(app: typer.Typer) -> None:
    app.command(help=HELP)(grouped(simulate))


def simulate(
    cluster: Annotated[Path, typer.Argument(metavar="CLUSTER", help="A cluster spec, as kvrelay up takes it.")],
    targets: Targets,
    asked: Asked,
    workload: Annotated[WorkloadOptions, WORKLOAD],
    policy: PolicyFlags,
    router: RouterPolicyFlags,
    hardware: Annotated[str | None, typer.Option(help="A file, or a name of configs/hardware.")] = None,
    profile: Annotated[
        Path | None, typer.Option(help="What kvrelay calibrate measured, instead of --hardware.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Instead of the spec's: a directory, or a name of configs/models.")
    ] = None,
    no_progress: NoProgressOption = False,
    as_json: JsonOption = False,
) -> None:
    from cluster.spec.load import load_spec, parse_spec
    from kvrelay.simulate.simulation import ASKED_WRONGLY, result_object, simulate_spec, source_of, traffic_of

    with exit_codes(as_json, wrong=ASKED_WRONGLY, interrupted="interrupted"):
        sweep = _sweep(asked, targets, workload.seed)
        changes = SpecChanges(pools=policy, router=router)
        spec = parse_spec(changes.applied(load_spec(cluster).model_dump(exclude_unset=True)))
        source = source_of(spec, hardware=hardware, profile=profile, model=model, acceptance_rate=asked.acceptance_rate)
        traffic = traffic_of(workload)
        with progress(show=not no_progress) as on_progress:
            result = simulate_spec(spec, source, traffic, sweep, on_progress)
    if as_json:
        print_json(result_object(result, sweep, cluster=str(cluster), workload=traffic.source.name))
        return
    _show(result, sweep)
    for sentence in result.notes:
        note(f"note: {sentence}")


def _sweep(asked: Asked, targets: Targets, seed: int) -> Sweep:
    """Raises PlanError naming the flag."""
    from kvrelay.simulate.simulation import Sweep
    from placement.catalogs.base import PlanError
    from placement.plan import Slo

    if not 0 < asked.attainment < 1:
        raise PlanError(f"--attainment is {asked.attainment:g}; give a share above 0 and below 1, such as 0.9")
    ranges: tuple[tuple[str, int | None, int, float], ...] = (
        ("--num-requests", asked.num_requests, 1, MOST_REQUESTS),
        ("--seeds", asked.seeds, 1, MOST_SEEDS),
        ("--seed", seed, 0, math.inf),
    )
    for flag, value, least, most in ranges:
        if value is not None and not least <= value <= most:
            raise PlanError(f"{flag} is {value}; give {f'{least} or more' if value < least else f'{most} or less'}")
    return Sweep(
        slo=Slo(**targets.given_s(), attainment=asked.attainment),
        rates=_rates(asked.rate, asked.rates),
        loops=_loops(asked.max_concurrency, asked.think_time),
        num_requests=asked.num_requests,
        seeds=tuple(range(seed, seed + asked.seeds)),
        colocated=asked.colocated,
    )


def _rates(rate: float | None, rates: str | None) -> tuple[float, ...]:
    from placement.catalogs.base import PlanError

    if rate is not None and rates is not None:
        raise PlanError("--rate and --rates do not go together; give one of the two")
    written = [str(rate)] if rate is not None else (rates or "").split(",") if rates is not None else []
    flag = "--rate" if rate is not None else "--rates"
    parsed = []
    for text in written:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (value > 0 and math.isfinite(value)):
            raise PlanError(f"{flag} has {text.strip()!r}; give requests per second above 0, such as 4 or 1,2,4")
        parsed.append(value)
    return tuple(parsed)


def _loops(max_concurrency: str | None, think_time: str | None) -> tuple[ClosedLoop, ...]:
    from kvrelay.cli.planning.targets import seconds_of
    from placement.catalogs.base import PlanError
    from placement.workload.closed_loop import ClosedLoop

    think_s = seconds_of("--think-time", think_time) if think_time is not None else 0.0
    if max_concurrency is None:
        if think_time is not None:
            raise PlanError("--think-time is of clients who wait for their answers; give --max-concurrency, too")
        return ()
    written = [text.strip() for text in max_concurrency.split(",")]
    if wrong := [text for text in written if not (text.isdecimal() and int(text))]:
        raise PlanError(f"--max-concurrency has {wrong[0]!r}; give clients, 1 or more, such as 16 or 1,8,64")
    return tuple(ClosedLoop(max_concurrency=int(text), think_s=think_s) for text in written)


def _show(result: SweepResult, sweep: Sweep) -> None:
    from rich.console import Console

    from kvrelay.simulate.tables import summary, tables

    console = Console()
    for line in summary(result, sweep):
        print(line)
    for table in tables(result, sweep, console.width):
        console.print(table, highlight=False)
