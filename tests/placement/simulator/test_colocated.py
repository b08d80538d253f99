"""Workers that do both phases: nothing is lost, steps may be passed over, and each way of sharing has its price."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from placement.simulator.colocated.cluster import ColocatedCluster, ColocatedSimulation, Sharing, simulate_colocated
from placement.simulator.outcome import percentiles
from placement.workload.requests import Workload
from tests.placement.simulator.test_simulate import Plain, requests

pytestmark = pytest.mark.unit

BOTH = get_args(Sharing)


def cluster(
    sharing: Sharing, *, num_pages: int = 400, num_workers: int = 1, latency: Plain | None = None
) -> ColocatedCluster:
    return ColocatedCluster(
        latency=latency or Plain(),
        num_workers=num_workers,
        num_pages=num_pages,
        sharing=sharing,
        max_batch_tokens=256,
        max_batch_size=16,
    )


@pytest.mark.parametrize("sharing", BOTH)
@pytest.mark.parametrize("num_pages", [400, 40])
def test_all_are_served_and_every_page_comes_back(sharing: Sharing, num_pages: int) -> None:
    run = ColocatedSimulation(cluster(sharing, num_pages=num_pages, num_workers=2), requests(rate=30))
    outcome = run.play()
    assert outcome.served == 200
    assert sum(outcome.phases.values()) == pytest.approx(outcome.e2e_s)
    assert (outcome.counters.get("preempted", 0) > 0) == (num_pages == 40)
    for machine in run.machines:
        assert machine.batch.free_pages == num_pages
        assert machine.batch.context_tokens == machine.load == 0


@pytest.mark.parametrize("sharing", BOTH)
@pytest.mark.parametrize("num_pages", [400, 40])
def test_passing_over_steps_changes_nothing(sharing: Sharing, num_pages: int) -> None:
    many, single = (
        simulate_colocated(cluster(sharing, num_pages=num_pages, latency=Plain(single_steps=one)), requests(rate=15))
        for one in (False, True)
    )
    assert many.finish_s == pytest.approx(single.finish_s, rel=1e-9)


def test_the_cost_is_of_requests_and_not_of_tokens() -> None:
    runs = [
        ColocatedSimulation(
            cluster("chunked", num_pages=4000), replace(requests(50, rate=rate), output_len=np.full(50, tokens))
        )
        for rate, tokens in ((1.0, 50), (0.01, 5000))
    ]
    for run in runs:
        run.play()
    assert runs[1].clock._next < 1.3 * runs[0].clock._next


def test_a_long_prompt_stalls_decode_less_when_it_is_chunked() -> None:
    """A request is about to end when a prompt of many steps' worth comes: whole, the prompt goes first."""
    workload = Workload(arrival_s=np.array([0.0, 0.5]), prompt_len=np.array([10, 2000]), output_len=np.array([52, 2]))
    whole, chunked = (simulate_colocated(cluster(sharing), workload) for sharing in BOTH)
    assert whole.finish_s[0] > chunked.finish_s[0] + 0.05
    assert whole.first_token_s[1] < chunked.first_token_s[1]


def test_a_request_that_no_worker_could_hold_is_rejected() -> None:
    workload = Workload(arrival_s=np.zeros(2), prompt_len=np.array([10, 7000]), output_len=np.array([5, 5]))
    outcome = simulate_colocated(cluster("chunked"), workload)
    assert outcome.served == 1
    assert outcome.counters["rejected"] == 1


def test_more_workers_wait_less() -> None:
    few, many = (simulate_colocated(cluster("chunked", num_workers=n), requests(rate=30)) for n in (1, 4))
    assert percentiles(many.ttft_s)[1] < percentiles(few.ttft_s)[1]
