"""Estimates of the long run: against a queue whose answer is known, and where there is none."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from cluster.router.options import RouterOptions
from mixed_worker.options import MixedOptions
from placement.build.from_offers import phase_alone
from placement.goodput.bounds import (
    decode_batch,
    decode_bound,
    floors_s,
    link_bound,
    prefill_alone_s,
    prefill_bound,
    relaxed,
)
from placement.goodput.estimate import Effort, Estimate, burst, estimate
from placement.goodput.stationary import (
    is_growing,
    mean_interval,
    mser,
    percentile_interval,
    share_interval,
    t_90,
    wilson,
)
from placement.goodput.targets import Targets
from placement.plan import RequestClass, Slo
from placement.simulator.cluster import SimCluster, SimWorker
from placement.simulator.outcome import Outcome
from placement.simulator.simulate import simulate
from placement.simulator.systems import LiveSystem
from placement.workload.closed_loop import ClosedLoop
from placement.workload.requests import Workload
from placement.workload.traffic import Traffic, with_classes
from tests.placement.simulator.test_simulate import cluster, workers
from tests.placement.toys import Toy, alike, toy_offer

SERVICE_S = 0.1
QUICK = Effort(first_requests=2000, max_requests=8000, half_width=0.02)


def one_prefill() -> LiveSystem:
    """One prompt after another, SERVICE_S each: with Poisson arrivals the queue M/D/1."""
    return LiveSystem(replace(phase_alone("prefill", toy_offer()), message_s=1e-7))


def waits_at_most(wait_s: float, rate: float) -> float:
    """Erlang's distribution of the wait in an M/D/1 queue."""
    total = 0.0
    for j in range(int(wait_s / SERVICE_S) + 1):
        left = rate * (j * SERVICE_S - wait_s)
        total += left**j / math.factorial(j) * math.exp(-left)
    return (1 - rate * SERVICE_S) * total


def of_prefill(rate: float, ttft_s: float = 0.25, effort: Effort = QUICK, error: float = 0.0) -> Estimate:
    targets = Targets(slo=Slo(ttft_s=ttft_s, attainment=0.9))
    traffic = Traffic(source=alike(output=1))
    return estimate(one_prefill(), traffic, rate, targets, effort=effort, error=error)


@pytest.mark.parametrize("rate", [3.0, 6.0, 8.0])
def test_attainment_of_a_queue_whose_formula_is_known(rate: float) -> None:
    found = of_prefill(rate).point
    expected = waits_at_most(0.25 - SERVICE_S, rate)
    assert found.attainment.low <= expected <= found.attainment.high
    assert found.attainment.value == pytest.approx(expected, abs=0.03)
    assert found.attainment.high - found.attainment.low < 0.2
    assert found.busy["prefill"] == pytest.approx(rate * SERVICE_S, rel=0.05)
    assert found.phases_s["prefill"] == pytest.approx(SERVICE_S)


def test_a_run_lasts_as_long_as_what_few_take() -> None:
    """One in a hundred takes a hundred times as long: a run that ends before it would count its peers alone."""
    source = alike(output=1)
    few = replace(source, output_len=np.where(np.arange(len(source)) % 100 == 7, 20_000, 1))
    system = LiveSystem(phase_alone("decode", toy_offer(decode_s=0.01, slope_s=0.0, num_pages=1_000_000)))
    targets = relaxed(Targets(slo=Slo(tpot_s=0.5, attainment=0.5)), ttft=True)
    effort = replace(QUICK, first_requests=200, max_requests=100_000, covers=0.999)
    found = estimate(system, Traffic(source=few), 100.0, targets, effort=effort)
    assert found.point.num_requests >= 100.0 * 20_000 * 0.01, "the longest take 200 s"


def test_a_cluster_that_fills_up_is_not_taken_for_a_queue_that_grows() -> None:
    """24 requests a second of ten seconds each: of the first 200 none has ended when the last one comes."""
    targets = relaxed(Targets(slo=Slo(tpot_s=0.5, attainment=0.9)), ttft=True)
    decode = LiveSystem(phase_alone("decode", toy_offer(decode_s=0.1, slope_s=0.0)))
    long = Traffic(source=alike(output=101))
    few = Effort(first_requests=200, max_requests=200, half_width=0.05, decides=True, e2e_times=4)
    found = estimate(decode, long, 24.0, targets, effort=few)
    assert not found.is_growing
    assert found.keeps_slo
    assert found.point.num_requests > 4 * 10 * 24, "it lasts four times as long as a request"


