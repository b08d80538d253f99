"""Everything about kvrelay on a GPU, in parts: right or wrong, how fast. It may be cut at any moment, and gone on with.

    bench/gpu_check.sh                 all parts, on a machine with a GPU (Ray is not needed)
    bench/gpu_check.sh --parts tokens,transports --budget 300 --out DIR
    bench/gpu_check.sh --resume --out DIR           what has not succeeded there yet
    bench/gpu_check.sh --resume EARLIER --out DIR   nor in another folder, whose results are taken over
    bench/gpu_check.sh --rehearse      every part on the CPU, with tiny sizes; its figures mean nothing

DIR has, after each part: parts.json (how each went), check.log (all that they said), and gpu_NAME.json of those that
measure. A part that was cut is not done. The exit code is 0 only if every part asked for ran and nothing was wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import common
from bench.gpu.check.figures import figures
from bench.gpu.check.parts import Part, parts_of
from bench.gpu.check.run import LOG, CannotResume, State, fresh, resume, run_parts

OUT = common.MODELS / "gpu_check"
BUDGET_S, REHEARSAL_S = 570.0, 7200.0


def show(parts: Sequence[Part], state: State) -> None:
    console, rows = Console(), Table("part", "how", "seconds")
    for part in parts:
        went = state.went[part.name]
        rows.add_row(part.name, went.how, f"{went.took_s:g}")
    console.print(rows)
    rows = Table("figure", "found", "wanted")
    for row in figures(state.folder):
        rows.add_row(*row)
    if rows.rows:
        console.print(rows)
    if state.is_rehearsal:
        console.print("A rehearsal on the CPU: the figures mean nothing.")


def chosen(parts: Sequence[Part], names: str | None) -> list[Part]:
    """Those named, in the order of `parts`. Raises ValueError with a sentence for a name that none has."""
    if names is None:
        return [part for part in parts if part.is_asked_for]
    asked, known = [name.strip() for name in names.split(",")], [part.name for part in parts]
    for name in asked:
        if name not in known:
            raise ValueError(f"--parts: there is no part {name!r}; give some of {', '.join(known)}")
    return [part for part in parts if part.name in asked]


def parser() -> argparse.ArgumentParser:
    about = argparse.RawDescriptionHelpFormatter
    parsed = argparse.ArgumentParser(prog="bench/gpu_check.sh", description=__doc__, formatter_class=about)
    parsed.add_argument("--parts", metavar="NAME,NAME", help="default: all but `comparison`")
    parsed.add_argument("--budget", type=float, metavar="SECONDS", help="for all of them; default: 570")
    parsed.add_argument("--out", type=Path, default=OUT, metavar="DIR", help="default: .bench/gpu_check")
    parsed.add_argument(
        "--resume", nargs="?", const="", metavar="DIR", help="keep what succeeded there; default: --out"
    )
    parsed.add_argument("--model", help="8b, 1b, tiny, or a directory; default: 8b, tiny in a rehearsal")
    parsed.add_argument("--rehearse", action="store_true", help="on the CPU, tiny: the figures mean nothing")
    return parsed


def main(argv: Sequence[str] | None = None, make_parts: Callable[..., tuple[Part, ...]] = parts_of) -> int:
    arguments = parser().parse_args(argv)
    rehearse, out = arguments.rehearse, arguments.out.resolve()
    state = State(out, rehearse, arguments.model, common.commit())
    try:
        parts = chosen(make_parts(rehearse=rehearse, model=arguments.model, out=out), arguments.parts)
        out.mkdir(parents=True, exist_ok=True)
        if arguments.resume is None:
            fresh(state)
        else:
            resume(state, Path(arguments.resume or out))
    except (ValueError, CannotResume) as error:
        print(error, file=sys.stderr)
        return 2
    device = "cpu" if rehearse else "cuda:0"
    environ = {"KVRELAY_TEST_DEVICE": device, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    budget_s = arguments.budget if arguments.budget is not None else REHEARSAL_S if rehearse else BUDGET_S
    run_parts(parts, state, budget_s, environ)
    show(parts, state)
    bad = [part.name for part in parts if not state.is_good(part.name)]
    if bad:
        print(f"not good: {', '.join(bad)}; {out / LOG} says more", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
