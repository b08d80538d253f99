"""`kvrelay chaos`: puts faults into a cluster of real processes on this computer, and holds it to its published bounds.

It owns the flags, what is printed and the exit code. The table goes to stdout and the progress bar to stderr; with
--json stdout is one object.

Exit codes: 0 every bound was kept; 1 one was not; 2 wrong usage; 130 interrupted: the cluster is ended, and what was
found until then is printed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrelay.cli.console import INTERRUPTED, USAGE, CliError, JsonOption, NoProgressOption, exit_codes, note, print_json
from kvrelay.cli.progress import progress

if TYPE_CHECKING:
    from kvrelay.chaos.cells.cell import Cell
    from kvrelay.chaos.suite import Wish

HELP = """Put faults into a cluster of real processes, and hold it to its bounds.

Workers and a router with a tiny random model run on this computer's CPU, with proxies on the links between them. Each
cell is one kind of fault in one phase of a request; what was promised for it is in docs/reliability.md. Every answer is
compared with that of a run without faults. Exit code 1: a bound was broken, or an answer was not what was due.

Examples:

  kvrelay chaos --faults 200

  kvrelay chaos --cell kill/decode/decoding --cell engine/ --seed 7

  kvrelay chaos --list
"""
PROCESSES = 6  # of the usual cluster, with this one


def register(app: typer.Typer) -> None:
    app.command(help=HELP)(chaos)


def chaos(
    faults: Annotated[int, typer.Option(min=1, help="Make so many, shared out among the cells.")] = 100,
    minutes: Annotated[float, typer.Option(min=0.1, help="Begin no more after so long.")] = 60.0,
    cell: Annotated[
        list[str] | None, typer.Option(help="Only this one, or those that begin so; may be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the first round of each cell.")] = 0,
    busy: Annotated[
        float | None,
        typer.Option(help="Seconds that each bound may take longer. Default: 0 with a core for each process, else 1."),
    ] = None,
    keep: Annotated[Path | None, typer.Option(help="Leave logs and rules in this folder.")] = None,
    as_list: Annotated[bool, typer.Option("--list", help="Name the cells and end.")] = False,
    no_progress: NoProgressOption = False,
    as_json: JsonOption = False,
) -> None:
    with exit_codes(as_json, interrupted="interrupted; the cluster was ended"):
        cells = chosen(cell)
        if as_list:
            _list(cells, as_json)
            return
        busy_s = busy_s_here() if busy is None else busy
        from kvrelay.chaos.suite import Wish

        wish = Wish(cells=cells, faults=faults, minutes=minutes, seed=seed, busy_s=busy_s)
        folder = keep or Path(tempfile.mkdtemp(prefix="kvrelay-chaos-"))
        try:
            result = _play(wish, folder, show=not no_progress)
        finally:
            if keep is None:
                shutil.rmtree(folder, ignore_errors=True)
    _show(result, as_json)
    if result["was_interrupted"]:
        raise typer.Exit(INTERRUPTED)
    if not result["is_ok"]:
        raise typer.Exit(1)


def busy_s_here() -> float:
    """What a bound may take longer where processes share cores."""
    return 0.0 if len(os.sched_getaffinity(0)) >= PROCESSES else 1.0


def chosen(names: list[str] | None) -> list[Cell]:
    """Raises CliError for a name that no cell has or begins with."""
    from kvrelay.chaos.cells.table import CELLS

    for name in names or ():
        if not any(known.startswith(name) for known in CELLS):
            raise CliError(f"--cell is {name!r}, and no cell is called so; `kvrelay chaos --list` names them", USAGE)
    if not names:
        return list(CELLS.values())
    exact = [CELLS[name] for name in names if name in CELLS]
    begun = [cell for cell in CELLS.values() if cell.name.startswith(tuple(n for n in names if n not in CELLS) or "\0")]
    return list(dict.fromkeys([*exact, *begun]))


def _list(cells: list[Cell], as_json: bool) -> None:
    if as_json:
        print_json([{"cell": cell.name, "bound": cell.bound, "share": cell.share} for cell in cells])
        return
    for cell in cells:
        print(f"{cell.name:32} {cell.bound}")


def _play(wish: Wish, folder: Path, *, show: bool) -> dict[str, Any]:
    from kvrelay.chaos.report import as_object
    from kvrelay.chaos.suite import play

    folder.mkdir(parents=True, exist_ok=True)
    with progress(show=show) as on_progress:
        return as_object(play(wish, folder, lambda found: on_progress("faults", found.num_faults, wish.faults)))


def _show(result: dict[str, Any], as_json: bool) -> None:
    from rich.console import Console

    from kvrelay.chaos.report import sentences, table

    if as_json:
        print_json(result)
        return
    Console().print(table(result))
    for line in sentences(result):
        note(line)
