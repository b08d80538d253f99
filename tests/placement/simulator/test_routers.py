"""Several simulated routers: each has requests of its own, and knows of the others' by what workers report."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cluster.router.options import RouterOptions
from placement.simulator.cluster import SetupError
from placement.simulator.outcome import Outcome
from tests.placement.simulator.test_cancels import drawn, ended
from tests.placement.simulator.test_simulate import Plain, cluster, play, requests, same, workers

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("num_routers", [2, 5])
def test_they_serve_all_and_each_leaves_nothing(num_routers: int) -> None:
    setup = cluster(workers("prefill", 2), workers("decode", 2, num_pages=60), num_routers=num_routers)
    simulation, outcome = play(setup, requests(rate=15))
    assert outcome.served == 200
    assert len(simulation.routers) == num_routers
    assert same(outcome, play(setup, requests(rate=15))[1])


def test_each_has_a_queue_of_its_own() -> None:
    options = RouterOptions(max_queued_requests=5, max_backlog_tokens=300)
    one, two = (
        play(cluster(workers("prefill"), workers("decode"), router=options, num_routers=n), requests(100, rate=1e5))[1]
        for n in (1, 2)
    )
    assert one.served < two.served <= one.served + 10


def fared(num_routers: int, report_gap_s: float) -> Outcome:
    """Four prefill workers, prompts of one length; a worker that two choose at once has twice the queue."""
    setup = cluster(workers("prefill", 4), workers("decode", 2), num_routers=num_routers, report_gap_s=report_gap_s)
    workload = requests(400, rate=80)
    return play(setup, replace(workload, prompt_len=np.full(400, 250), output_len=np.full(400, 2)))[1]


def test_what_others_have_sent_is_known_from_reports() -> None:
    one, prompt, late = fared(1, 0.01), fared(8, 0.01), fared(8, 3.0)
    assert one.ttft_s.mean() < prompt.ttft_s.mean() < 0.8 * late.ttft_s.mean()


def test_with_targets_several_serve_about_as_one_does() -> None:
    """Each takes workers of its own first, and those of others where its own are late: else all would send what comes
    between two reports to the same one."""
    ttft_s = []
    for num_routers in (1, 4):
        options = RouterOptions(slo_ttft_ms=1000, slo_tpot_ms=100)
        setup = cluster(workers("mixed", 8), router=options, num_routers=num_routers, report_gap_s=0.3)
        workload = requests(400, rate=60)
        outcome = play(setup, replace(workload, prompt_len=np.full(400, 250), output_len=np.full(400, 4)))[1]
        ttft_s.append(outcome.ttft_s.mean())
    assert ttft_s[1] < 1.5 * ttft_s[0]


def test_each_is_told_what_caches_hold() -> None:
    """The first request of each prefix comes to one router, the second to the other, long after."""
    count = 60
    workload = requests(count, rate=5)
    shared = replace(
        workload,
        arrival_s=np.arange(count, dtype=np.float64) * 0.2,
        prompt_len=np.full(count, 256),
        output_len=np.full(count, 2),
        blocks=[(i // 2,) for i in range(count)],
        block_len=240,
    )
    for roles in (("prefill",), ("mixed",)):
        setup = cluster(*(workers(role, 4, num_pages=2000) for role in roles), workers("decode"), num_routers=2)
        assert play(setup, shared)[1].counters["prefix_hit_tokens"] == 30 * 240


@pytest.mark.parametrize("num_pages", [400, 90])
@pytest.mark.parametrize("role", ["decode", "mixed"])
def test_passing_over_steps_changes_nothing(num_pages: int, role: str) -> None:
    """With messages so short that no change of a worker comes between its report and a decision."""
    many, single = (
        play(
            cluster(
                workers("prefill", latency=latency),
                workers(role, 2, latency=latency, num_pages=num_pages),
                report_gap_s=1e-5,
                message_s=1e-6,
                num_routers=3,
            ),
            requests(rate=15),
        )[1]
        for latency in (Plain(), Plain(single_steps=True))
    )
    assert many.served == 200
    assert many.finish_s == pytest.approx(single.finish_s, rel=1e-9)
    assert many.counters == single.counters


@pytest.mark.parametrize("seed", range(60, 100))
def test_nothing_is_left_in_any_cluster(seed: int) -> None:
    setup, workload = drawn(seed)
    _, outcome = play(replace(setup, num_routers=2 + seed % 3), workload)
    assert ended(outcome) == 80
    assert outcome.counters.get("workers_lost", 0) <= len(setup.losses)


def test_there_is_at_least_one() -> None:
    with pytest.raises(SetupError, match="num_routers is 0; give 1 or more"):
        cluster(workers("prefill"), workers("decode"), num_routers=0)
