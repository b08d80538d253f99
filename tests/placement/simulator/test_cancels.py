"""Clients that leave: at whatever stage their requests are, all that workers hold for them comes back."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from cluster.router.options import RouterOptions
from decode_worker.options import DecodeOptions
from placement.goodput.estimate import Effort, burst, estimate
from placement.goodput.targets import Targets
from placement.plan import Slo
from placement.simulator.cluster import Drain, Loss, SimCluster
from placement.simulator.outcome import Outcome
from placement.simulator.simulate import simulate
from placement.simulator.systems import LiveSystem
from placement.workload.requests import Workload
from placement.workload.traffic import Traffic
from tests.placement.simulator.test_mixed import lone
from tests.placement.simulator.test_simulate import Plain, cluster, play, requests, workers

pytestmark = pytest.mark.unit

SLOW = Plain(wire_s_per_token=1e-3)
NEVER = np.inf


def leaving(workload: Workload, **after_s: float) -> Workload:
    """Who leaves: r3=0.5 is request 3, half a second after it came."""
    times = np.full(len(workload), NEVER)
    for name, seconds in after_s.items():
        times[int(name[1:])] = seconds
    return replace(workload, cancel_after_s=times)


def without(workload: Workload, row: int) -> Workload:
    kept = np.arange(len(workload)) != row
    columns = (workload.arrival_s[kept], workload.prompt_len[kept], workload.output_len[kept])
    return Workload(arrival_s=columns[0], prompt_len=columns[1], output_len=columns[2])


def ended(outcome: Outcome) -> int:
    return outcome.served + sum(outcome.counters.get(name, 0) for name in ("rejected", "failed", "cancelled"))


@pytest.mark.parametrize("after_s", [0.0, 0.0005, 0.0105, 0.0215, 0.06, 0.2, 1.0])
@pytest.mark.parametrize("roles", [("prefill", "decode"), ("mixed",), ("mixed", "prefill", "decode")], ids="+".join)
def test_it_may_leave_at_any_stage(roles: tuple[str, ...], after_s: float) -> None:
    """On its way to prefill, being read, its first token on its way, its KV, being written."""
    setup = cluster(*(workers(role, latency=SLOW) for role in roles), message_s=0.001)
    _, outcome = play(setup, leaving(lone(100, 100), r0=after_s))
    assert outcome.counters["cancelled"] == 1
    assert outcome.served == 0
    assert outcome.cancelled_s[0] == pytest.approx(5.0 + after_s)
    assert sum(spent[0] for spent in outcome.phases.values()) == pytest.approx(after_s)
    assert np.isnan(outcome.first_token_s[0]) == (after_s < 0.022)
    assert sum(outcome.busy_s.get(role, 0.0) for role in ("prefill", "decode", "mixed")) < after_s + 0.022


def test_an_answer_that_has_come_is_not_cancelled() -> None:
    _, outcome = play(cluster(workers("prefill"), workers("decode")), leaving(lone(100, 10), r0=2.0))
    assert outcome.served == 1
    assert "cancelled" not in outcome.counters
    assert not len(outcome.cancelled_s)


def test_who_leaves_the_routers_queue_leaves_no_trace() -> None:
    workload = requests(60, rate=40)
    setup = cluster(workers("prefill"), workers("decode"), router=RouterOptions(max_backlog_tokens=100))
    _, outcome = play(setup, leaving(workload, r30=0.01))
    assert outcome.phases["prefill_queue"][30] == 0, "it waits in the router"
    _, other = play(setup, without(workload, 30))
    assert np.delete(outcome.finish_s, 30) == pytest.approx(other.finish_s)


def test_pages_come_back_a_message_later() -> None:
    """The second waits for the pages of the first, which leaves 0.5 s after it came."""
    workload = lone(300, 1000, (5.05, 300, 20))
    few = workers("decode", num_pages=90, policy=DecodeOptions(max_batch_size=16, admission="worst_case"))
    setup = cluster(workers("prefill"), few, message_s=0.001, report_gap_s=0.005)
    stays, leaves = (play(setup, each)[1] for each in (workload, leaving(workload, r0=0.5)))
    assert stays.finish_s[1] > 10
    assert leaves.counters["stalled"] == 1
    granted_s = 5.5 + 0.001
    steps_s = 19 * 0.0105
    assert leaves.finish_s[1] == pytest.approx(granted_s + steps_s, abs=0.02)


def test_others_in_the_batch_go_on_faster_after_the_step() -> None:
    heavy = Plain(single_steps=True)
    workload = lone(300, 2000, (5.0, 10, 500))
    setup = cluster(workers("prefill"), workers("decode", latency=heavy, num_pages=1000))
    both, one = (play(setup, each)[1] for each in (workload, leaving(workload, r0=1.0)))
    assert one.finish_s[1] < both.finish_s[1] - 300 * 4e-4
    assert one.finish_s[1] > play(setup, without(workload, 0))[1].finish_s[0]


@pytest.mark.parametrize("role", ["decode", "mixed"])
def test_passing_over_steps_changes_nothing(role: str) -> None:
    """With messages so short that no change of a worker comes between its report and a decision."""
    workload = requests(rate=15)
    times = np.random.default_rng(5).exponential(1.0, len(workload))
    workload = replace(workload, cancel_after_s=np.where(times < 1, times, NEVER))
    many, single = (
        play(
            cluster(
                workers("prefill", latency=latency),
                workers(role, 2, latency=latency, num_pages=60),
                report_gap_s=1e-5,
                message_s=1e-6,
            ),
            workload,
        )[1]
        for latency in (Plain(), Plain(single_steps=True))
    )
    assert many.counters["cancelled"] > 30
    assert many.finish_s == pytest.approx(single.finish_s, rel=1e-9, nan_ok=True)
    assert many.counters == single.counters


@pytest.mark.parametrize(
    "trouble",
    [
        {"queued_reservation_s": 0.3},
        {"drains": (Drain(worker="decode-0", at_s=1.5),)},
        {"losses": (Loss(worker="decode-1", at_s=1.5, back_s=2.5), Loss(worker="prefill-0", at_s=2.0, back_s=3.0))},
    ],
    ids=["no room", "a drain", "losses"],
)
def test_nothing_is_left_whenever_clients_leave_amid_trouble(trouble: dict[str, object]) -> None:
    """A third of them, each time so much later: waiting for pages, moving, between two attempts."""
    slow = Plain(wire_s_per_token=3e-4)
    small = [*workers("prefill", latency=slow), *workers("decode", 2, latency=slow, num_pages=45)]
    setup = cluster(small, **trouble)
    workload = requests(40, rate=20, seed=3)
    cancelled = 0
    for i in range(60):
        times = np.where(np.arange(40) % 3 == i % 3, i * 0.037, NEVER)
        _, outcome = play(setup, replace(workload, cancel_after_s=times))
        assert ended(outcome) == 40, i
        cancelled += outcome.counters.get("cancelled", 0)
    assert cancelled > 300


def drawn(seed: int) -> tuple[SimCluster, Workload]:
    """Any cluster in any trouble, and clients of whom many leave."""
    rng = random.Random(seed)
    counts = {"prefill": rng.randint(0, 2), "decode": rng.randint(0, 3), "mixed": rng.randint(0, 3)}
    if not counts["prefill"] + counts["mixed"]:
        counts["prefill"] = 1
    if not counts["decode"] + counts["mixed"]:
        counts["decode"] = 2
    latency, num_pages = Plain(wire_s_per_token=rng.choice([1e-6, 1e-4, 5e-4])), rng.choice([26, 40, 80, 400])
    pools = [workers(role, count, latency, num_pages=num_pages) for role, count in counts.items() if count]
    names = [worker.name for pool in pools for worker in pool]
    writers = [name for name in names if not name.startswith("prefill")]
    setup = cluster(
        *pools,
        drains=tuple(Drain(worker=name, at_s=rng.uniform(0, 10)) for name in writers[:-1] if rng.random() < 0.4),
        losses=tuple(
            Loss(worker=name, at_s=rng.uniform(0, 10), back_s=rng.uniform(10, 12))
            for name in names
            if rng.random() < 0.3
        ),
        router=rng.choice([RouterOptions(), RouterOptions(slo_ttft_ms=500, slo_tpot_ms=30)]),
        report_gap_s=rng.choice([0.005, 0.02, 0.2]),
        noticed_s=rng.choice([0.006, 0.15]),
        message_s=rng.choice([1e-4, 5e-3]),
    )
    workload = requests(80, rate=rng.choice([5, 15, 40]), seed=seed)
    times = [rng.expovariate(1.0) if rng.random() < 0.6 else NEVER for _ in range(80)]
    priority = np.array([rng.choice([0, 0, 0, -1, 3]) for _ in range(80)])
    return setup, replace(workload, cancel_after_s=np.array(times), priority=priority)


@pytest.mark.parametrize("seed", range(60))
def test_nothing_is_left_in_any_cluster(seed: int) -> None:
    setup, workload = drawn(seed)
    _, outcome = play(setup, workload)
    assert ended(outcome) == 80
    assert outcome.counters["cancelled"] == np.isfinite(outcome.cancelled_s).sum() > 0
    assert np.isfinite(outcome.finish_s[np.isinf(workload.cancel_after_s)]).sum() >= outcome.served / 8


def test_who_left_is_judged_only_if_it_was_late() -> None:
    """One leaves before its TTFT is over, one after, one that has its first token in time and one that had it late."""
    workload = Workload(
        arrival_s=np.arange(6.0),
        prompt_len=np.full(6, 10),
        output_len=np.full(6, 5),
        cancel_after_s=np.array([NEVER, NEVER, 0.1, 0.9, 0.9, 0.9]),
    )
    outcome = Outcome(
        workload=workload,
        first_token_s=workload.arrival_s + np.array([0.2, 0.7, np.nan, np.nan, 0.2, 0.7]),
        finish_s=workload.arrival_s + np.array([0.3, 0.8, *[np.nan] * 4]),
        cancelled_s=workload.arrival_s + np.array([np.nan, np.nan, 0.1, 0.9, 0.9, 0.9]),
    )
    assert outcome.is_judged(0.5).tolist() == [True, True, False, True, False, True]
    assert outcome.attainment(0.5) == 1 / 4
    assert outcome.attainment() == 1.0
    unserved = np.full(6, np.nan)
    all_left = replace(outcome, first_token_s=unserved, finish_s=unserved, cancelled_s=workload.arrival_s)
    assert all_left.attainment(0.5) == 0.0
    assert Targets(slo=Slo(ttft_s=0.5, attainment=0.2)).judge(outcome).attainment == 1 / 4


def test_an_estimate_is_of_the_others() -> None:
    """Half of the clients leave within half of the TTFT that is wanted, where all others have it."""
    system = LiveSystem(cluster(workers("prefill"), workers("decode")))
    source = requests(400, rate=5)
    times = np.where(np.arange(400) % 2, 0.04, NEVER)
    traffic, targets = Traffic(source=replace(source, cancel_after_s=times)), Targets(slo=Slo(ttft_s=1.0, tpot_s=1.0))
    found = estimate(system, traffic, 5.0, targets, effort=Effort(first_requests=800, max_requests=800))
    assert found.point.attainment.value > 0.99
    assert np.isfinite(found.point.ttft_s["99"].value)
    assert not found.is_growing
    assert burst(system, traffic, 5.0, targets, 100).attainment.value > 0.99
    assert simulate(system.cluster, traffic.source).counters["cancelled"] > 150


def test_where_nobody_leaves_it_makes_no_difference() -> None:
    workload = requests(rate=15)
    setup = cluster(workers("prefill"), workers("mixed"), workers("decode", num_pages=60))
    stays = replace(workload, cancel_after_s=np.full(len(workload), NEVER))
    assert np.array_equal(simulate(setup, workload).finish_s, simulate(setup, stays).finish_s)
