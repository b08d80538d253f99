"""The faults of a world: which may happen now, by a name that says where, and what each does.

kill, sever NAME     a worker's process ends; the router and a worker lose each other
fail NAME            the step that a worker's engine computes fails
cut WAY              a handoff's stream breaks
expire N             a lease's time is over, or its fence's
cancel, deadline R   the client of request R goes away; its deadline is over
drain NAME           a worker is about to stop, while another one of its kind is not; or is not any more
router               the router's process ends, another is started; clients send again what had no end, or go away
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, cast

from cluster.router.live.requests import Submission
from kv_transfer.decode_side.leases import LeaseKeeper
from tests.protocol.cluster import Cluster
from tests.protocol.loop import owner
from tests.protocol.process import Process

Places = dict[str, Callable[[], None]]


class Client(Protocol):
    number: int
    submission: Submission | None
    given_up: str  # the fault by which, if it has


class Crowd(Protocol):
    """The clients of the cluster."""

    @property
    def waiting(self) -> list[Any]: ...

    def hear_of_restart(self) -> None: ...


def places(kinds: tuple[str, ...], cluster: Cluster, clients: Crowd) -> Places:
    """By name, what each fault that may happen now does."""
    return {f"{kind} {where}".strip(): do for kind in kinds for where, do in KINDS[kind](cluster, clients).items()}


def _kill(cluster: Cluster, _: Crowd) -> Places:
    return {p.name: partial(cluster.kill, p) for p in cluster.processes.values() if cluster.is_linked(p)}


def _sever(cluster: Cluster, _: Crowd) -> Places:
    return {p.name: partial(cluster.sever, p) for p in cluster.processes.values() if cluster.is_linked(p)}


def _fail(cluster: Cluster, _: Crowd) -> Places:
    alive = [p for p in cluster.processes.values() if p.is_alive and p.batch is not None]
    return {p.name: partial(_fail_step, cluster, p) for p in alive}


def _fail_step(cluster: Cluster, process: Process) -> None:
    cluster.act(process).end_step("no number")


def _drain(cluster: Cluster, _: Crowd) -> Places:
    alive = [p for p in cluster.processes.values() if p.is_alive]
    roles = [p.options.role for p in alive if not p.is_draining]
    return {p.name: partial(_turn, p) for p in alive if p.is_draining or roles.count(p.options.role) > 1}


def _turn(process: Process) -> None:
    process.is_draining = not process.is_draining


def _cut(cluster: Cluster, _: Crowd) -> Places:
    return {call.down: partial(cluster.break_call, call) for call in cluster.standing}


def _expire(cluster: Cluster, _: Crowd) -> Places:
    timers = [timer for timer in cluster.loop.timers if _is_expiry(timer)]
    return {str(i): partial(_expire_now, cluster, timer) for i, timer in enumerate(timers)}


def _expire_now(cluster: Cluster, timer: asyncio.TimerHandle) -> None:
    cluster.loop.now_s = max(cluster.loop.now_s, timer.when())
    cluster.loop.ring(timer)


def _is_expiry(timer: Any) -> bool:
    keeper = getattr(timer._callback, "__self__", None)
    return isinstance(keeper, LeaseKeeper) and bool(cast(Any, keeper)._host._host.is_alive)


def _cancel(cluster: Cluster, clients: Crowd) -> Places:
    return {str(client.number): partial(_go_away, cluster, client) for client in clients.waiting}


def _go_away(cluster: Cluster, client: Client) -> None:
    assert client.submission is not None
    client.given_up = "cancel"
    owner.set(cluster.router)
    cluster.router.cancel(client.submission, "the client went away")


def _deadline(cluster: Cluster, clients: Crowd) -> Places:
    return {str(client.number): partial(_be_late, cluster, client) for client in clients.waiting}


def _be_late(cluster: Cluster, client: Client) -> None:
    assert client.submission is not None
    client.given_up = "deadline"
    cluster.loop.ring(client.submission.timers[0])


def _router(cluster: Cluster, clients: Crowd) -> Places:
    return {"": partial(_restart_router, cluster, clients)}


def _restart_router(cluster: Cluster, clients: Crowd) -> None:
    cluster.end_router()
    cluster.start_router()
    clients.hear_of_restart()


KINDS: dict[str, Callable[[Cluster, Crowd], Places]] = {
    "kill": _kill,
    "sever": _sever,
    "fail": _fail,
    "cut": _cut,
    "drain": _drain,
    "expire": _expire,
    "cancel": _cancel,
    "deadline": _deadline,
    "router": _router,
}
