"""What a router's status says of the cluster: who is there, how they stand, and whether their clocks agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from kvrelay.client.types import ClusterStatus, WorkerState
from kvrelay.doctor.finding import Finding, Verdict
from worker.options import pool_of
from worker.roles import PHASES, ROLES

PART = "cluster"
LATE_S = 0.5  # of an event loop
OLD_S = 3.0  # of a report: one comes every 200 ms, and of large clusters less often
STEP_S = 10.0
FAR_S = 0.05  # a message there and back
CLOCK_S = 1.0  # between hosts' times of day


def cluster(status: ClusterStatus) -> Iterator[Finding]:
    yield _router(status)
    ready = [worker for worker in status.workers if worker.state == "ready"]
    for model in dict.fromkeys(("", *(worker.model for worker in status.workers))):
        own = [worker for worker in ready if worker.role in ROLES and worker.model == model]
        for phase in PHASES:
            if not any(phase in ROLES[worker.role].phases for worker in own):
                found = f"no worker that computes it{f' for {model}' if model else ''} is ready"
                mend = "start one (kvrelay scale), or see kvrelay status for why none is ready"
                yield Finding(part=PART, name=phase, verdict="bad", found=found, mend=mend)
    for worker in status.workers:
        yield _worker(worker)
    if ready:
        yield from _clocks(ready)


def missing(status: ClusterStatus, replicas: Mapping[str, int]) -> Iterator[Finding]:
    """Workers of a spec's pools that no router knows: they still wait for what they want of Ray, or were let go."""
    have = Counter(pool_of(worker.name) for worker in status.workers)
    for pool, wanted in replicas.items():
        if have[pool] < wanted:
            mend = f"kvrelay scale {pool} {wanted} says what they wait for"
            found = f"{have[pool]} of {wanted} workers are there"
            yield Finding(part=PART, name=pool, verdict="doubtful", found=found, mend=mend)


def _router(status: ClusterStatus) -> Finding:
    name, busy = status.router_id or "router", status.num_in_flight + status.num_queued
    found = f"up {status.uptime_s:.0f} s, {busy} requests under way" + (": figures include their load" if busy else "")
    if status.loop_lag_s > LATE_S:
        mend = "give it a core of its own, or more routers: tokens wait in it"
        found += f"; its event loop is {status.loop_lag_s:.1f} s late"
        return Finding(part=PART, name=name, verdict="doubtful", found=found, mend=mend)
    return Finding(part=PART, name=name, verdict="good", found=found)


def _worker(worker: WorkerState) -> Finding:
    """With all that stands against it."""
    troubles = list(_troubles(worker))
    for wanted in ("bad", "doubtful"):
        if any(verdict == wanted for verdict, _, _ in troubles):
            mend = next(mend for verdict, _, mend in troubles if verdict == wanted)
            found = "; ".join(found for _, found, _ in troubles)
            return Finding(part=PART, name=worker.name, verdict=wanted, found=found, mend=mend)
    found = f"{worker.role}, ready at {worker.address}, heard {worker.report_age_s:.1f} s ago"
    return Finding(part=PART, name=worker.name, verdict="good", found=found)


def _troubles(worker: WorkerState) -> Iterator[tuple[Verdict, str, str]]:
    why = f": {worker.reason}" if worker.reason else ""
    if worker.state in ("draining", "drained"):
        yield "doubtful", f"{worker.state}{why}", f"kvrelay drain {worker.name} --undo takes it back"
    elif worker.state != "ready":
        yield "bad", f"{worker.state}{why}", f"read {worker.name}'s log: it serves nothing so"
        return
    for pair in worker.pairs:
        yield (
            "bad",
            f"cannot hand over to {pair.peer}: {pair.reason}",
            "see whether the two reach each other's addresses",
        )
    if worker.circuit not in ("", "closed"):
        circuit = worker.circuit.replace("_", " ")
        yield "bad", f"its circuit is {circuit}{why}", "read its log: it failed one request after another"
    if worker.quarantined_pages:
        found = f"{worker.quarantined_pages} of its pages are out of use"
        yield "doubtful", found, "end the sender that hangs: it may still write them"
    if worker.losses:
        yield "doubtful", f"lost {worker.losses} times since the router started", "read its log for why it ended"
    if worker.report_age_s > OLD_S:
        yield "doubtful", f"last heard {worker.report_age_s:.1f} s ago", "see whether its host is overloaded"
    if worker.loop_lag_s > LATE_S:
        yield "doubtful", f"its event loop is {worker.loop_lag_s:.1f} s late", "give it more cores (threads, cpus)"
    if worker.step_age_s > STEP_S:
        yield "doubtful", f"its step has been running for {worker.step_age_s:.0f} s", "see whether its device hangs"


def _clocks(workers: Sequence[WorkerState]) -> Iterator[Finding]:
    for worker in workers:
        if abs(worker.clock_ahead_s) > CLOCK_S:
            way = "ahead of" if worker.clock_ahead_s > 0 else "behind"
            found = f"its time of day is {abs(worker.clock_ahead_s):.1f} s {way} the router's"
            mend = "run chrony or systemd-timesyncd on both hosts: certificates and logs go by it"
            yield Finding(part=PART, name=f"{worker.name}'s clock", verdict="doubtful", found=found, mend=mend)
        if worker.round_trip_s > FAR_S:
            found = f"{1e3 * worker.round_trip_s:.0f} ms to the router and back"
            mend = "place router and workers nearer to each other: every token waits for half of it"
            yield Finding(part=PART, name=f"{worker.name}'s way", verdict="doubtful", found=found, mend=mend)
    ahead = [0.0, *(worker.clock_ahead_s for worker in workers)]  # the router's own first
    apart_s = max(ahead) - min(ahead)
    way_s = max(worker.round_trip_s for worker in workers)
    if max(map(abs, ahead)) <= CLOCK_S and way_s <= FAR_S:
        found = f"within {1e3 * apart_s:.1f} ms of each other, {1e3 * way_s:.1f} ms there and back at most"
        yield Finding(part=PART, name="clocks", verdict="good", found=found)
