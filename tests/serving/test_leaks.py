"""Nothing leaks: after a thousand requests of every kind and fate at once, nobody holds anything.

The pools are small, so that handoffs stall, requests queue, are preempted and rejected; every one of these is asserted
to have happened, so that the test shows what it says.
"""

from __future__ import annotations

import random

from cluster.deploy.local import LocalCluster
from kv_transfer.transports.faulty import Faults
from kvrelay.client.client import AsyncClient
from tests.serving.conftest import ModelDir
from tests.serving.harness import WAIT_S, counters, engine_with, router_with, worker_with
from tests.serving.soak import TIMEOUT_S, Soak, learn

CONCURRENCY = 80
QUEUE = 24  # so many wait in the router
PREFILL_PAGES = 40
DECODE_PAGES = 30


def soak_cluster(directory: str, transport: str, faults: Faults | None) -> LocalCluster:
    return LocalCluster(
        directory,
        prefill=2,
        decode=2,
        engine=engine_with(num_pages=PREFILL_PAGES),
        decode_engine=engine_with(num_pages=DECODE_PAGES),
        worker=worker_with(max_batch_tokens=64, max_batch_size=12, transports=(transport,), timeout_s=WAIT_S),
        router=router_with(max_queued_requests=QUEUE, overcommit=0.5),
        faults=faults,
    )


async def soak(directory: str, seed: int, num_requests: int, transport: str, faults: Faults | None = None) -> None:
    cluster = soak_cluster(directory, transport, faults)
    async with cluster, AsyncClient(cluster.endpoint) as client:
        templates = await learn(client, random.Random(seed), 20)
        run = Soak(cluster, templates, seed)
        await run.run(client, num_requests, CONCURRENCY)
        assert run.wrong == []
        await cluster.settled()
        cluster.check_invariants()
        _check_nothing_is_left(cluster)
        _check_that_it_was_hard(cluster, run, is_damaged=faults is not None)
        _check_that_counters_add_up(cluster, run, is_damaged=faults is not None)
        for template in templates:
            answer = await client.generate(template.prompt, timeout_s=TIMEOUT_S, **template.options)
            assert answer.choices == template.choices


def _check_nothing_is_left(cluster: LocalCluster) -> None:
    assert cluster.server is not None
    router = cluster.server.router
    assert router.num_submissions == 0
    dispatcher = router._dispatcher
    assert (dispatcher._live, dispatcher._submissions) == ({}, {})
    assert router.policy.num_queued == 0
    assert router.policy._requests == {}
    for worker in cluster.workers:
        assert worker.role.requests == {}
        assert worker.role.policy.request_ids == []
    for prefill in cluster.prefill:
        assert not prefill.role.handoffs._tasks
        assert all(not peer.result()._handoffs for peer in prefill.role.handoffs.peers._connections.values())
    for decode in cluster.decode:
        assert decode.role.reservations.handoffs.leases._reservations == {}
        assert decode.role.reservations.handoffs.leases.leased_pages == 0


def _check_that_it_was_hard(cluster: LocalCluster, run: Soak, *, is_damaged: bool) -> None:
    counts = counters(cluster)
    happened = ["preemptions", "handoffs_stalled", "router_cancelled", "prefix_hit_tokens"]
    happened += ["handoffs_failed", "router_retries"] if is_damaged else ["router_rejected"]
    for name in happened:
        assert counts[name] > 0, f"{name} never happened"
    for outcome in ("answered", "closed", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED"):
        assert run.outcomes[outcome] > 0, f"no request ended as {outcome}"


def _check_that_counters_add_up(cluster: LocalCluster, run: Soak, *, is_damaged: bool) -> None:
    counts = counters(cluster)
    ended = sum(counts[f"router_{name}"] for name in ("finished", "cancelled", "rejected", "failed"))
    assert counts["router_requests"] == ended
    assert counts["router_failed"] == 0
    assert counts["router_workers_lost"] == 0
    told = run.outcomes["RESOURCE_EXHAUSTED"] + run.outcomes["second RESOURCE_EXHAUSTED"]
    assert told <= counts["router_rejected"] <= told + run.outcomes["closed"]
    assert counts["router_preempted"] <= counts["preemptions"]
    for decode in cluster.decode:
        its = decode.report().counters
        assert its["leases_granted"] == its["receipts_good"] + its["leases_ended"] + its["leases_aborted"]
    for name in ("checksum_mismatches", "receipts_bad", "resends"):
        assert bool(counts[name]) == is_damaged, f"{counts[name]} {name}"


async def test_hundreds_of_requests_leave_nothing_behind(model_dir: ModelDir) -> None:
    await soak(str(model_dir("llama")), seed=1, num_requests=300, transport="shared_memory")


async def test_requests_over_a_bad_transport_leave_nothing_behind(model_dir: ModelDir) -> None:
    """Slow, damaging, and breaking now and then: cancels and deadlines meet handoffs at every stage."""
    faults = Faults(delay_s=0.003, corrupt=frozenset(range(0, 10_000, 5)), fail=frozenset(range(50, 10_000, 150)))
    await soak(str(model_dir("llama")), seed=2, num_requests=150, transport="process_group", faults=faults)