class LongerAndLonger:
    """Requests take a sixth of the run and a little more, however long it is: it is always short by a few."""

    def __init__(self) -> None:
        self.played: list[int] = []
        self.workers_by_pool = self.kv_tokens_by_pool = {"mixed": 1}

    def play(self, workload: Workload) -> Outcome:
        self.played.append(len(workload))
        at_s = workload.arrival_s
        return Outcome(workload=workload, first_token_s=at_s + 0.1, finish_s=at_s + workload.duration_s / 5.95)

    def scaled(self, factor: float) -> LongerAndLonger:
        return self


def test_a_run_is_made_again_only_where_it_shall_be_much_longer() -> None:
    system, targets = LongerAndLonger(), Targets(slo=Slo(ttft_s=1.0, attainment=0.9))
    found = estimate(system, Traffic(source=alike(output=1)), 10.0, targets, effort=QUICK)
    assert found.keeps_slo
    assert system.played[-1] >= QUICK.max_requests
    assert all(longer >= 1.25 * run for run, longer in pairwise(system.played))


def test_intervals_hold_the_truth_nine_times_in_ten() -> None:
    """Of 40 seeds of the queue at 80% load about 36; fewer than 30 has a chance below one in a thousand."""
    truth = waits_at_most(0.15, 8.0)
    targets, traffic = Targets(slo=Slo(ttft_s=0.25)), Traffic(source=alike(output=1))
    short = Effort(first_requests=1500, max_requests=1500)
    held = 0
    for seed in range(40):
        found = estimate(one_prefill(), traffic, 8.0, targets, effort=short, seed=seed).point.attainment
        held += found.low <= truth <= found.high
    assert held >= 30


def test_a_rate_beyond_capacity_grows_without_end_and_is_not_settled() -> None:
    found = of_prefill(12.0)
    assert found.is_growing
    assert not found.keeps_slo
    assert not found.point.is_settled
    assert found.point.attainment.low == 0.0


def test_where_hardly_any_is_in_time_nothing_is_simulated_for_longer() -> None:
    found = of_prefill(40.0)
    assert found.is_growing
    assert found.num_simulated == Effort().first_requests
    assert found.point.attainment.high <= 0.02
    assert not found.point.is_settled


def test_clients_who_all_ask_before_the_first_run_is_over_are_waited_for() -> None:
    """As many as the first run has requests, which come at once."""
    loop = ClosedLoop(max_concurrency=50)
    traffic = Traffic(source=alike(output=1), loop=loop)
    targets = Targets(slo=Slo(ttft_s=0.25, attainment=0.9))
    effort = Effort(first_requests=50, max_requests=1000, half_width=0.02)
    found = estimate(one_prefill(), traffic, math.inf, targets, effort=effort)
    assert found.point.ttft_s["50"].value == pytest.approx(50 * SERVICE_S, rel=0.01)
    assert found.point.rate == pytest.approx(1 / SERVICE_S, rel=0.02)


def test_deciding_costs_less_than_a_narrow_interval() -> None:
    narrow = of_prefill(3.0, effort=Effort(first_requests=500, max_requests=8000, half_width=0.005))
    decided = of_prefill(3.0, effort=Effort(first_requests=500, max_requests=8000, half_width=0.005, decides=True))
    assert decided.keeps_slo
    assert decided.slack.low > 0
    assert decided.num_simulated < narrow.num_simulated


def test_the_latency_models_error_widens_the_interval() -> None:
    sure, unsure = of_prefill(6.0), of_prefill(6.0, error=0.2)
    assert unsure.point.attainment.value == sure.point.attainment.value
    assert unsure.point.attainment.low < sure.point.attainment.low - 0.05
    assert unsure.point.attainment.high > sure.point.attainment.high + 0.02
    assert unsure.point.ttft_s["50"].high >= 1.2 * SERVICE_S


def test_a_model_that_is_wrong_by_more_than_all_still_has_an_interval() -> None:
    """A disturbed calibration says so. The router predicts by times that are shorter by its error."""
    router = RouterOptions(slo_ttft_ms=500, slo_tpot_ms=50)
    system, targets = LiveSystem(cluster(workers("mixed", 2), router=router)), Targets(slo=Slo(ttft_s=0.5))
    wrong = estimate(system, Traffic(source=alike()), 2.0, targets, effort=QUICK, error=1.5).point.attainment
    assert wrong.low < wrong.value <= wrong.high <= 1.0


