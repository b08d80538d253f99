"""The suite plays cells round after round until so many faults are made or the time is over, and holds what each round
measured against its bound. It knows no flags and no tables: the command is kvrelay/cli/chaos.py, the tables report.py.

    for each shape of cluster: start -> learn the answers -> rounds, the cells in the order of what is owed -> stop
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cluster.front.options import FrontOptions
from cluster.router.options import RouterOptions
from cluster.spec.model import ClusterSpec, TransferSpec
from cluster.spec.pool import PoolSpec, roles_of
from engine.knobs import knobs_of
from kv_transfer.options import TransferOptions
from kvrelay.chaos.bounds import Bound, bound_of, within
from kvrelay.chaos.cells import TIMEOUT_S, Cell
from kvrelay.chaos.cluster import ROUTER, ProcessCluster
from kvrelay.chaos.load import Ended
from kvrelay.chaos.oracle import learn, verdict
from kvrelay.chaos.ray_cluster import NAME, RayCluster
from kvrelay.chaos.round import Measured, Round
from kvrelay.chaos.target import ProcessState, Shape, Target
from kvrelay.chaos.templates import Template
from kvrelay.client.client import AsyncClient
from kvrelay.demo_model import make_demo_model
from worker.options import WorkerOptions

SHAPES = {
    shape.name: shape
    for shape in (
        Shape(),
        Shape(name="small", num_pages=48),
        Shape(name="ranks", prefill=1, ranks=2),
        Shape(name="ray", under_ray=True),
    )
}
DEPLOYMENT = {"liveness_timeout_s": 5.0}
SECRET = "chaos"
ENGINE = {"dtype": "float32", "page_size": 16, "max_model_len": 512, "threads": 1, "parity_check": False}
WORKER: dict[str, Any] = {
    "max_batch_tokens": 48,
    "short_prompt_tokens": 32,
    "timeout_s": 1.0,
    "connect_timeout_s": 1.0,
    "peer_silent_s": 2.0,
    "lease_ttl_s": 2.0,
    "fence_timeout_s": 1.0,
    "queued_reservation_s": 5.0,
    "step_timeout_s": 2.0,
    "drop_router_after_s": 3.0,
}
ROUTER_SETTINGS: dict[str, Any] = {
    "dead_after_s": 1.0,
    "unavailable_grace_s": 15.0,
    "max_backlog_tokens": 2048,
    "keepalive_s": 2.0,
}
TEMPLATES = (12, 96)  # of a short run, of a long one
SHORT_FAULTS = 100
CLIENTS = 2
HEAL_S = 60.0
PAGES_PATIENCE_S = 5.0  # beyond the bound, to say how long it took

OnRound = Callable[[int], None]  # faults so far


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


@dataclass(slots=True, kw_only=True)
class Findings:
    outcomes: list[Outcome] = field(default_factory=list)
    growth: dict[str, float] = field(default_factory=dict)  # the most that a process grew while it lived
    orphans: list[int] = field(default_factory=list)
    duration_s: float = 0.0


async def run(wish: Wish, folder: Path, on_round: OnRound) -> Findings:
    findings, began_s = Findings(), time.monotonic()
    model = await asyncio.to_thread(make_demo_model, folder / "model", dtype="float32")
    by_shape = {name: [cell for cell in wish.cells if cell.shape == name] for name in SHAPES}
    total = sum(cell.share for cell in wish.cells)
    for name, cells in by_shape.items():
        if not cells:
            continue
        part = sum(cell.share for cell in cells) / total
        some = replace(wish, cells=cells, faults=max(len(cells), round(wish.faults * part)))
        deadline_s = began_s + wish.minutes * 60.0
        await _play_shape(SHAPES[name], some, deadline_s, str(model), folder / name, findings, on_round)
    findings.duration_s = time.monotonic() - began_s
    return findings


async def _play_shape(
    shape: Shape, wish: Wish, deadline_s: float, model: str, folder: Path, findings: Findings, on_round: OnRound
) -> None:
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    cluster = _cluster(shape, folder, model, wish.seed)
    try:
        await cluster.start()
        async with contextlib.AsyncExitStack() as stack:
            players = [await stack.enter_async_context(AsyncClient(cluster.endpoint)) for _ in range(CLIENTS)]
            watcher = await stack.enter_async_context(AsyncClient(cluster.watch_endpoint))
            await watcher.wait_ready(HEAL_S)
            templates, measures = await learn(players[0], 0, TEMPLATES[wish.faults > SHORT_FAULTS])
            values = values_of(cluster, measures) | {"busy_s": wish.busy_s}
            flat = Flat()
            for cell, seed in order(wish, findings, deadline_s):
                measured = await play_round(cell, seed, cluster, players, watcher, templates, values)
                findings.outcomes.append(Outcome(cell=cell.name, seed=seed, measured=measured, values=values))
                on_round(sum(o.measured.faults for o in findings.outcomes))
                flat.see(cluster.states())
            findings.growth = {k: max(v, findings.growth.get(k, 0.0)) for k, v in flat.growth().items()}
    finally:
        findings.orphans += await cluster.stop()


def _cluster(shape: Shape, folder: Path, model: str, seed: int) -> Target:
    if shape.under_ray:
        return RayCluster(shape, folder, _spec(shape, model), {**WORKER, **ROUTER_SETTINGS, **DEPLOYMENT})
    return ProcessCluster(
        shape,
        folder,
        engine={**ENGINE, "model": model},
        worker={**WORKER, "secret": SECRET},
        router={**ROUTER_SETTINGS, "secret": SECRET, "model": model},
        seed=seed,
    )


def _spec(shape: Shape, model: str) -> dict[str, Any]:
    """The same settings, as `kvrelay up` is given them."""
    return {
        "name": NAME,
        "model": model,
        **{key: ENGINE[key] for key in ENGINE.keys() & ClusterSpec.model_fields.keys()},
        **DEPLOYMENT,
        "router": {**ROUTER_SETTINGS, "port": 0, "auth": False},
        "transfer": {key: WORKER[key] for key in WORKER.keys() & TransferSpec.model_fields.keys()},
        "pools": [
            {"role": role, "replicas": count, "threads": 1, "num_cpus": 0.5, **_knobs(role)}
            for role, count in (("prefill", shape.prefill), ("decode", shape.decode))
        ],
    }


def _knobs(role: str) -> dict[str, Any]:
    keys = WORKER.keys() & PoolSpec.model_fields.keys()
    return {key: WORKER[key] for key in keys if role in roles_of(key)}


def order(wish: Wish, findings: Findings, deadline_s: float) -> Any:
    """Cells with a round's seed: each once, then the one that is furthest behind its share."""
    done: Counter[str] = Counter()
    rounds: Counter[str] = Counter()
    total_share = sum(cell.share for cell in wish.cells)
    cells = list(wish.cells)
    random.Random(wish.seed).shuffle(cells)
    while time.monotonic() < deadline_s:
        fresh = [cell for cell in cells if not rounds[cell.name]]
        if not fresh and sum(done.values()) >= wish.faults:
            return
        cell = fresh[0] if fresh else min(cells, key=lambda c: done[c.name] / c.share * total_share)
        yield cell, wish.seed + rounds[cell.name]
        rounds[cell.name] += 1
        done[cell.name] += max(1, findings.outcomes[-1].measured.faults)


