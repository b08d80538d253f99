"""Replanner watches a cluster from beside it, as an operator would: it asks routers what came and how it fared, plays
that against other arrangements of workers, and has them change where that pays.

    look: status, load -> Seen -> play the arrangements near by -> decide -> journal; act: set_role, scale, in turns
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from statistics import median
from typing import Any

import numpy as np

from cluster.router.options import RouterOptions
from engine.knobs import read
from kvrelay.client.client import Client
from kvrelay.client.types import ClusterStatus, EndedRequest, KvrelayError, RouterLoad, WorkerState
from kvrelay.replan.carrying import SERVING, Carrier
from kvrelay.replan.journal import Change, Entry, Journal, changes_of, journal_at
from kvrelay.replan.options import Asked
from placement.replan.distserve import Profile
from placement.replan.play import Bounds, weigh, weigh_shifts
from placement.replan.policy import Decision, Played, Terms
from placement.replan.seen import Row, Seen, SeenWorker, workload_of
from worker.options import pool_of
from worker.steps.costs import StepCosts

LEAST_REQUESTS = 60  # of which something can be said
SPARE_EVERY_S = 60.0
HANDOFF_S = 0.005  # that a handoff takes, until one was seen
SHORT = 0.25  # the share of handoffs that are shorter than what one takes by itself, without waiting for pages


class NotYet(Exception):
    """Too little was seen: one sentence."""


class OtherCluster(Exception):
    """Another one answers where the one was that it began with: one sentence. Begin anew, with its journal and lock."""


def begin(clients: Sequence[Client], asked: Asked) -> Replanner | None:
    """None: it is to act, and another process has the workers change. Raises KvrelayError."""
    journal = journal_at(clients)
    return Replanner(clients, asked, journal) if not asked.acts or journal.hold() else None


class Replanner:
    def __init__(self, clients: Sequence[Client], asked: Asked, journal: Journal) -> None:
        """`clients`: of each router, whose loads add up."""
        self._clients = clients
        self._asked = asked
        self._journal = journal
        self._cluster_id: str | None = None  # as the first look finds it
        self._carrier = Carrier(clients[0])
        self._spare_since_s: float | None = None  # since when one worker less would have done
        self._spare_looked_s = -math.inf
        self._profile: Profile | None = None  # of what came when arrangements were chosen; distserve

    def look(self) -> Entry:
        """Once. Raises NotYet, OtherCluster, SetupError for what is not simulated, KvrelayError where a router does not
        answer."""
        slo, seen = self._asked.slo, self._see()
        now = time.monotonic()
        terms = Terms(
            wanted=slo.attainment,
            measured=seen.attainment(slo.ttft_s, slo.tpot_s),
            seen_s=seen.seen_s,
            prices=self._carrier.prices(),
            spare_s=0.0 if self._spare_since_s is None else now - self._spare_since_s,
            undo=self._carrier.undo_at(seen.roles),
        )
        bounds = self._bounds(now)
        if self._asked.policy == "distserve":
            weighed, self._profile = weigh_shifts(seen, slo, self._profile, bounds)
        else:
            weighed = weigh(seen, slo, bounds, terms)
            self._note_spare(weighed.decision, bounds, now, is_enough=terms.is_enough)
        moves = weighed.decision.moves
        changes = [Change(**asdict(move)) for move in moves]
        entry = Entry(
            roles=seen.roles,
            requests=len(seen.ttft_s),
            rate=round(seen.rate, 3),
            measured=round(terms.measured, 4),
            reason=weighed.decision.reason,
            mode=self._asked.mode,
            tried=[_tried(played) for played in (weighed.present, *weighed.others)],
            changes=changes,
        )
        try:
            if self._asked.acts:
                self._carrier.carry_out(moves, changes)
        finally:
            if changes or (weighed.others and not terms.is_enough):
                self._tell(entry)
                self._journal.add(entry)
        return entry

    def _tell(self, entry: Entry) -> None:
        """The routers, which show it. One that is away, or too old to know of this, shows it not."""
        what = "; ".join(changes_of(asdict(entry))) or "all stays as it is"
        for client in self._clients:
            with contextlib.suppress(KvrelayError):
                client.note_decision("planner", what, entry.reason, acted=self._asked.acts)

    def _bounds(self, now: float) -> Bounds:
        """To play one worker less takes time from a cluster that is well: it is done now and then."""
        most = self._asked.most_devices
        may_shrink = most is not None and now - self._spare_looked_s >= SPARE_EVERY_S
        return Bounds(
            most_changes=self._asked.most_changes,
            most_devices=most,
            may_shrink=may_shrink,
            barred=self._carrier.barred,
        )

    def _note_spare(self, decision: Decision, bounds: Bounds, now: float, *, is_enough: bool) -> None:
        if decision.is_spare and self._spare_since_s is None:
            self._spare_since_s = now
        elif not is_enough or decision.moves or (bounds.may_shrink and not decision.is_spare):
            self._spare_since_s = None
        if bounds.may_shrink:
            self._spare_looked_s = now

    def _see(self) -> Seen:
        status, window_s = self._clients[0].status(), self._asked.window_s
        self._cluster_id = status.cluster_id if self._cluster_id is None else self._cluster_id
        if status.cluster_id != self._cluster_id:
            raise OtherCluster(f"another cluster is at {self._clients[0].endpoint}, begun since the last look")
        if len(status.models) > 1:
            several = f"this cluster serves {' and '.join(status.models)}"
            raise KvrelayError(
                "FAILED_PRECONDITION", f"{several}, and a replanner knows one model; scale pools by hand"
            )
        load = added([client.load(window_s) for client in self._clients])
        if len(load) < LEAST_REQUESTS:
            raise NotYet(f"{len(load)} requests have come and gone in {window_s:g} s; {LEAST_REQUESTS} must")
        age_s = time.monotonic() - self._carrier.changed_s
        newer = [ended for ended in load if ended.age_s < age_s]
        if len(newer) < LEAST_REQUESTS:
            raise NotYet(f"{len(newer)} requests have come and gone since the last change; {LEAST_REQUESTS} must")
        if self._asked.most_devices is not None:
            self._check_nobody_comes({pool_of(worker.name) for worker in status.workers})
        seen = replace(seen_of(status, load, newer), num_routers=len(self._clients))
        if phase := seen.missing_costs:
            raise NotYet(f"no worker's steps of {phase} were measured yet")
        return seen

    def _check_nobody_comes(self, pools: Collection[str]) -> None:
        """Or goes: an operator may be changing pools just now. Raises NotYet."""
        for pool in sorted(pools):
            for each in self._clients[0].scale(pool, look=True):
                raise NotYet(f"{each.name} is {each.stage}")


def added(loads: Sequence[RouterLoad]) -> list[EndedRequest]:
    """For as long as all of them are whole: of a busy router that is shorter, of one that was restarted, too."""
    whole_s = min(load.whole_s for load in loads)
    return [ended for load in loads for ended in load.requests if ended.age_s <= whole_s]


def _tried(played: Played) -> dict[str, Any]:
    arrangement, share = played.arrangement, round(played.attainment, 4)
    return {"roles": dict(arrangement.roles), "chunks": dict(arrangement.chunks), "attainment": share}


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
        workload=workload_of([_row(ended, typical) for ended in load]),
        ttft_s=np.array([np.inf if ended.failed else ended.ttft_s for ended in newer]),
        tpot_s=np.array([np.inf if ended.failed else ended.tpot_s for ended in newer]),
        handoff_s=float(np.quantile(handoffs_s, SHORT)) if handoffs_s else HANDOFF_S,
        cached_share=sum(e.cached_tokens for e in load) / max(1, sum(e.prompt_tokens for e in load)),
        rate=len(load) / max(seen_s, 1e-3),
        seen_s=seen_s,
        slo_ttft_s=np.array([ended.slo_ttft_s for ended in newer]),
        slo_tpot_s=np.array([ended.slo_tpot_s for ended in newer]),
    )


def _row(ended: EndedRequest, typical: int) -> Row:
    """One that failed would have had more tokens."""
    tokens = max(ended.output_tokens, typical) if ended.failed else max(1, ended.output_tokens)
    return Row(-ended.age_s, ended.prompt_tokens, tokens, ended.slo_ttft_s, ended.slo_tpot_s)


def _seen(worker: WorkerState) -> SeenWorker:
    return SeenWorker(
        name=worker.name,
        role=worker.role,
        num_pages=worker.total_pages,
        page_size=worker.page_size,
        limits=worker.limits,
        costs=StepCosts(**worker.step_costs) if worker.step_costs else None,
    )
