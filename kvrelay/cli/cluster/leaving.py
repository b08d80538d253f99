"""What `kvrelay drain` and `kvrelay role` wait for, and how they tell of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrelay.cli import completing
from kvrelay.cli.console import FAILURE, CliError, note, print_json
from kvrelay.cli.progress import progress
from kvrelay.client.types import KvrelayError

if TYPE_CHECKING:
    from kvrelay.client.client import Client
    from kvrelay.client.types import WorkerState

POLL_S = 0.2
RESTARTING = ("UNAVAILABLE", "DEADLINE_EXCEEDED")  # a router that does not answer may, later

WorkerArgument = Annotated[
    str, typer.Argument(help="Its name, as `kvrelay status` shows it.", autocompletion=completing.workers)
]
ForceOption = Annotated[bool, typer.Option("--force", help="Even if it is the only one: new requests wait then.")]
TimeoutOption = Annotated[float, typer.Option(min=0, help="Seconds to wait until nothing runs there; 0: none.")]


def still_drains(worker: str) -> str:
    return f"{worker} goes on draining; `kvrelay drain {worker} --undo` takes it back"


def wait_until(
    client: Client,
    worker: str,
    is_done: Callable[[WorkerState], bool],
    timeout_s: float,
    *,
    show: bool,
    may_end: bool = False,
) -> tuple[int, float]:
    """Until it is, or if it `may_end` is gone. Returns the requests that are left there, 0 when done, and how long it
    took. Raises CliError when the worker is lost, when it was taken back or given another role, and when the time is
    over, but not for one of 0 s."""
    began_s, is_new = time.monotonic(), False  # a router that was started again, and may know no worker yet
    with progress(show=show) as on_progress:
        first = each = _standing(client, worker, may_end)
        most = left = _left(each, is_done)
        has_begun = _is_leaving(each)
        while left and time.monotonic() < began_s + timeout_s:
            time.sleep(POLL_S)
            try:
                each, is_new = _standing(client, worker, may_end, is_new=is_new), False
            except KvrelayError as error:
                if error.code not in RESTARTING:
                    raise
                is_new = True
            left = _left(each, is_done)
            if left and has_begun and (why := _why_called_off(first, each)):
                raise CliError(why, FAILURE)
            has_begun = has_begun or _is_leaving(each)
            most = max(most, left)
            on_progress(f"{worker}: requests that have left", most - left, most)
    if left and timeout_s:
        is_left = each is not None and each.state == "drained"
        stands = "is left by all, and no further" if is_left else f"still has {left} requests"
        raise CliError(f"{worker} {stands} after {timeout_s:g} s; {still_drains(worker)}", FAILURE)
    return left, round(time.monotonic() - began_s, 1)


def _standing(client: Client, worker: str, may_end: bool, *, is_new: bool = False) -> WorkerState | None:
    """None: it has ended, as it may."""
    workers = client.status().workers
    if is_new and not workers:
        raise KvrelayError("UNAVAILABLE", "the router does not know its workers yet")
    for each in workers:
        if each.name == worker and (each.state != "lost" or may_end):
            return each
    if may_end:
        return None
    raise CliError(f"{worker} was lost while it drained; it comes back as the spec has it", FAILURE)


def _left(each: WorkerState | None, is_done: Callable[[WorkerState], bool]) -> int:
    """Requests that wait or run there; one at least, until it is done."""
    return 0 if each is None or is_done(each) else max(1, each.num_waiting + each.num_running)


def _is_leaving(each: WorkerState | None) -> bool:
    return each is not None and each.state in ("draining", "drained")


def _why_called_off(first: WorkerState | None, each: WorkerState | None) -> str:
    """Of one that was leaving, why it does not go on; empty if it does. It says itself that it takes requests: a router
    that has not heard it yet shows it as ready, too."""
    if first is None or each is None or each.state != "ready" or not each.report_age_s:
        return ""
    if each.role != first.role:
        return f"{each.name} was told to take another role since: it is a {each.role} worker"
    return f"{each.name} was taken back: it takes requests again"


def tell(worker: str, words: str, facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json({"worker": worker, **facts})
    else:
        note(f"{worker} {words}")
