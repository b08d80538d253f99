"""DistServe's two algorithms: their arithmetic on known goodputs, and what they leave out."""

from __future__ import annotations

import pytest

from placement.build.from_offers import offers_of
from placement.catalogs.base import Degrees, PlanError
from placement.goodput.runner import open_runner
from placement.goodput.targets import Targets
from placement.plan import Interval, Slo
from placement.search.placements import (
    Alone,
    Market,
    Spent,
    colocated_trials,
    find_colocated,
    find_pairs,
    find_phase,
    replicas_for,
    sized,
    splits,
    system_of,
    usable_degrees,
    with_candidate,
)
from placement.workload.traffic import Traffic
from tests.placement.toys import ToyCatalog, alike, toy_offer

SLO = Slo(ttft_s=0.3, tpot_s=0.02)


def market(catalog: ToyCatalog | None = None, slo: Slo = SLO, max_pp: int = 1) -> Market:
    catalog = catalog or ToyCatalog()
    return Market(
        catalog=catalog,
        offer_of=offers_of(catalog),
        traffic=Traffic(source=alike()),
        targets=Targets(slo=slo),
        max_pp=max_pp,
        thoroughness=0.2,
    )


def alone(tp: int, goodput: float) -> Alone:
    return Alone(offer=toy_offer(tp), goodput=Interval(goodput, goodput, goodput))


def test_replicas_are_the_rate_over_the_goodput_rounded_up() -> None:
    assert [replicas_for(rate, 2.5) for rate in (0.1, 2.5, 2.6, 5.0, 100)] == [1, 1, 2, 2, 40]


def test_algorithm_1_sizes_each_phase_by_itself() -> None:
    (best, *_) = sized(market(), [alone(1, 3.0), alone(2, 7.0)], [alone(1, 10.0)], rate=20)
    assert [(pool.degrees.tp, pool.replicas) for pool in best.candidate.pools] == [(2, 3), (1, 2)]
    assert best.candidate.label == "3 x prefill TP 2 + 2 x decode TP 1"
    assert best.candidate.gpus == 8


def test_a_number_of_gpus_is_split_where_both_pools_promise_most() -> None:
    (best, *_) = splits(market(), [alone(1, 3.0)], [alone(1, 9.0), alone(2, 12.0)], num_gpus=8)
    assert [(pool.degrees.tp, pool.replicas) for pool in best.candidate.pools] == [(1, 6), (1, 2)]
    assert best.promised == 18.0
    assert splits(market(), [alone(4, 3.0)], [alone(4, 9.0)], num_gpus=7) == []


def test_no_gpu_is_taken_that_promises_nothing() -> None:
    (best, *_) = splits(market(), [alone(1, 1.0)], [alone(1, 100.0)], num_gpus=4)
    assert [pool.replicas for pool in best.candidate.pools] == [3, 1]
    (idle, *_) = splits(market(), [alone(2, 1.0)], [alone(2, 100.0)], num_gpus=5)
    assert idle.candidate.gpus == 4


def test_phases_are_ranked_per_gpu_and_faster_workers_have_more_goodput() -> None:
    spent = Spent()
    with open_runner(0) as runner:
        offers = usable_degrees(market(), 8, spent)
        found = find_phase(market(), runner, "prefill", offers, spent)
    assert "the toy has 4 heads" in spent.refused["TP 8"]
    assert [one.per_gpu for one in found] == sorted((one.per_gpu for one in found), reverse=True)
    by_tp = {one.offer.degrees.tp: one.goodput.value for one in found}
    assert by_tp[1] < by_tp.get(2, 99) < by_tp.get(4, 999)
    assert spent.num_simulated > 0


def test_a_degree_that_is_too_slow_when_idle_is_refused_with_the_figure() -> None:
    strict = market(slo=Slo(ttft_s=0.07, tpot_s=0.02))
    spent = Spent()
    with open_runner(0) as runner:
        found = find_phase(strict, runner, "prefill", usable_degrees(strict, 4, spent), spent)
    assert {one.offer.degrees.tp for one in found} <= {2, 4}
    assert spent.refused["prefill TP 1"] == (
        "TTFT 70 ms: a prompt of 100 tokens (P90) takes 100 ms alone on bench at TP 1"
    )


def test_algorithm_2_pairs_workers_that_share_a_node() -> None:
    small = market(ToyCatalog(gpus_per_node=2))
    spent = Spent()
    with open_runner(0) as runner:
        pairs = find_pairs(small, runner, [alone(1, 5.0), alone(2, 9.0)], [alone(1, 20.0)], 8, spent)
    assert [pair.candidate.gpus for pair, _ in pairs] == [2]
    assert pairs[0][0].within_node
    assert 0 < pairs[0][0].promised < 10


def test_copies_of_a_pair_are_simulated_one_by_one() -> None:
    (trial, *_) = splits(market(), [alone(1, 3.0)], [alone(1, 3.0)], num_gpus=8)
    pairs = with_candidate(
        type(trial)(candidate=trial.candidate, promised=12, within_node=True, copies=2), trial.candidate
    )
    system = system_of(pairs, market().offer_of)
    assert pairs.copies == 4
    assert system.workers_by_pool == {"prefill": 1, "decode": 1}


def test_colocated_workers_are_candidates_in_both_ways() -> None:
    spent = Spent()
    with open_runner(0) as runner:
        found = find_colocated(market(), runner, [toy_offer(1)], spent)
    loose = market(slo=Slo(ttft_s=1.0, tpot_s=0.2))
    with open_runner(0) as runner:
        found = find_colocated(loose, runner, [toy_offer(1)], spent)
    assert {one.unit.sharing for one in found if one.unit} == {"prefill_first", "chunked"}
    (trial, *_) = colocated_trials(loose, found, lambda one: 3)
    assert trial.candidate.gpus == 3
    assert trial.promised == pytest.approx(3 * found[0].goodput.value)


def test_an_offer_that_cannot_be_had_says_why() -> None:
    with pytest.raises(PlanError, match="give a TP that divides them"):
        market().offer_of(Degrees(8, 1), True)
