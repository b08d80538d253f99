"""A simulated mixed worker: the live policy's steps, of which those between two prompts pass at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cluster.router.options import RouterOptions
from mixed_worker.options import MixedOptions
from placement.simulator.cluster import Loss, SharedHost, SimCluster
from placement.simulator.costs import costs_of
from placement.simulator.simulate import Simulation, simulate
from placement.workload.requests import Workload
from tests.placement.simulator.test_simulate import Plain, cluster, play, requests, same, workers

pytestmark = pytest.mark.unit

PREDICTING = RouterOptions(slo_ttft_ms=250.0, slo_tpot_ms=20.0)


def policy(**changes: Any) -> MixedOptions:
    return MixedOptions(**({"max_batch_tokens": 256, "max_batch_size": 16, "chunk_tokens": 64} | changes))


def lone(prompt_len: int, output_len: int, *more: tuple[float, int, int]) -> Workload:
    rows = [(5.0, prompt_len, output_len), *more]
    arrival_s, prompts, outputs = zip(*rows, strict=True)
    return Workload(arrival_s=np.array(arrival_s), prompt_len=np.array(prompts), output_len=np.array(outputs))


def test_a_lone_request_is_written_where_it_is_read_and_nothing_is_handed_over() -> None:
    _, outcome = play(cluster(workers("mixed"), message_s=0.001), lone(100, 3))
    prefill_s = 0.01 + 0.01
    assert outcome.ttft_s[0] == pytest.approx(0.001 + prefill_s + 0.001)
    steps_s = sum(0.01 + 1e-4 + 1e-6 * context for context in (101, 102))
    assert outcome.e2e_s[0] == pytest.approx(0.001 + prefill_s + steps_s + 0.001)
    assert outcome.busy_s == {"mixed": pytest.approx(prefill_s + steps_s)}


def test_a_prompt_is_read_in_chunks_beside_those_that_write() -> None:
    """One writes when 200 tokens come, 64 at a time beside it: four steps of both, each a chunk longer than its own."""
    workload = lone(10, 100, (5.1, 200, 1))
    one, two = (play(cluster(workers("mixed")), w)[1] for w in (lone(10, 100), workload))
    each_s = 0.01 + 0.0001 * 200 / 4  # Plain: a step of both takes the sum
    assert two.finish_s[0] - one.finish_s[0] == pytest.approx(4 * each_s, rel=1e-6)
    assert two.ttft_s[1] == pytest.approx(4 * (each_s + 0.0102), rel=0.2)


def test_without_a_chunk_a_prompt_waits_until_nobody_writes() -> None:
    slow = cluster(workers("mixed", policy=policy(chunk_tokens=0)))
    _, outcome = play(slow, lone(10, 100, (5.1, 200, 1)))
    assert outcome.first_token_s[1] > outcome.finish_s[0]


@pytest.mark.parametrize(
    ("num_pages", "router"),
    [
        (400, RouterOptions()),
        (60, RouterOptions()),
        (400, PREDICTING),
    ],  # who waits is late at some time between reports
    ids=["all have pages", "few pages", "as predicted"],
)
@pytest.mark.parametrize("beside", [(), ("prefill",), ("decode",), ("prefill", "decode")], ids="+".join)
def test_passing_over_steps_changes_nothing(num_pages: int, beside: tuple[str, ...], router: RouterOptions) -> None:
    """Alone and beside others, with pages enough and with few; reports so dense that none is left out."""
    many, single = (
        play(
            cluster(
                *(workers(role, latency=latency, num_pages=num_pages) for role in ("mixed", *beside)),
                report_gap_s=1e-5,
                router=router,
            ),
            requests(rate=15),
        )[1]
        for latency in (Plain(), Plain(single_steps=True))
    )
    assert many.served == len(many)
    assert many.finish_s == pytest.approx(single.finish_s, rel=1e-9)
    assert many.counters == single.counters


def test_the_router_is_told_what_steps_take() -> None:
    """Plain: 10 ms, and 0.1 ms for each token or request, and 1 us of context."""
    (worker,) = workers("mixed")
    costs = costs_of(worker)
    assert costs.step_s(64, 16, 16_000, 1) == pytest.approx(worker.latency.mixed_s([(64, 0)], 16, 16_000), rel=0.02)
    assert costs.step_s(256, 0, 0, 0) == pytest.approx(worker.latency.prefill_s([(256, 0)]), rel=0.02)


def test_placed_by_prediction_more_requests_keep_their_targets() -> None:
    """Two read prompts as fast as they can, two in small chunks."""
    reading, writing = policy(chunk_tokens=256), policy(chunk_tokens=16)
    setup = cluster([replace(w, policy=writing if i > 1 else reading) for i, w in enumerate(workers("mixed", 4))])
    workload = requests(600, rate=22)
    by_load, predicted = (
        simulate(replace(setup, router=router), workload).attainment(0.25, 0.02)
        for router in (RouterOptions(), PREDICTING)
    )
    assert predicted > 1.1 * by_load


def test_over_slow_links_prompts_stay_where_they_are_read_and_as_many_keep_their_targets() -> None:
    """1 ms a token: the handoff of a prompt of 150 takes 150 ms."""
    kept = []
    for token_s in (1e-6, 1e-3):
        setup = cluster(workers("mixed", 4, Plain(wire_s_per_token=token_s)), router=PREDICTING)
        kept.append(simulate(setup, requests(600, rate=20)).attainment(0.25, 0.02))
    assert kept[1] > 0.97 * kept[0]


@pytest.mark.parametrize("router", [RouterOptions(), RouterOptions(slo_ttft_ms=9000.0)], ids=["none", "the router's"])
def test_requests_are_placed_by_their_own_targets(router: RouterOptions) -> None:
    """Every other one asks for more than the router was told."""
    workload = requests(40, rate=4)
    own_s = np.tile([0.25, 0.0], 20)
    reasons: dict[int, str] = {}
    setup = cluster(workers("mixed", 2), router=router)
    workload = replace(workload, slo_ttft_s=own_s, slo_tpot_s=own_s / 10)
    Simulation(setup, workload, lambda index, assigned: reasons.update({index: assigned.reason})).play()
    told = [reasons[index] for index in range(10, 40)]  # by then workers have reported what steps take
    assert ["of 250 ms, each after it in" in words for words in told] == [True, False] * 15
    assert ["of 9000 ms" in words for words in told] == [False, bool(router.slo_ttft_ms)] * 15


def test_counted_pages_decide_as_numbered_ones() -> None:
    plain = requests(rate=15)
    setup = cluster(workers("mixed", 2, num_pages=60))
    blocks = [(i,) for i in range(len(plain))]
    numbered = simulate(setup, replace(plain, blocks=blocks, block_len=10_000))
    counted = simulate(setup, plain)
    assert numbered.served == counted.served == len(plain)
    assert numbered.e2e_s.mean() == pytest.approx(counted.e2e_s.mean(), rel=0.3)


def test_what_prompts_share_is_read_once() -> None:
    plain = replace(requests(50, rate=4), prompt_len=np.full(50, 256))
    shared = replace(plain, blocks=[(1,)] * 50, block_len=240)
    setup = cluster(workers("mixed"))
    alone, again = simulate(setup, plain), simulate(setup, shared)
    assert again.counters["prefix_hit_tokens"] >= 49 * 240
    assert again.ttft_s.mean() < 0.7 * alone.ttft_s.mean()


def test_a_lost_worker_loses_no_request() -> None:
    setup = cluster(
        workers("mixed", 2), workers("prefill"), losses=(Loss(worker="mixed-0", at_s=3, back_s=6),), noticed_s=0.2
    )
    _, outcome = play(setup, requests(rate=15))
    assert outcome.served == len(outcome)
    assert outcome.counters["retries"] > 0
    assert same(outcome, simulate(setup, requests(rate=15)))


def on_one_host(*groups: Any) -> SimCluster:
    names = tuple(worker.name for group in groups for worker in group)
    return cluster(*groups, hosts=(SharedHost(workers=names, by_batch=((1, 1.5, 2.0), (8, 3.0, 2.0))),), message_s=0.0)


def test_alone_on_a_host_it_is_as_fast_as_ever() -> None:
    workload = requests(rate=10)
    _, alone = play(cluster(workers("mixed"), message_s=0.0), workload)
    assert same(alone, play(on_one_host(workers("mixed")), workload)[1])


def test_two_on_a_host_read_prompts_beside_each_other_as_beside_the_least_batch() -> None:
    """Two prompts of 100 tokens come at once, one for each."""
    _, outcome = play(on_one_host(workers("mixed", 2)), lone(100, 1, (5.0, 100, 1)))
    assert outcome.ttft_s == pytest.approx([1.5 * 0.02] * 2)


def test_two_on_a_host_slow_each_other_while_both_decode_and_no_longer() -> None:
    """Both write at once, one of them 11 tokens: until then the other's steps take twice as long."""
    long, short = lone(10, 51), lone(10, 51, (5.0, 10, 11))
    _, alone = play(on_one_host(workers("mixed", 2)), long)
    _, outcome = play(on_one_host(workers("mixed", 2)), short)
    beside_s = outcome.finish_s[1] - outcome.first_token_s[1]
    reading_s = 0.5 * 0.011
    assert outcome.finish_s[0] - alone.finish_s[0] == pytest.approx(reading_s + beside_s / 2, rel=1e-6)


def test_a_prompt_beside_one_that_decodes_takes_what_was_measured_of_its_phase() -> None:
    """The mixed worker writes for one when a prefill worker reads 100 tokens: 1.5 times 0.02 s."""
    setup = on_one_host(workers("prefill"), workers("mixed"))
    _, outcome = play(setup, lone(10, 100, (5.5, 100, 1)))
    assert outcome.ttft_s[1] == pytest.approx(1.5 * 0.02)
