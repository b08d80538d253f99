"""`kvrelay plan`: how many prefill and decode workers, with which parallelism, at what cost, and how sure that is.

It owns the flags (lengths and traces named as those of `kvrelay bench`), what is printed and the exit code. The answer
goes to stdout, progress and a first answer to stderr; with --json stdout is one object. The answer is printed before it
is written.

Exit codes: 0 planned; 1 it failed; 2 asked wrongly, or for what cannot be (one sentence says why); 130 interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrelay.cli.console import CliError, JsonOption, NoProgressOption, exit_codes, note, print_json
from kvrelay.cli.groups import Flags, grouped
from kvrelay.cli.progress import progress
from kvrelay.plan.request import PlanRequest

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvrelay.plan.folder import Saved
    from placement.plan import Goodput

PARAGRAPHS = (
    "Size the prefill and decode pools for a model, a kind of GPU, a workload and two latency targets.",
    "Say how much there may be with one of --num-gpus, --rate and --budget; what requests look like with --trace, or "
    "with --random-input-len and --random-output-len; and what is fast enough with --ttft, --tpot and --attainment. "
    "Several kinds of --hardware are mixed where that is better. A file says the same with keys named as the flags; "
    "flags win.",
    "Profiles of CPU workers that differ in threads (--profile, once for each) are weighed against each other: a "
    "worker of N threads takes N cores, and --num-gpus counts cores. One of them is of a prefill and a decode worker.",
    "Several files are of several models, each called by its file, with a rate of its own: the answer says whether "
    "they should share GPUs, and what that gains.",
    "With --out a folder is written: cluster.yaml for kvrelay up, plan.json for kvrelay verify, report.html and its "
    "plots; of several models the first two, and no verify. Exit code 2: what is asked for cannot be; one sentence "
    "says why.",
    "Examples:",
    "  kvrelay plan --model llama-3.1-8b --hardware h100-sxm --num-gpus 8 "
    "--trace configs/workloads/azure-conv-2023.csv --ttft 250ms --tpot 25ms",
    "  kvrelay plan --model ./model --hardware h100-sxm --rate 40 --random-input-len 1024 --random-output-len 128 "
    "--ttft 0.5s --tpot 40ms --objective cost --out plan",
    "  kvrelay plan configs/plans/llama-70b-chat.yaml --num-gpus 16 --json",
    "  kvrelay plan chat.yaml code.yaml --hardware h100-sxm --out plan",
    "  kvrelay plan --profile profile.json --num-gpus 2 --trace configs/workloads/azure-conv-2023.csv "
    "--trace-scale 0.25 --ttft 500ms --tpot 50ms",
    "  kvrelay plan --profile pair.json --profile mixed.json --num-gpus 2 --random-input-len 256 "
    "--random-output-len 64 --ttft 500ms --tpot 50ms",
)
HELP = "\n\n".join(PARAGRAPHS)


ASKED = Flags(
    of=PlanRequest,
    help={
        "num_prompts": "Only the trace's first so many requests.",
        "seed": "The same seed, the same plan. Default: 0.",
    },
    flags={"classes": "--class"},
)


def register(app: typer.Typer) -> None:
    app.command(help=HELP)(grouped(plan))


def plan(
    asked: Annotated[dict[str, Any], ASKED],
    request: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[SPEC]...", help="A plan request, YAML. See configs/plans. Several: models that may share GPUs."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the spec, the plan, the report and plots here.")] = None,
    no_progress: NoProgressOption = False,
    as_json: JsonOption = False,
) -> None:
    from kvrelay.plan.planning import ASKED_WRONGLY

    several = request is not None and len(request) > 1
    with exit_codes(as_json, wrong=ASKED_WRONGLY, interrupted="interrupted; nothing was written"):
        make = _plan_several if several else _plan_one
        try:
            answer = make(request or (), asked, out, show=not no_progress)
        except BrokenExecutor:
            raise CliError(
                "a process that simulates was ended from outside, as where memory runs out; give fewer --processes"
            ) from None
    _tell(answer, as_json=as_json)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """`save`: writes the folder; None where none is wanted."""

    plain: dict[str, Any]
    tables: Iterable[RenderableType]
    save: Callable[[], Saved] | None


def _plan_one(paths: Sequence[Path], asked: dict[str, Any], out: Path | None, *, show: bool) -> _Answer:
    from kvrelay.plan.folder import check_folder, plan_object, save
    from kvrelay.plan.planning import make_plan
    from kvrelay.plan.reading import build_request
    from kvrelay.plan.tables import tables

    wanted = build_request(paths[0] if paths else None, asked)
    if out is not None:
        check_folder(out)
    with progress(show=show) as on_progress:
        planned = make_plan(wanted, on_progress, _tell_first if show else None)
    return _Answer(
        plain=plan_object(planned),
        tables=tables(planned),
        save=partial(save, planned, wanted, out) if out is not None else None,
    )


def _plan_several(paths: Sequence[Path], asked: dict[str, Any], out: Path | None, *, show: bool) -> _Answer:
    from kvrelay.plan import together
    from kvrelay.plan.folder import check_folder
    from kvrelay.plan.reading import build_request

    names = together.named_by_file(paths)
    requests = {name: build_request(path, asked) for name, path in zip(names, paths, strict=True)}
    if out is not None:
        check_folder(out)
    with progress(show=show) as on_progress:
        planned = together.plan_together(requests, on_progress)
    return _Answer(
        plain=together.as_object(planned),
        tables=together.tables(planned),
        save=partial(together.save, planned, out) if out is not None else None,
    )


def _tell(answer: _Answer, *, as_json: bool) -> None:
    """A plan has taken long: it is told before it is written, or with why it could not be."""
    if not as_json:
        _print(answer.tables)
    saved = _saved(answer, as_json=as_json)
    files = [str(file) for file in saved.files] if saved else []
    if as_json:
        print_json(answer.plain | ({"saved": files} if saved else {}))
    for sentence in saved.notes if saved else ():
        note(sentence)
    if saved and not as_json:
        print(f"written: {', '.join(files)}")


def _print(tables: Iterable[RenderableType]) -> None:
    from rich.console import Console

    console = Console()
    for table in tables:
        console.print(table, highlight=False)


def _saved(answer: _Answer, *, as_json: bool) -> Saved | None:
    from placement.catalogs.base import PlanError

    if answer.save is None:
        return None
    with exit_codes(False, wrong=(PlanError,), interrupted="interrupted; the folder may not be whole"):
        try:
            return answer.save()
        except (PlanError, KeyboardInterrupt) as error:
            if as_json:  # one object, whatever happens
                print_json(answer.plain | {"error": {"message": str(error) or "interrupted"}})
            raise


def _tell_first(first: Goodput) -> None:
    from kvrelay.plan.amounts import count, num

    candidate = first.candidate
    note(
        f"a first answer, coarse: {candidate.label}, on {count(candidate.gpus, candidate.unit)}, up to "
        f"{num(first.goodput.value)} requests/s; the plan follows"
    )
