"""Plays one round of a cell, heals the cluster, and says what of it broke a promise."""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import time
from collections import Counter
from collections.abc import Mapping

from kvrelay.chaos.bounds import Bound, bound_of, within
from kvrelay.chaos.cells.cell import TIMEOUT_S, Cell
from kvrelay.chaos.load import Ended
from kvrelay.chaos.oracle import verdict
from kvrelay.chaos.round import Measured, Round, Table
from kvrelay.chaos.targets.base import ROUTER
from kvrelay.client.types import KvrelayError
from worker.awake import AwakeClock

logger = logging.getLogger(__name__)

HEAL_S = 60.0
PAGES_PATIENCE_S = 5.0  # beyond the bound, to say how long it took
LATE_STEP_S = 1.0  # a step that runs for longer is still the fault's


async def play_round(cell: Cell, seed: int, table: Table) -> Measured:
    rng = random.Random(f"{cell.name} {seed}")
    round_ = Round(table, rng, TIMEOUT_S)
    measured, bound, awake = Measured(), bound_of(cell.bound), AwakeClock()
    awake.start()
    watching = asyncio.get_running_loop().create_task(round_.watch())
    try:
        await cell.act(round_)
        await _measure_pages(round_, measured, bound, table.values)
    except Exception as error:  # a defect of the suite: told with what plays it again, as one of the cluster
        logger.exception("%s, seed %d", cell.name, seed)
        measured.problems.append(f"the suite failed: {type(error).__name__}: {error}")
    finally:
        watching.cancel()
    measured.is_healed = await _heal(round_, measured)
    await round_.all_ended()
    await awake.stop()
    measured.stopped_s = awake.stopped_s
    _conclude(round_, cell, bound, measured, {**table.values, "busy_s": table.values["busy_s"] + awake.stopped_s})
    if measured.problems and measured.stopped_s:
        measured.problems.append(f"the machine stood still for {measured.stopped_s:.1f} s, for which bounds allow")
    return measured


async def _measure_pages(round_: Round, measured: Measured, bound: Bound, values: Mapping[str, float]) -> None:
    since_s = max([round_.fault_s[0], *(stream.ended_s for stream in round_.streams)])
    bound_s = within(bound.pages, values) if bound.pages else 0.0
    held = await round_.pages_back(bound_s + PAGES_PATIENCE_S)
    measured.pages_s = time.monotonic() - since_s
    if held:
        measured.problems.append(f"after {measured.pages_s:.1f} s {held}")


async def _heal(round_: Round, measured: Measured) -> bool:
    """Undo what the cell did, and wait until all serve again; who does not is ended and started anew."""
    round_.cluster.heal()
    for attempt in range(2):
        late = await _not_serving(round_)
        if not late:
            break
        measured.problems.append(f"{HEAL_S:g} s after the fault was over {', '.join(late)} did not serve")
        if attempt == 0:
            for name in late:
                round_.cluster.signal(name, signal.SIGKILL)
    else:
        return False
    try:
        await round_.clients_ready(HEAL_S)
    except KvrelayError as error:
        measured.problems.append(f"{HEAL_S:g} s after the fault was over a client was not served: {error}")
        return False
    return True


async def _not_serving(round_: Round) -> list[str]:
    deadline, late = time.monotonic() + HEAL_S, [ROUTER]
    while time.monotonic() < deadline:
        status = await round_.status()
        if status is not None:
            late = [w.name for w in status.workers if w.state != "ready" or not round_.cluster.is_ready(w.name)]
            late += [w.name for w in status.workers if w.step_age_s > LATE_STEP_S and w.name not in late]
            if not late:
                return []
        await asyncio.sleep(0.02)
    return late


def _conclude(round_: Round, cell: Cell, bound: Bound, measured: Measured, values: Mapping[str, float]) -> None:
    measured.faults, measured.missed = len(round_.fault_s), round_.missed
    measured.ended = dict(Counter("done" if s.ended is Ended.DONE else s.code or "left" for s in round_.streams))
    if not round_.fault_s:
        return
    fault_s = round_.fault_s[0]
    if round_.noticed_at_s is not None:
        measured.noticed_s = max(0.0, round_.noticed_at_s - fault_s)
    if not cell.is_crowded:
        measured.next_token_s = max((stream.silence_after(fault_s) for stream in round_.streams), default=0.0)
    for stream in round_.streams:
        if wrong := verdict(stream, cell.allowed | stream.allowed, values["busy_s"]):
            measured.problems.append(wrong)
    for what, time_s, promise in (
        ("it was noticed", measured.noticed_s, bound.noticed),
        ("the next token came", measured.next_token_s, bound.next_token),
        ("pages were back", measured.pages_s, bound.pages),
    ):
        if promise and time_s is not None and time_s > within(promise, values):
            measured.problems.append(f"{what} after {time_s:.2f} s; the bound is {within(promise, values):.2f} s")
