"""Clusters of several models on the same devices: each computes as alone while the others are idle, by turns else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mixed_worker.options import MixedOptions
from placement.simulator.cluster import SimCluster, SimWorker
from placement.simulator.outcome import Outcome
from placement.simulator.simulate import simulate, simulate_together
from placement.workload.requests import Workload
from tests.placement.toys import OUTPUT, PROMPT, Toy

pytestmark = pytest.mark.unit

PREFILL_S, DECODE_S = 0.1, 0.01
ALONE_S = PREFILL_S + (OUTPUT - 1) * DECODE_S


def cluster(name: str, devices: int = 1, latency: Toy | None = None) -> SimCluster:
    policy = MixedOptions(max_batch_tokens=PROMPT, chunk_tokens=PROMPT)
    workers = [
        SimWorker(
            name=f"{name}-{i}",
            role="mixed",
            latency=latency or Toy(),
            num_pages=1000,
            policy=policy,
            device=f"gpu-{i}",
        )
        for i in range(devices)
    ]
    return SimCluster(workers=tuple(workers), message_s=0.0)


def at(*times: float) -> Workload:
    count = len(times)
    return Workload(
        arrival_s=np.array(times),
        prompt_len=np.full(count, PROMPT),
        output_len=np.full(count, OUTPUT),
    )


def together(*tenants: tuple[SimCluster, Workload]) -> list[Outcome]:
    return simulate_together(list(tenants))


def test_who_computes_while_the_other_is_idle_does_so_as_alone() -> None:
    first, second = together((cluster("a"), at(0.0, 5.0)), (cluster("b"), at(2.0)))
    alone = simulate(cluster("a"), at(0.0, 5.0))
    assert first.finish_s == pytest.approx(alone.finish_s)
    assert second.e2e_s == pytest.approx([ALONE_S], abs=1e-3)


def test_two_that_compute_at_once_take_twice_as_long() -> None:
    for outcome in together((cluster("a"), at(0.0)), (cluster("b"), at(0.0))):
        assert outcome.ttft_s == pytest.approx([2 * PREFILL_S], abs=1e-3)
        assert outcome.e2e_s == pytest.approx([2 * ALONE_S], abs=2e-3)


def test_a_step_goes_on_at_its_own_pace_when_the_other_has_ended() -> None:
    """The second comes when half of the first's prompt is read."""
    first, second = together((cluster("a"), at(0.0)), (cluster("b"), at(PREFILL_S / 2)))
    assert first.ttft_s == pytest.approx([1.5 * PREFILL_S], abs=2e-3)
    left_s = ALONE_S - PREFILL_S / 2  # of the first, when the second comes, and of that when the first has ended
    assert first.e2e_s == pytest.approx([PREFILL_S / 2 + 2 * left_s], abs=2e-3)
    assert second.e2e_s == pytest.approx([2 * left_s + PREFILL_S / 2], abs=2e-3)


def test_each_device_has_turns_of_its_own() -> None:
    """On two, each model's two requests at once are each by a worker of its own, which is one of two there."""
    outcomes = together((cluster("a", 2), at(0.0, 0.0)), (cluster("b", 2), at(0.0, 0.0)))
    for outcome in outcomes:
        assert outcome.e2e_s == pytest.approx([2 * ALONE_S] * 2, abs=5e-3)


def test_three_models_wait_for_each_other_and_no_work_is_lost() -> None:
    outcomes = together(*((cluster(name), at(*np.arange(0.0, 4.0, 0.9))) for name in "abc"))
    for outcome in outcomes:
        assert outcome.served == len(outcome)
        busy_s = sum(outcome.busy_s.values())
        assert busy_s >= len(outcome) * ALONE_S * 0.99
    last_s = max(float(outcome.finish_s.max()) for outcome in outcomes)
    assert last_s >= 3 * 5 * ALONE_S, "a device does no more than its own work"


def test_a_slower_model_slows_the_other_only_while_it_computes() -> None:
    slow = Toy(prompt_s=1.0)
    first, second = together((cluster("a"), at(0.0)), (cluster("b", latency=slow), at(0.0)))
    assert first.e2e_s == pytest.approx([2 * ALONE_S], abs=2e-3)
    assert second.ttft_s == pytest.approx([1.0 + ALONE_S], abs=2e-3)


def test_without_devices_in_common_it_is_as_apart() -> None:
    own = replace(cluster("b"), workers=tuple(replace(w, device="other") for w in cluster("b").workers))
    both = together((cluster("a"), at(0.0, 0.05)), (own, at(0.0, 0.05)))
    for name, outcome in zip("ab", both, strict=True):
        assert outcome.finish_s == pytest.approx(simulate(cluster(name), at(0.0, 0.05)).finish_s)