async def play_round(
    cell: Cell,
    seed: int,
    cluster: Target,
    players: Sequence[AsyncClient],
    watcher: AsyncClient,
    templates: Sequence[Template],
    values: dict[str, float],
) -> Measured:
    bound = bound_of(cell.bound)
    round_ = Round(cluster, players, watcher, templates, random.Random(f"{cell.name} {seed}"), TIMEOUT_S)
    watching = asyncio.get_running_loop().create_task(round_.watch())
    measured = Measured()
    try:
        await cell.act(round_)
        await _measure_pages(round_, measured, bound, values)
    finally:
        watching.cancel()
    await _heal(round_, measured)
    _conclude(round_, cell, bound, measured, values)
    return measured


async def _measure_pages(round_: Round[Any], measured: Measured, bound: Bound, values: dict[str, float]) -> None:
    since_s = max([round_.fault_s[0], *(stream.ended_s for stream in round_.streams)])
    bound_s = within(bound.pages, values) if bound.pages else 0.0
    held = await round_.pages_back(bound_s + PAGES_PATIENCE_S)
    measured.pages_s = time.monotonic() - since_s
    if held:
        measured.problems.append(f"after {measured.pages_s:.1f} s {held}")


async def _heal(round_: Round[Any], measured: Measured) -> None:
    """Undo what the cell did, and wait until all serve again; who does not is ended and started anew."""
    round_.cluster.heal()
    for attempt in range(2):
        late = await _not_serving(round_)
        if not late:
            await round_.clients_ready(HEAL_S)
            return
        measured.problems.append(f"{HEAL_S:g} s after the fault was over {', '.join(late)} did not serve")
        if attempt == 0:
            for name in late:
                round_.cluster.signal(name, signal.SIGKILL)
    raise RuntimeError(measured.problems[-1])


