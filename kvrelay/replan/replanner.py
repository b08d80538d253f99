"""Replanner watches a cluster from beside it, as an operator would: it asks routers what came and how it fared, plays
that against other arrangements of workers, and has them change where that pays.

    look: status, load -> Seen -> play the arrangements near by -> decide -> journal; act: set_role, scale, in turns
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from statistics import mean, median
from typing import Any

import numpy as np

from cluster.router.options import RouterOptions
from engine.knobs import read
from kvrelay.client.client import Client
from kvrelay.client.types import ClusterStatus, EndedRequest, KvrelayError, WorkerState
from kvrelay.replan.journal import Change, Entry, Journal
from kvrelay.replan.options import Asked
from placement.replan.arrangements import pool_of
from placement.replan.play import Bounds, weigh
from placement.replan.policy import Played, Prices
from placement.replan.seen import Seen, SeenWorker, workload_of
from worker.steps.costs import StepCosts

LEAST_REQUESTS = 60  # of which something can be said
CHANGE_TIMEOUT_S = 120.0  # then it is called off
START_TIMEOUT_S = 300.0  # likewise
POLL_S = 0.2
SERVING = ("ready", "suspect")
HANDOFF_S = 0.005  # that a handoff takes, until one was seen
SHORT = 0.25  # the share of handoffs that are shorter than what one takes by itself, without waiting for pages


class NotYet(Exception):
    """Too little was seen: one sentence."""


class Replanner:
    def __init__(self, clients: Sequence[Client], asked: Asked, journal: Journal) -> None:
        """`clients`: of each router, whose loads add up."""
        self._clients = clients
        self._asked = asked
        self._journal = journal
        self._changes_s: list[float] = []  # that each has taken
        self._starts_s: list[float] = []
        self._changed_s = -math.inf

    def look(self) -> Entry:
        """Once. Raises NotYet, SetupError for what is not simulated, KvrelayError where a router does not answer."""
        slo, seen = self._asked.slo, self._see()
        measured = seen.attainment(slo.ttft_s, slo.tpot_s)
        bounds = Bounds(most_changes=self._asked.most_changes, most_devices=self._asked.most_devices)
        weighed = weigh(seen, slo, measured=measured, bounds=bounds, prices=self._prices())
        changes = [Change(**asdict(move)) for move in weighed.decision.moves]
        entry = Entry(
            at=datetime.now(UTC).isoformat(timespec="seconds"),
            roles=seen.roles,
            requests=len(seen.ttft_s),
            rate=round(seen.rate, 3),
            measured=round(measured, 4),
            reason=weighed.decision.reason,
            mode="act" if self._asked.acts else "advise",
            tried=[_tried(played) for played in (weighed.present, *weighed.others)],
            changes=changes,
        )
        try:
            if self._asked.acts:
                self._carry_out(changes)
        finally:
            if weighed.others and (changes or measured < slo.attainment):
                self._journal.add(entry)
        return entry

    def _prices(self) -> Prices:
        """What changes took, and starts, as far as any was seen."""
        usual = Prices()
        return Prices(
            change_s=mean(self._changes_s) if self._changes_s else usual.change_s,
            start_s=mean(self._starts_s) if self._starts_s else usual.start_s,
        )

    def _see(self) -> Seen:
        status, window_s = self._clients[0].status(), self._asked.window_s
        load = [ended for client in self._clients for ended in client.load(window_s)]
        if len(load) < LEAST_REQUESTS:
            raise NotYet(f"{len(load)} requests have come and gone in {window_s:g} s; {LEAST_REQUESTS} must")
        age_s = time.monotonic() - self._changed_s
        newer = [ended for ended in load if ended.age_s < age_s]
        if len(newer) < LEAST_REQUESTS:
            raise NotYet(f"{len(newer)} requests have come and gone since the last change; {LEAST_REQUESTS} must")
        seen = seen_of(status, load, newer)
        if phase := seen.missing_costs:
            raise NotYet(f"no worker's steps of {phase} were measured yet")
        return seen

    def _carry_out(self, changes: list[Change]) -> None:
        """What came of each is noted in its place."""
        for index, change in enumerate(changes):
            self._changed_s = time.monotonic()
            changes[index] = self._scale(change) if change.pool else self._set_role(change)
            self._changed_s = time.monotonic()
            if changes[index].failure:
                return

    def _set_role(self, change: Change) -> Change:
        client = self._clients[0]
        before = {each.name: each.role for each in client.status().workers}
        done = self._until(
            change,
            lambda: client.set_role(change.worker, change.role, change.chunk_tokens),
            lambda: _has_role(client.status(), change),
            lambda: client.drain(change.worker, undo=True),
            CHANGE_TIMEOUT_S,
            "it still had requests after {:g} s, and keeps its role",
        )
        if not done.failure and before.get(change.worker) != change.role:
            self._changes_s.append(done.seconds)
        return done

    def _scale(self, change: Change) -> Change:
        client = self._clients[0]
        before = sum(pool_of(each.name) == change.pool for each in client.status().workers)
        done = self._until(
            change,
            lambda: client.scale(change.pool, change.replicas),
            lambda: not client.scale(change.pool, look=True),
            lambda: client.scale(change.pool, before),
            START_TIMEOUT_S,
            f"not all were there after {{:g}} s, and it has {before} again",
        )
        if not done.failure and change.replicas > before:
            self._starts_s.append(done.seconds)
        return done

    @staticmethod
    def _until(
        change: Change,
        ask: Callable[[], object],
        is_so: Callable[[], bool],
        take_back: Callable[[], object],
        timeout_s: float,
        why: str,
    ) -> Change:
        """`why`: of what was not done in so many seconds."""
        began_s, is_done = time.monotonic(), False
        try:
            ask()
            while not (is_done := is_so()) and time.monotonic() - began_s < timeout_s:
                time.sleep(POLL_S)
        except KvrelayError as error:
            return replace(change, failure=error.message)
        finally:
            if not is_done:  # also where we are interrupted: nobody would take it back
                with contextlib.suppress(KvrelayError):
                    take_back()
        if not is_done:
            return replace(change, failure=why.format(timeout_s))
        return replace(change, seconds=round(time.monotonic() - began_s, 2))


def _tried(played: Played) -> dict[str, Any]:
    arrangement, share = played.arrangement, round(played.attainment, 4)
    return {"roles": dict(arrangement.roles), "chunks": dict(arrangement.chunks), "attainment": share}


def _has_role(status: ClusterStatus, change: Change) -> bool:
    """And the chunks that it is to have."""
    chunks = "" if change.chunk_tokens is None else str(change.chunk_tokens)
    return any(
        (each.name, each.role) == (change.worker, change.role)
        and each.state in SERVING
        and chunks in ("", each.limits.get("chunk_tokens"))
        for each in status.workers
    )


def seen_of(status: ClusterStatus, load: Sequence[EndedRequest], newer: Sequence[EndedRequest]) -> Seen:
    """`newer`: of the load, what came since roles changed. Raises NotYet while a worker is away: roles should not
    change for that."""
    for worker in status.workers:
        if worker.state not in SERVING:
            raise NotYet(f"{worker.name} is {worker.state}")
    load = sorted(load, key=lambda ended: -ended.age_s)
    seen_s = load[0].age_s - load[-1].age_s
    finished = [ended for ended in load if not ended.failed]
    prompt = int(median(ended.prompt_tokens for ended in finished)) if finished else 1
    output = int(median(ended.output_tokens for ended in finished)) if finished else 1
    handoffs_s = [ended.handoff_s for ended in finished if ended.handoff_s > 0]
    return Seen(
        workers=[_seen(worker) for worker in status.workers],
        router=read(RouterOptions, status.limits),
        workload=workload_of([(-e.age_s, e.prompt_tokens or prompt, _output_tokens(e, output)) for e in load]),
        ttft_s=np.array([np.inf if ended.failed else ended.ttft_s for ended in newer]),
        tpot_s=np.array([np.inf if ended.failed else ended.tpot_s for ended in newer]),
        handoff_s=float(np.quantile(handoffs_s, SHORT)) if handoffs_s else HANDOFF_S,
        cached_share=sum(e.cached_tokens for e in load) / max(1, sum(e.prompt_tokens for e in load)),
        rate=len(load) / max(seen_s, 1e-3),
        seen_s=seen_s,
    )


def _output_tokens(ended: EndedRequest, typical: int) -> int:
    """One that failed would have had more."""
    return max(ended.output_tokens, typical) if ended.failed else max(1, ended.output_tokens)


def _seen(worker: WorkerState) -> SeenWorker:
    return SeenWorker(
        name=worker.name,
        role=worker.role,
        num_pages=worker.total_pages,
        page_size=worker.page_size,
        limits=worker.limits,
        costs=StepCosts(**worker.step_costs) if worker.step_costs else None,
    )
