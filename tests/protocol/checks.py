"""What must hold: after every step, and when all is over.

    always       no token lost or doubled, no page in two places, nothing is written but leased pages
    in_the_end   each request has its whole answer or a documented end, nobody holds a page, a lease or a request

An end without the answer must have a reason in what was done to it: see may_end_with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpc import StatusCode

from kv_transfer.lease import LeaseState, LeaseTable
from tests.protocol.process import Process
from tests.protocol.threads import ModelSendThread

if TYPE_CHECKING:
    from tests.protocol.world import Client, World

MOST_LEASE_S = 30.0  # lease_ttl_s
MAX_DEATHS = 2


def always(world: World) -> None:
    cluster = world.cluster
    assert not cluster.loop.errors, cluster.loop.errors
    for client in world.clients:
        answer = world.setting.answer(client.number)
        assert client.tokens == answer[: len(client.tokens)], f"request {client.number} got {client.tokens}"
    cluster.router.check_invariants()
    for process in cluster.processes.values():
        if process.is_alive:
            process.role.check_invariants()
    for sender in cluster.senders.values():
        _check_write(sender)
    if not world.faults_done:
        assert cluster.kills <= MAX_DEATHS * (world.setting.poison is not None), "a third worker dies of one request"


def _check_write(sender: ModelSendThread) -> None:
    owner, target = sender.owner, sender.target
    if sender.writing is None or not owner.is_alive or not target.is_alive:
        return
    for page in sender.writing.dst_pages:
        is_leased = page in _leases(target)._page_of
        assert is_leased, f"{owner.name} writes into page {page} of {target.name}, which is not leased"


def _leases(process: Process) -> LeaseTable[object]:
    table: LeaseTable[object] = process.reservations.handoffs.leases._table
    return table


def no_lease_is_overdue(world: World) -> None:
    """When all timers ring in time."""
    now = world.cluster.loop.now_s
    for process in world.cluster.processes.values():
        if not process.is_alive or not process.decodes:
            continue
        for lease in _leases(process)._leases.values():
            is_bounded = lease.state is LeaseState.QUARANTINED or now <= lease.due_s <= now + MOST_LEASE_S
            assert is_bounded, f"the lease {lease.key} of {process.name} has no end: {lease}"


def in_the_end(world: World) -> None:
    for client in world.clients:
        _check_client(world, client)
    dispatcher, policy = world.cluster.router._dispatcher, world.cluster.router.policy
    kept = [*dispatcher._live, *dispatcher._stalled, *dispatcher.submissions, *policy._requests, *policy.queued]
    assert not kept, f"the router keeps {kept}"
    for process in world.cluster.processes.values():
        if process.is_alive:
            _check_idle(process)


def _check_client(world: World, client: Client) -> None:
    assert client.is_over, f"request {client.number} has no end"
    if client.error is None:
        assert client.tokens == world.setting.answer(client.number), f"request {client.number} got {client.tokens}"
        return
    codes = may_end_with(world, client)
    assert client.error.code in codes, f"request {client.number}: {client.error.code} {client.error.message}"


def may_end_with(world: World, client: Client) -> set[StatusCode]:
    """The codes with which it may end, besides with its answer."""
    given_up = {
        "cancel": {StatusCode.CANCELLED},
        "deadline": {StatusCode.DEADLINE_EXCEEDED},
        "router": {StatusCode.UNAVAILABLE},
    }
    if client.given_up:
        return given_up[client.given_up]
    codes = set()
    is_poison = world.setting.poison is not None and world.setting.poison[0] == client.number
    if is_poison or world.cluster.kills >= MAX_DEATHS:
        codes.add(StatusCode.FAILED_PRECONDITION)
    if len(world.faults_done) >= world.cluster.router.policy.options.max_attempts:
        codes.add(StatusCode.UNAVAILABLE)
    return codes


def _check_idle(process: Process) -> None:
    usage = process.pool.usage
    assert not process.role.requests, f"{process.name} keeps {list(process.role.requests)}"
    assert not usage.held, f"{process.name} keeps {usage.held} pages"
    if process.decodes:
        leases = process.reservations.handoffs.leases
        assert not leases._reservations, f"{process.name} keeps reservations"
        assert not leases.leased_pages, f"{process.name} keeps leases"
