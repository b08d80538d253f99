"""Replanner watches a cluster from beside it, as an operator would: it asks routers what came and how it fared, plays
that against other arrangements of workers, and has them change where that pays.

    look: status, load -> Seen -> play the arrangements near by -> decide -> journal; act: set_role, scale, in turns
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Sequence
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
from placement.replan.arrangements import Move, Scale, pool_of
from placement.replan.distserve import Profile
from placement.replan.play import Bounds, weigh, weigh_shifts
from placement.replan.policy import Decision, Played, Prices
from placement.replan.seen import Seen, SeenWorker, workload_of
from worker.steps.costs import StepCosts

LEAST_REQUESTS = 60  # of which something can be said
CHANGE_TIMEOUT_S = 120.0  # then it is called off
START_TIMEOUT_S = 900.0  # likewise; CHANGE_TIMEOUT_S where there is no place for it
PAUSE_S = 1800.0  # for which what has failed is not tried again, nor what was taken back
SPARE_EVERY_S = 60.0
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
        self._barred: dict[Move, float] = {}  # until when
        self._undo: Move | None = None  # the last, if a worker left by it
        self._spare_since_s: float | None = None  # since when one worker less would have done
        self._spare_looked_s = -math.inf
        self._profile: Profile | None = None  # of what came when arrangements were chosen; distserve

    def look(self) -> Entry:
        """Once. Raises NotYet, SetupError for what is not simulated, KvrelayError where a router does not answer."""
        slo, seen = self._asked.slo, self._see()
        measured = seen.attainment(slo.ttft_s, slo.tpot_s)
        now = time.monotonic()
        bounds = self._bounds(now)
        if self._asked.policy == "distserve":
            weighed, self._profile = weigh_shifts(seen, slo, self._profile, bounds)
        else:
            spare_s = 0.0 if self._spare_since_s is None else now - self._spare_since_s
            undo, prices = self._undo, self._prices()
            weighed = weigh(seen, slo, measured=measured, bounds=bounds, prices=prices, spare_s=spare_s, undo=undo)
            self._note_spare(weighed.decision, bounds, now, is_enough=measured >= slo.attainment)
        moves = weighed.decision.moves
        changes = [Change(**asdict(move)) for move in moves]
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
                self._carry_out(moves, changes)
        finally:
            if weighed.others and (changes or measured < slo.attainment):
                self._journal.add(entry)
        return entry

    def _bounds(self, now: float) -> Bounds:
        """To play one worker less takes time from a cluster that is well: it is done now and then."""
        most = self._asked.most_devices
        may_shrink = most is not None and now - self._spare_looked_s >= SPARE_EVERY_S
        barred = [move for move, until_s in self._barred.items() if now < until_s]
        return Bounds(most_changes=self._asked.most_changes, most_devices=most, may_shrink=may_shrink, barred=barred)

    def _note_spare(self, decision: Decision, bounds: Bounds, now: float, *, is_enough: bool) -> None:
        if decision.is_spare and self._spare_since_s is None:
            self._spare_since_s = now
        elif not is_enough or (bounds.may_shrink and not decision.is_spare):
            self._spare_since_s = None
        if bounds.may_shrink:
            self._spare_looked_s = now

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
        if self._asked.most_devices is not None:
            self._check_nobody_comes({pool_of(worker.name) for worker in status.workers})
        seen = seen_of(status, load, newer)
        if phase := seen.missing_costs:
            raise NotYet(f"no worker's steps of {phase} were measured yet")
        return seen

    def _check_nobody_comes(self, pools: Collection[str]) -> None:
        """Or goes: an operator may be changing pools just now. Raises NotYet."""
        for pool in sorted(pools):
            for each in self._clients[0].scale(pool, look=True):
                raise NotYet(f"{each.name} is {each.stage}")

    def _carry_out(self, moves: Sequence[Move], changes: list[Change]) -> None:
        """What came of each is noted in its place. One that failed is not tried again for a while."""
        planned, changes[:] = list(changes), [replace(change, failure="not begun") for change in changes]
        self._undo, self._spare_since_s = None, None
        for index, (move, change) in enumerate(zip(moves, planned, strict=True)):
            self._changed_s = time.monotonic()
            try:
                changes[index] = self._scale(change) if isinstance(move, Scale) else self._set_role(change)
            except KvrelayError as error:
                changes[index] = replace(change, failure=error.message)
            self._changed_s = time.monotonic()
            if changes[index].failure:
                self._barred[move] = self._changed_s + PAUSE_S
                return

    def _set_role(self, change: Change) -> Change:
        client = self._clients[0]
        before = {each.name: each.role for each in client.status().workers}.get(change.worker)
        client.set_role(change.worker, change.role, change.chunk_tokens)
        done = _until(
            change,
            lambda: _has_role(client.status(), change),
            lambda: client.drain(change.worker, undo=True),
            CHANGE_TIMEOUT_S,
        )
        if done.failure:
            return replace(done, failure=f"it was not so after {CHANGE_TIMEOUT_S:g} s, and stays as it is")
        if before != change.role:
            self._changes_s.append(done.seconds)
        return done

    def _scale(self, change: Change) -> Change:
        client, pool = self._clients[0], change.pool
        before = sum(pool_of(each.name) == pool for each in client.status().workers)
        grows = change.replicas > before
        pending = list(client.scale(pool, change.replicas))

        def is_so() -> bool:
            pending[:] = client.scale(pool, look=True)
            return not pending

        def take_back() -> None:
            """By name: of a pool with gaps in its numbers another one would leave."""
            for each in pending:
                client.drain(each.name, remove=grows, undo=not grows, force=grows)

        done = _until(change, is_so, take_back, START_TIMEOUT_S, lambda: all(e.stage == "waiting" for e in pending))
        if done.failure:
            stands = ", ".join(
                f"{each.name} {each.stage}{f' ({each.reason})' if each.reason else ''}" for each in pending
            )
            return replace(done, failure=f"given up: {stands}")
        if grows:
            self._starts_s.append(done.seconds)
        else:
            back = Scale(pool=pool, replicas=before)
            self._undo, self._barred[Scale(pool=pool, replicas=change.replicas)] = back, time.monotonic() + PAUSE_S
        return done


def _until(
    change: Change,
    is_so: Callable[[], bool],
    take_back: Callable[[], object],
    timeout_s: float,
    is_stuck: Callable[[], bool] = lambda: False,
) -> Change:
    """A router that does not answer may, later. `is_stuck`: given up sooner."""
    began_s, is_done = time.monotonic(), False
    try:
        while not is_done:
            with contextlib.suppress(KvrelayError):
                is_done = is_so()
            took_s = time.monotonic() - began_s
            if not is_done and took_s >= (min(timeout_s, CHANGE_TIMEOUT_S) if is_stuck() else timeout_s):
                return replace(change, failure="timed out")
            time.sleep(0 if is_done else POLL_S)
    finally:
        if not is_done:  # also where we are interrupted: nobody would take it back
            with contextlib.suppress(KvrelayError):
                take_back()
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
    typical = int(median(ended.output_tokens for ended in finished)) if finished else 1
    handoffs_s = [ended.handoff_s for ended in finished if ended.handoff_s > 0]
    return Seen(
        workers=[_seen(worker) for worker in status.workers],
        router=read(RouterOptions, status.limits),
        workload=workload_of([(-e.age_s, e.prompt_tokens, _output_tokens(e, typical)) for e in load]),
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
