"""Progress bars on stderr. They show and decide nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvrelay.bench.metrics import Outcome

OnProgress = Callable[[str, int, int], None]
_REQUESTS_PER_S = 2  # drawing takes time from the server on a small machine


@contextmanager
def progress(*, show: bool) -> Iterator[OnProgress]:
    """Yields what takes (what, done, total). Where stderr is no terminal nothing is drawn."""
    bar = _bar(show=show and sys.stderr.isatty(), refresh_per_second=4)
    tasks: dict[str, Any] = {}
    with bar:

        def on_progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                for task in tasks.values():
                    bar.update(task, visible=False)
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield on_progress


@contextmanager
def request_progress(total: int, *, show: bool, what: str = "requests") -> Iterator[Callable[[Outcome], None]]:
    """Of a benchmark: yields what takes each outcome."""
    bar = _bar(show=show, refresh_per_second=_REQUESTS_PER_S, with_remaining=True)
    failed = 0
    with bar:
        task = bar.add_task(what, total=total)

        def on_end(outcome: Outcome) -> None:
            nonlocal failed
            failed += not outcome.succeeded
            bar.update(task, advance=1, description=f"{what}, {failed} failed" if failed else what)

        yield on_end


@contextmanager
def answered_progress(total: int, on_progress: OnProgress) -> Iterator[Callable[[Outcome], None]]:
    """The same on a bar that has begun."""
    done = 0

    def on_end(outcome: Outcome) -> None:
        nonlocal done
        done += 1
        on_progress("requests answered", done, total)

    on_progress("requests answered", 0, total)
    yield on_end


def _bar(*, show: bool, refresh_per_second: float, with_remaining: bool = False) -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    columns += [TimeRemainingColumn()] if with_remaining else []
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, refresh_per_second=refresh_per_second, disable=not show)
