"""The suite plays cells round after round until so many faults are made or the time is over. It knows no flags and no
tables: the command is kvrelay/cli/measuring/chaos.py, the tables report.py. What a round broke is judged in judging.py.

    for each shape of cluster, rare cells first: start -> learn the answers -> rounds -> stop

Nothing that a cell finds ends the run: a cluster that does not serve any more is ended, and another one started.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvrelay.chaos.cells.cell import Cell
from kvrelay.chaos.clusters import SHAPES, make_cluster, values_of
from kvrelay.chaos.flat import Flat, Grown, told_of
from kvrelay.chaos.judging import HEAL_S, play_round
from kvrelay.chaos.oracle import learn
from kvrelay.chaos.order import Order
from kvrelay.chaos.round import Measured, Table
from kvrelay.chaos.targets.base import Shape
from kvrelay.client.client import AsyncClient
from kvrelay.demo_model import make_demo_model

logger = logging.getLogger(__name__)

TEMPLATES = (12, 96)  # of a short run, of a long one
SHORT_FAULTS = 100
CLIENTS = 2
MAX_CLUSTERS = 5  # started for one shape, until its cells are left
RARE_SHARE = 0.125  # of the time that is left, for a shape that is not the last


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is to be tried."""

    cells: Sequence[Cell]
    faults: int
    minutes: float
    seed: int
    busy_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A round of a cell, and what `kvrelay chaos --cell NAME --seed SEED` plays again."""

    cell: str
    seed: int
    measured: Measured
    values: Mapping[str, float]  # what its bound was made of, settings and measures
    duration_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Findings:
    outcomes: list[Outcome] = field(default_factory=list)
    growth: dict[str, Grown] = field(default_factory=dict)  # the most that a process grew while it lived
    orphans: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # of no cell
    began_s: float = field(default_factory=time.monotonic)
    duration_s: float = 0.0
    was_interrupted: bool = False

    @property
    def num_faults(self) -> int:
        return sum(outcome.measured.faults for outcome in self.outcomes)

    def on_grown(self, growth: Mapping[str, Grown]) -> None:
        self.growth = {kind: max(grown, self.growth.get(kind, Grown())) for kind, grown in growth.items()}


class NotHealed(Exception):
    """After a round the cluster does not serve any more."""


OnRound = Callable[[Findings], None]


def play(wish: Wish, folder: Path, on_round: OnRound) -> Findings:
    """All of it, or until SIGINT or SIGTERM: what was found until then. The cluster is ended in any case."""
    findings = Findings()
    with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
        findings.was_interrupted = True
        asyncio.run(_play_until_signal(wish, folder, findings, on_round))
        findings.was_interrupted = False
    return findings


async def _play_until_signal(wish: Wish, folder: Path, findings: Findings, on_round: OnRound) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await run(wish, folder, findings, on_round)


async def run(wish: Wish, folder: Path, findings: Findings, on_round: OnRound) -> None:
    model = await asyncio.to_thread(make_demo_model, folder / "model", dtype="float32")
    by_shape = {name: [cell for cell in wish.cells if cell.shape == name] for name in SHAPES}
    shares = {name: sum(cell.share for cell in cells) for name, cells in by_shape.items() if cells}
    end_s = findings.began_s + wish.minutes * 60.0
    for name in (rare_first := sorted(shares, key=lambda name: shares[name])):
        left_s = end_s - time.monotonic()
        deadline_s = end_s if name == rare_first[-1] else time.monotonic() + RARE_SHARE * left_s
        faults = max(len(by_shape[name]), round(wish.faults * shares[name] / sum(shares.values())))
        order = Order(by_shape[name], faults, wish.seed, begins_s=time.monotonic(), ends_s=deadline_s)
        await _play_shape(SHAPES[name], order, wish, str(model), folder / name, findings, on_round)


async def _play_shape(
    shape: Shape, order: Order, wish: Wish, model: str, folder: Path, findings: Findings, on_round: OnRound
) -> None:
    for number in range(MAX_CLUSTERS):
        try:
            await _play_cluster(shape, order, wish, model, folder / str(number), findings, on_round)
            return
        except NotHealed as error:
            logger.warning("another cluster is started: %s", error)
        except Exception as error:
            logger.exception("cluster %d of shape %s", number, shape.name)
            findings.problems.append(f"a cluster of shape {shape.name} failed: {type(error).__name__}: {error}")
    findings.problems.append(f"after {MAX_CLUSTERS} clusters of shape {shape.name} the rest of its cells was left")


async def _play_cluster(
    shape: Shape, order: Order, wish: Wish, model: str, folder: Path, findings: Findings, on_round: OnRound
) -> None:
    """Until the order ends. Raises NotHealed, and whatever keeps a cluster from starting."""
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    cluster, flat = make_cluster(shape, folder, model, wish.seed), Flat()
    try:
        await cluster.start()
        async with contextlib.AsyncExitStack() as stack:
            players = [await stack.enter_async_context(AsyncClient(cluster.endpoint)) for _ in range(CLIENTS)]
            watcher = await stack.enter_async_context(AsyncClient(cluster.watch_endpoint))
            await watcher.wait_ready(HEAL_S)
            templates, measures = await learn(players[0], TEMPLATES[wish.faults > SHORT_FAULTS])
            values = values_of(cluster, measures) | {"busy_s": wish.busy_s}
            table = Table(cluster=cluster, players=players, watcher=watcher, templates=templates, values=values)
            while (chosen := order.next(time.monotonic())) is not None:
                await _play_round(*chosen, table, order, findings)
                if (status := await table.status()) is not None:
                    flat.see(cluster.states(), told_of(status, cluster.pid))
                on_round(findings)
    finally:
        findings.on_grown(flat.growth())
        findings.orphans += await cluster.stop()


async def _play_round(cell: Cell, seed: int, table: Table, order: Order, findings: Findings) -> None:
    """Raises NotHealed, when the round is among the findings."""
    began_s = time.monotonic()
    measured = await play_round(cell, seed, table)
    took_s = time.monotonic() - began_s
    order.on_played(cell.name, measured.faults, took_s)
    outcome = Outcome(cell=cell.name, seed=seed, measured=measured, values=table.values, duration_s=took_s)
    findings.outcomes.append(outcome)
    findings.duration_s = time.monotonic() - findings.began_s
    if not measured.is_healed:
        raise NotHealed(f"{cell.name}, seed {seed}: {measured.problems[-1]}")