def test_a_burst_flatters() -> None:
    """Beyond capacity a hundred requests still look well: the queue had no time to build."""
    targets, traffic = Targets(slo=Slo(ttft_s=1.0)), Traffic(source=alike(output=1))
    assert burst(one_prefill(), traffic, 11.0, targets, 100).attainment.value > 0.9
    assert burst(one_prefill(), traffic, 11.0, targets, 2000).attainment.value < 0.3


def test_a_burst_too_is_as_sure_as_the_times_are() -> None:
    targets, traffic = Targets(slo=Slo(ttft_s=1.0)), Traffic(source=alike(output=1))
    sure, unsure = (burst(one_prefill(), traffic, 1.0, targets, 300, error=error) for error in (0.0, 0.2))
    assert unsure.ttft_s["50"].value == sure.ttft_s["50"].value
    assert unsure.ttft_s["50"].high >= 1.19 * SERVICE_S
    assert unsure.ttft_s["50"].low <= 0.81 * SERVICE_S


def test_each_class_is_judged_by_its_own_targets() -> None:
    classes = (
        RequestClass(name="quick", share=0.5, slo=Slo(ttft_s=0.11, attainment=0.9)),
        RequestClass(name="patient", share=0.5, slo=Slo(ttft_s=60, attainment=0.99)),
    )
    source = with_classes(alike(output=1), classes, seed=0)
    found = estimate(one_prefill(), Traffic(source=source), 5.0, Targets(slo=Slo(), classes=classes), effort=QUICK)
    assert found.point.by_class["patient"] == 1.0
    assert found.point.by_class["quick"] == pytest.approx(waits_at_most(0.01, 5.0), abs=0.04)
    assert found.slack.value == pytest.approx(found.point.by_class["quick"] - 0.9)


def test_scaling_a_system_scales_its_times() -> None:
    mixed = SimWorker(name="mixed-0", role="mixed", latency=Toy(), num_pages=100, policy=MixedOptions())
    both = LiveSystem(SimCluster(workers=(mixed,)))
    for system, factor in ((both, 2.0), (one_prefill(), 2.0)):
        slow = system.scaled(factor)
        traffic, targets = Traffic(source=alike(50, output=1)), Targets(slo=Slo())
        times = [burst(one, traffic, 0.01, targets, 50).ttft_s["50"].value for one in (system, slow)]
        assert times[1] == pytest.approx(2 * times[0], rel=0.02)


# what an estimate is made of


def test_the_beginning_of_a_series_is_found() -> None:
    rng = np.random.default_rng(0)
    series = rng.normal(1.0, 0.1, 4000)
    assert mser(series) < 400
    series[:800] -= np.linspace(1, 0, 800)
    assert 500 <= mser(series) <= 1100
    series[1000] = np.nan
    assert 500 <= mser(series) <= 1100


def test_a_correlated_series_has_a_wider_interval() -> None:
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 1, 20_000)
    slow = np.zeros_like(noise)
    for i in range(1, len(noise)):
        slow[i] = 0.99 * slow[i - 1] + noise[i]
    slow /= slow.std()
    widths = [interval.high - interval.low for interval, _ in (mean_interval(noise), mean_interval(slow))]
    assert widths[1] > 5 * widths[0]
    assert mean_interval(slow)[0].low < 0 < mean_interval(slow)[0].high


def test_students_t_and_wilson() -> None:
    assert t_90(9) == pytest.approx(1.833, abs=0.005)
    assert t_90(23) == pytest.approx(1.714, abs=0.005)
    low, high = wilson(0.9, 1000)
    assert (low, high) == pytest.approx((0.883, 0.915), abs=0.001)
    assert share_interval(np.ones(500))[0].low < 1.0 == share_interval(np.ones(500))[0].high


def test_percentiles_have_intervals_and_unserved_requests_are_late() -> None:
    values = np.random.default_rng(0).exponential(1.0, 5000)
    found = percentile_interval(values, 90)
    assert found.low < math.log(10) < found.high
    assert found.high - found.low < 0.4
    values[::5] = np.nan
    assert percentile_interval(values, 90).value == math.inf
    assert percentile_interval(values, 50).value < 2


def test_growing_is_told_from_a_full_system() -> None:
    rng = np.random.default_rng(0)
    assert is_growing(np.linspace(0, 200, 64))
    assert not is_growing(100 + rng.normal(0, 10, 64))
    assert not is_growing(np.concatenate([np.linspace(0, 100, 20), np.full(44, 100.0)]))


