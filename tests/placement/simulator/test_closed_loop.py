"""Clients who wait for their answers: so many requests are out, no more and no fewer, and each end sends the next."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cluster.router.options import RouterOptions
from placement.goodput.estimate import burst, estimate
from placement.goodput.targets import Targets
from placement.plan import Slo
from placement.simulator.cluster import Loss, SimCluster
from placement.simulator.outcome import Outcome
from placement.simulator.systems import LiveSystem
from placement.workload.closed_loop import ClosedLoop
from placement.workload.requests import Workload
from placement.workload.traces import WorkloadError
from placement.workload.traffic import Traffic
from tests.placement.simulator.test_cancels import ended
from tests.placement.simulator.test_simulate import cluster, play, requests, same, workers

pytestmark = pytest.mark.unit

PAIR = cluster(workers("prefill"), workers("decode"))
MIXED = cluster(workers("mixed"))
SETUPS = pytest.mark.parametrize("setup", [PAIR, MIXED, replace(PAIR, num_routers=3)], ids=["pair", "mixed", "routers"])


def looped(max_concurrency: int, think_s: float = 0.0, count: int = 120) -> Workload:
    workload = requests(count)
    loop = ClosedLoop(max_concurrency=max_concurrency, think_s=think_s)
    return replace(workload, arrival_s=np.zeros(count), loop=loop)


def out_after_each_is_sent(outcome: Outcome) -> list[int]:
    sent_s = outcome.workload.arrival_s
    return [int((sent_s <= at).sum() - (outcome.finish_s <= at).sum()) for at in sent_s]


@SETUPS
@pytest.mark.parametrize("clients", [1, 7, 40])
def test_as_many_are_out_as_there_are_clients(setup: SimCluster, clients: int) -> None:
    _, outcome = play(setup, looped(clients))
    assert outcome.served == 120
    assert set(out_after_each_is_sent(outcome)) == {clients}


@SETUPS
def test_a_client_thinks_before_it_asks_again(setup: SimCluster) -> None:
    _, outcome = play(setup, looped(5, think_s=0.25))
    free_s = np.sort(outcome.finish_s)[: 120 - 5] + 0.25
    assert outcome.workload.arrival_s[:5] == pytest.approx(0.0)
    assert outcome.workload.arrival_s[5:] == pytest.approx(free_s, abs=1e-12)


@SETUPS
@pytest.mark.parametrize("clients", [1, 6])
def test_it_is_the_open_loop_of_the_times_at_which_they_asked(setup: SimCluster, clients: int) -> None:
    """A millisecond after the answer, so that the two are no events of one time."""
    _, closed = play(setup, looped(clients, think_s=0.001))
    _, opened = play(setup, replace(closed.workload, loop=None))
    assert opened.first_token_s == pytest.approx(closed.first_token_s, abs=1e-9)
    assert opened.finish_s == pytest.approx(closed.finish_s, abs=1e-9)
    assert opened.counters == closed.counters


@SETUPS
def test_with_a_client_for_each_request_nobody_waits_for_one(setup: SimCluster) -> None:
    workload = requests(60, rate=20)
    loop = ClosedLoop(max_concurrency=60)
    _, closed = play(setup, replace(workload, loop=loop))
    assert np.array_equal(closed.workload.arrival_s, workload.arrival_s)
    assert same(closed, play(setup, workload)[1])


def test_who_is_due_before_a_client_is_free_waits_outside() -> None:
    """At twice the rate that two clients get: sent late, and the latency counts from then."""
    workload = replace(requests(60, rate=20), loop=ClosedLoop(max_concurrency=2))
    _, outcome = play(PAIR, workload)
    assert np.all(outcome.workload.arrival_s >= workload.arrival_s)
    assert outcome.workload.arrival_s[-1] > 2 * workload.arrival_s[-1]
    assert max(out_after_each_is_sent(outcome)) == 2
    assert sum(outcome.phases.values()) == pytest.approx(outcome.e2e_s)


def test_a_refusal_and_a_client_that_leaves_make_room_for_the_next() -> None:
    few = replace(PAIR, router=RouterOptions(max_queued_requests=2, max_backlog_tokens=300))
    workload = looped(8, think_s=0.05)
    leaving = replace(workload, cancel_after_s=np.where(np.arange(120) % 4, np.inf, 0.02))
    _, outcome = play(few, leaving)
    assert ended(outcome) == 120
    assert outcome.counters["rejected"] > 0
    assert outcome.counters["cancelled"] > 0


def test_where_nobody_is_answered_any_more_the_rest_is_never_sent() -> None:
    lost = replace(PAIR, losses=(Loss(worker="decode-0", at_s=1.0),))
    outcome = LiveSystem(lost).play(looped(4))
    assert 0 < outcome.served < 120 - 4
    assert np.isnan(outcome.finish_s[-1])
    assert np.all(np.diff(outcome.workload.arrival_s) >= 0)


@pytest.mark.parametrize("think_s", [0.0, 2.0])
def test_in_the_long_run_littles_law_gives_the_rate(think_s: float) -> None:
    loop = ClosedLoop(max_concurrency=12, think_s=think_s)
    traffic = Traffic(source=requests(), loop=loop)
    system = LiveSystem(PAIR)
    targets = Targets(slo=Slo(ttft_s=1.0, tpot_s=0.1))
    point = estimate(system, traffic, np.inf, targets).point
    mean_s = sum(point.phases_s.values())
    assert point.rate == pytest.approx(12 / (mean_s + think_s), rel=0.03)
    assert point.is_settled
    whole = burst(system, traffic, np.inf, targets, 600)
    assert whole.rate == pytest.approx(point.rate, rel=0.08)


@pytest.mark.parametrize(("clients", "think_s", "wrong"), [(0, 0.0, "concurrency is 0"), (1, -1.0, "think time is -1")])
def test_a_loop_of_nobody_is_refused(clients: int, think_s: float, wrong: str) -> None:
    with pytest.raises(WorkloadError, match=wrong):
        ClosedLoop(max_concurrency=clients, think_s=think_s)
