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
    took. Raises CliError when the worker is lost, and when the time is over, but not for one of 0 s."""
    began_s, is_new = time.monotonic(), False  # a router that was started again, and may know no worker yet
    with progress(show=show) as on_progress:
        most = left = _left(client, worker, is_done, may_end)
        while left and time.monotonic() < began_s + timeout_s:
            time.sleep(POLL_S)
            try:
                left, is_new = _left(client, worker, is_done, may_end, is_new=is_new), False
            except KvrelayError as error:
                if error.code not in RESTARTING:
                    raise
                is_new = True
            most = max(most, left)
            on_progress(f"{worker}: requests that have left", most - left, most)
    if left and timeout_s:
        raise CliError(f"{worker} still has {left} requests after {timeout_s:g} s; {still_drains(worker)}", FAILURE)
    return left, round(time.monotonic() - began_s, 1)


def _left(
    client: Client, worker: str, is_done: Callable[[WorkerState], bool], may_end: bool, *, is_new: bool = False
) -> int:
    """Requests that wait or run there; one at least, until it is done."""
    workers = client.status().workers
    if is_new and not workers:
        raise KvrelayError("UNAVAILABLE", "the router does not know its workers yet")
    for each in workers:
        if each.name == worker and (each.state != "lost" or may_end):
            return 0 if is_done(each) else max(1, each.num_waiting + each.num_running)
    if may_end:
        return 0
    raise CliError(f"{worker} was lost while it drained; it comes back as the spec has it", FAILURE)


def tell(worker: str, words: str, facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json({"worker": worker, **facts})
    else:
        note(f"{worker} {words}")