def test_bounds_are_above_and_floors_below_what_is_simulated() -> None:
    offer = toy_offer()
    assert prefill_bound(offer, alike()) == pytest.approx(1.1 / SERVICE_S)
    assert prefill_alone_s(offer, 100) == pytest.approx(SERVICE_S)
    assert prefill_alone_s(offer, 250) == pytest.approx(2.5 * SERVICE_S)
    assert decode_bound(offer, alike(), tpot_s=0.05) > decode_bound(offer, alike(), tpot_s=0.02)
    assert relaxed(Targets(slo=Slo(ttft_s=1, tpot_s=2)), tpot=True).slo == Slo(ttft_s=1)


@pytest.mark.parametrize("roles", [("prefill", "decode"), ("mixed",)], ids="+".join)
def test_a_lone_prompt_takes_its_floor_in_stages(roles: tuple[str, ...]) -> None:
    """Of two chunks, of which the second follows the first through two stages."""
    offer = replace(toy_offer(1, 2), max_batch_tokens=256, step_overhead_s=0.02)
    prompt = replace(alike(count=1, output=1), prompt_len=np.array([512]))
    pools = (workers(role, latency=offer.latency, step_overhead_s=offer.step_overhead_s) for role in roles)
    ttft_s = simulate(cluster(*pools, message_s=0.0), prompt).ttft_s
    assert ttft_s == pytest.approx([2 * 0.02 + 3 * 0.256])
    assert ttft_s == pytest.approx([prefill_alone_s(offer, 512)])


def test_what_is_refused_for_its_length_lowers_no_bound() -> None:
    offer = replace(toy_offer(), max_len=1000)
    source = alike(output=21)
    few = replace(source, prompt_len=np.where(np.arange(len(source)) % 10 == 7, 900_000, source.prompt_len))
    for bound in (prefill_bound(offer, few), prefill_bound(offer, source) / 0.9):
        assert bound == pytest.approx(prefill_bound(offer, source) / 0.9)
    assert decode_bound(offer, few, 0.05) == pytest.approx(decode_bound(offer, source, 0.05) / 0.9)
    assert prefill_bound(toy_offer(), few) < 0.1 * prefill_bound(offer, few)


def sharing(count: int = 400) -> Workload:
    """Prompts of 8 blocks of 16 tokens, 6 of them common, and each with one that only the next one has again."""
    own = [(*range(6), 10 + row // 2, 1000 + row) for row in range(count)]
    return replace(alike(count), prompt_len=np.full(count, 128), blocks=own, block_len=16)


def test_what_an_earlier_prompt_brought_is_in_no_bound_and_no_floor() -> None:
    offer, source = replace(toy_offer(link_s=0.01), max_batch_tokens=64), sharing()
    whole = replace(source, blocks=())
    computed = np.where(np.arange(400) % 2, 16, 32)
    assert floors_s(offer, None, source)[0][1:] == pytest.approx(1e-3 * computed[1:])
    assert floors_s(offer, None, source)[0][0] == prefill_alone_s(offer, 128) == pytest.approx(0.128)
    assert prefill_bound(offer, source) == pytest.approx(1.1 * 400 / (computed.sum() + 96) * 1e3)
    assert prefill_bound(offer, source) > 5 * prefill_bound(offer, whole)
    assert link_bound(offer, source) == link_bound(offer, whole) == pytest.approx(100.0)  # whatever is sent

    tight = replace(offer, num_pages=64)
    assert decode_batch(tight, whole, 1.0) == 7
    assert decode_batch(tight, source, 1.0) == 35


def test_no_simulated_prompt_beats_its_floor_where_prefixes_are_shared() -> None:
    offer, source = replace(toy_offer(), max_batch_tokens=64), sharing()
    alone = replace(phase_alone("prefill", offer), message_s=0.0)
    outcome = simulate(alone, replace(source, output_len=np.ones(400, dtype=np.int64)))
    assert (outcome.ttft_s >= floors_s(offer, None, source)[0] - 1e-9).all()
    assert outcome.ttft_s == pytest.approx(floors_s(offer, None, source)[0])
    fast = simulate(alone, replace(source, arrival_s=np.zeros(400), output_len=np.ones(400, dtype=np.int64)))
    assert 400 / fast.ttft_s.max() <= prefill_bound(offer, source)


def test_of_prompts_that_share_prefixes_not_only_the_first_are_looked_at() -> None:
    """The first thousand bring all that the others have."""
    rows = np.arange(20_000)
    source = replace(alike(20_000), blocks=[(int(row),) * 6 for row in rows % 1000], block_len=16)
    late = floors_s(toy_offer(), None, source)[0] < prefill_alone_s(toy_offer(), 100)
    assert 0.9 < late.mean() < 1