async def _not_serving(round_: Round[Any]) -> list[str]:
    deadline, late = time.monotonic() + HEAL_S, [ROUTER]
    while time.monotonic() < deadline:
        status = await round_.status()
        if status is not None:
            late = [w.name for w in status.workers if w.state != "ready" or not round_.cluster.is_ready(w.name)]
            late += [w.name for w in status.workers if getattr(w, "step_age_s", 0.0) > 1.0 and w.name not in late]
            if not late:
                return []
        await asyncio.sleep(0.02)
    return late


def _conclude(round_: Round[Any], cell: Cell, bound: Bound, measured: Measured, values: dict[str, float]) -> None:
    fault_s = round_.fault_s[0]
    measured.faults, measured.missed = len(round_.fault_s), round_.missed
    if round_.noticed_at_s is not None:
        measured.noticed_s = max(0.0, round_.noticed_at_s - fault_s)
    measured.next_token_s = max(stream.silence_after(fault_s) for stream in round_.streams)
    measured.ended = dict(Counter("done" if s.ended is Ended.DONE else s.code or "left" for s in round_.streams))
    for stream in round_.streams:
        if wrong := verdict(stream, cell.allowed | stream.allowed):
            measured.problems.append(wrong)
    for what, time_s, promise in (
        ("it was noticed", measured.noticed_s, bound.noticed),
        ("the next token came", measured.next_token_s, bound.next_token),
        ("pages were back", measured.pages_s, bound.pages),
    ):
        if promise and time_s is not None and time_s > within(promise, values):
            measured.problems.append(f"{what} after {time_s:.2f} s; the bound is {within(promise, values):.2f} s")


def values_of(cluster: Target, measures: dict[str, float]) -> dict[str, float]:
    """Every setting of the cluster that is a number, and the measures."""
    defaults = {
        name: float(knob.default)
        for kind in (RouterOptions, FrontOptions, TransferOptions, WorkerOptions)
        for name, knob in knobs_of(kind).items()
        if isinstance(knob.default, int | float)
    }
    return {**defaults, **cluster.settings, **measures, "start_s": cluster.start_s}


@dataclass(slots=True)
class Flat:
    """How much each process has grown between its first sight and its last."""

    first: dict[int, ProcessState] = field(default_factory=dict)
    last: dict[int, ProcessState] = field(default_factory=dict)

    def see(self, states: dict[int, ProcessState]) -> None:
        for pid, state in states.items():
            self.first.setdefault(pid, state)
            self.last[pid] = state

    def growth(self) -> dict[str, float]:
        pairs = [(self.first[pid], self.last[pid]) for pid in self.last]
        return {
            "descriptors": max((b.descriptors - a.descriptors for a, b in pairs), default=0),
            "threads": max((b.threads - a.threads for a, b in pairs), default=0),
            "memory_mb": max(((b.memory_bytes - a.memory_bytes) / 1e6 for a, b in pairs), default=0.0),
        }
