"""Simulated requests of a lower number go first wherever they wait, by the live policies."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from cluster.router.options import RouterOptions
from decode_worker.options import DecodeOptions
from mixed_worker.options import MixedOptions
from placement.simulator.cluster import SimCluster, SimWorker
from placement.simulator.outcome import Outcome
from placement.simulator.simulate import Simulation
from placement.workload.requests import Floats, Workload
from tests.placement.simulator.test_simulate import Plain, cluster, play, requests, same, workers

pytestmark = pytest.mark.unit

SHORT_LINE = RouterOptions(max_backlog_tokens=200)  # all but one or two wait in the router


def at_once(prompt_len: int, output_len: int, count: int = 12) -> Workload:
    """All within a few ms; the last has the lowest number, the one before the highest."""
    priority = np.array([0] * (count - 2) + [7, -3])
    return Workload(
        arrival_s=np.arange(count, dtype=np.float64) * 1e-3,
        prompt_len=np.full(count, prompt_len),
        output_len=np.full(count, output_len),
        priority=priority,
    )


def order(times_s: Floats) -> list[int]:
    return sorted(range(len(times_s)), key=times_s.__getitem__)


def decoding(**given: object) -> list[SimWorker]:
    limits = DecodeOptions(**{"max_batch_size": 16, "watermark": 0.0, **given})  # type: ignore[arg-type]
    return workers("decode", policy=limits)


def mixed(**given: object) -> list[SimWorker]:
    options = {"max_batch_tokens": 200, "max_batch_size": 16, "chunk_tokens": 64, "watermark": 0.0, **given}
    return workers("mixed", policy=MixedOptions(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "setup",
    [
        cluster(workers("prefill"), workers("decode")),
        cluster(workers("prefill"), workers("decode"), router=SHORT_LINE),
        cluster(mixed()),
        cluster(mixed(), router=SHORT_LINE),
    ],
    ids=["at prefill", "in the router", "at a mixed worker", "in the router of one"],
)
def test_prompts_are_read_in_their_order(setup: SimCluster) -> None:
    _, outcome = play(setup, at_once(200, 2))
    read = order(outcome.first_token_s)
    assert 11 in read[:3], "one or two had begun"
    assert read[-1] == 10
    others = [index for index in read if index < 10]
    assert others == sorted(others)


def test_a_place_in_the_batch_goes_to_the_lowest() -> None:
    """Of those whose KV is there; the batch holds one, whose answer takes longer than all prompts together."""
    _, outcome = play(cluster(workers("prefill", 4), decoding(max_batch_size=1)), at_once(60, 60))
    assert order(outcome.finish_s)[1] == 11
    assert order(outcome.finish_s)[-1] == 10


def test_pages_go_to_the_lowest_first() -> None:
    """For one request at a time; the others wait for their leases."""
    small = [replace(decoding()[0], num_pages=14)]
    _, outcome = play(cluster(workers("prefill"), small, router=RouterOptions(overcommit=100.0)), at_once(150, 20))
    assert outcome.counters["stalled"] > 5
    finished = order(outcome.finish_s)
    assert finished.index(11) < 4
    assert finished[-1] == 10


def test_the_lowest_keeps_its_pages_longer() -> None:
    """Answers outgrow the pages; those of the lower number are computed once."""
    workload = replace(at_once(30, 150), priority=np.array([5] * 8 + [0] * 4))
    tries: Counter[int] = Counter()
    setup = cluster(workers("prefill"), [replace(decoding()[0], num_pages=60)])
    outcome = Simulation(setup, workload, lambda index, _: tries.update([index])).play()
    assert outcome.served == 12
    assert outcome.counters["preempted"] > 2
    assert {index for index, count in tries.items() if count > 1} <= set(range(8))
    assert outcome.finish_s[8:].max() < outcome.finish_s[:8].max()


def test_of_stalled_handoffs_the_lowest_takes_the_pages_of_another_worker_first() -> None:
    """decode-1 comes when several wait for the pages of decode-0, and has room for one."""

    def play_with(priority: list[int]) -> Outcome:
        workload = replace(at_once(150, 400, 3), priority=np.array(priority))
        small = [replace(w, num_pages=40 - 25 * i) for i, w in enumerate(workers("decode", 2))]
        setup = cluster(workers("prefill"), small, router=RouterOptions(overcommit=100.0, slo_tpot_ms=1000.0))
        return play(setup, workload)[1]

    first, last = play_with([0, 0, 9]), play_with([0, 9, 0])
    assert first.served == last.served == 3
    assert first.finish_s[1] < first.finish_s[2]
    assert last.finish_s[2] < last.finish_s[1]


@pytest.mark.parametrize("num_pages", [400, 60])
@pytest.mark.parametrize("roles", [("prefill", "decode"), ("mixed", "prefill", "decode")], ids="+".join)
def test_passing_over_steps_changes_nothing(num_pages: int, roles: tuple[str, ...]) -> None:
    workload = requests(rate=15)
    workload = replace(workload, priority=np.random.default_rng(3).integers(-2, 3, len(workload)))
    many, single = (
        play(
            cluster(*(workers(role, latency=latency, num_pages=num_pages) for role in roles), report_gap_s=1e-5),
            workload,
        )[1]
        for latency in (Plain(), Plain(single_steps=True))
    )
    assert many.served == len(many)
    assert many.finish_s == pytest.approx(single.finish_s, rel=1e-9)
    assert many.counters == single.counters


def test_where_all_have_the_same_it_makes_no_difference() -> None:
    setup = cluster(workers("prefill"), workers("mixed"), workers("decode", num_pages=60))
    workload = requests(rate=15)
    _, without = play(setup, workload)
    for number in (0, -5):
        assert same(without, play(setup, replace(workload, priority=np.full(len(workload), number)))[1])
