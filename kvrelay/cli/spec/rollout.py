"""What `kvrelay apply` and `kvrelay roll` wait for: that every worker is as the spec has it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from kvrelay.cli.console import FAILURE, CliError
from kvrelay.cli.progress import progress
from kvrelay.client.specs import Rollout
from kvrelay.client.types import KvrelayError

if TYPE_CHECKING:
    from kvrelay.client.client import Client

POLL_S = 0.3
AWAY_S = 120.0  # that nobody may answer: a restart takes less, and who was ended by `kvrelay down` comes back never
GOES_ON = "it goes on; `kvrelay config show` says how far it is"

UNKNOWN = Rollout(running=True, current=0, total=0, reason="the controller does not answer")

MaxSurge = Annotated[
    int | None,
    typer.Option(
        min=0, max=1, help="Workers beyond its size that a pool may have meanwhile. Default: 1 where there is room."
    ),
]
RollTimeout = Annotated[float, typer.Option(min=0, help="Seconds to wait until all are replaced; 0: none.")]


def wait_until_done(client: Client, timeout_s: float, *, show: bool) -> Rollout:
    """A controller or router that is being restarted is waited for. Raises CliError when it stops before its end, when
    nobody has answered for AWAY_S, and when the time is over, but not for one of 0 s."""
    heard_s = time.monotonic()
    until_s = heard_s + timeout_s
    with progress(show=show) as on_progress:
        rollout = _now(client, heard_s) or UNKNOWN
        while rollout.running and time.monotonic() < until_s:
            on_progress(rollout.reason or "workers are as the spec has them", rollout.current, rollout.total)
            time.sleep(POLL_S)
            if now := _now(client, heard_s):
                rollout, heard_s = now, time.monotonic()
    if rollout.reason and not rollout.running:
        raise CliError(rollout.reason, FAILURE)
    if rollout.running and timeout_s:
        ready = f"{rollout.current} of {rollout.total} workers are as the spec has them after {timeout_s:g} s"
        raise CliError(f"{ready} ({rollout.reason}); {GOES_ON}", FAILURE)
    return rollout


def _now(client: Client, heard_s: float) -> Rollout | None:
    """None: nobody answers."""
    try:
        return client.spec().rollout
    except KvrelayError as error:
        if error.code != "UNAVAILABLE":
            raise
        if time.monotonic() > heard_s + AWAY_S:
            raise CliError(f"for {AWAY_S:g} s by now {error.message}", FAILURE) from None
        return None
