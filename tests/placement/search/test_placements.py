"""DistServe's two algorithms: their arithmetic on known goodputs, and what they leave out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from placement.build.from_offers import first_tokens_of, mixed_of, offers_of, pair_of, phase_alone, pool_of
from placement.catalogs.base import Degrees, PlanError
from placement.goodput.runner import open_runner
from placement.goodput.targets import Targets
from placement.plan import Candidate, Interval, PoolRole, RequestClass, Slo
from placement.search.placements import (
    Placement,
    cell_of,
    colocated_placements,
    find_pairs,
    goodput_problem,
    placements_for_gpus,
    placements_for_rate,
    replicas_for,
    system_of,
    with_candidate,
)
from placement.search.problem import PlacementProblem, SearchLog, WorkerGoodput
from placement.search.screening import SCREENING, chunk_sizes, screen_colocated, screen_phase, usable_offers
from placement.search.sizing import size_for_rate, sizing_job
from placement.simulator.simulate import simulate
from placement.simulator.systems import LiveSystem
from placement.workload.traffic import Traffic
from tests.placement.toys import ToyCatalog, alike, toy_offer

SLO = Slo(ttft_s=0.3, tpot_s=0.02)


def problem(catalog: ToyCatalog | None = None, slo: Slo = SLO, max_pp: int = 1) -> PlacementProblem:
    catalog = catalog or ToyCatalog()
    return PlacementProblem(
        catalog=catalog,
        offer_of=offers_of(catalog),
        traffic=Traffic(source=alike()),
        targets=Targets(slo=slo),
        max_pp=max_pp,
        thoroughness=0.2,
    )


def test_a_router_is_told_the_loosest_targets_of_the_classes() -> None:
    """Which requests ask for more is in the workload."""
    classes = tuple(RequestClass(name=f"{s}", share=1, slo=Slo(ttft_s=s, tpot_s=s / 10)) for s in (0.3, 2.0))
    own = replace(problem(), targets=Targets(slo=Slo(), classes=classes))
    candidate = mixed_of(toy_offer(1), 2, "toy", 128)
    placement = Placement(candidate=candidate, promised=1.0, gpus_per_node=8)
    system = goodput_problem(own, placement, effort=SCREENING).system
    assert isinstance(system, LiveSystem)
    router = system.cluster.router
    assert (router.slo_ttft_ms, router.slo_tpot_ms) == (2000.0, 200.0)


def worker(tp: int, goodput: float) -> WorkerGoodput:
    return WorkerGoodput(offer=toy_offer(tp), goodput=Interval(goodput, goodput, goodput))


def test_replicas_are_the_rate_over_the_goodput_rounded_up() -> None:
    assert [replicas_for(rate, 2.5) for rate in (0.1, 2.5, 2.6, 5.0, 100)] == [1, 1, 2, 2, 40]


def test_algorithm_1_sizes_each_phase_by_itself() -> None:
    (best, *_) = placements_for_rate(problem(), [worker(1, 3.0), worker(2, 7.0)], [worker(1, 10.0)], rate=20)
    assert [(pool.degrees.tp, pool.replicas) for pool in best.candidate.pools] == [(2, 3), (1, 2)]
    assert best.candidate.label == "3 x prefill TP 2 + 2 x decode TP 1"
    assert best.candidate.gpus == 8


def test_a_number_of_gpus_is_split_where_both_pools_promise_most() -> None:
    (best, *_) = placements_for_gpus(problem(), [worker(1, 3.0)], [worker(1, 9.0), worker(2, 12.0)], num_gpus=8)
    assert [(pool.degrees.tp, pool.replicas) for pool in best.candidate.pools] == [(1, 6), (1, 2)]
    assert best.promised == 18.0
    assert placements_for_gpus(problem(), [worker(4, 3.0)], [worker(4, 9.0)], num_gpus=7) == []


def test_no_gpu_is_taken_that_promises_nothing() -> None:
    (best, *_) = placements_for_gpus(problem(), [worker(1, 1.0)], [worker(1, 100.0)], num_gpus=4)
    assert [pool.replicas for pool in best.candidate.pools] == [3, 1]
    (idle, *_) = placements_for_gpus(problem(), [worker(2, 1.0)], [worker(2, 100.0)], num_gpus=5)
    assert idle.candidate.gpus == 4


def test_phases_are_ranked_per_gpu_and_faster_workers_have_more_goodput() -> None:
    log = SearchLog()
    with open_runner(0) as runner:
        offers = usable_offers(problem(), 8, log)
        found = screen_phase(problem(), runner, "prefill", offers, log)
    assert "the toy has 4 heads" in log.refused["TP 8"]
    assert [one.per_gpu for one in found] == sorted((one.per_gpu for one in found), reverse=True)
    by_tp = {one.offer.degrees.tp: one.goodput.value for one in found}
    assert by_tp[1] < by_tp.get(2, 99) < by_tp.get(4, 999)
    assert log.num_simulated > 0


def test_a_degree_that_is_too_slow_when_idle_is_refused_with_the_figure() -> None:
    strict = problem(slo=Slo(ttft_s=0.07, tpot_s=0.02))
    log = SearchLog()
    with open_runner(0) as runner:
        found = screen_phase(strict, runner, "prefill", usable_offers(strict, 4, log), log)
    assert {one.offer.degrees.tp for one in found} <= {2, 4}
    assert log.refused["prefill TP 1"] == (
        "TTFT 70 ms: a prompt of 100 tokens (P90) takes 100 ms alone on bench at TP 1"
    )


def test_algorithm_2_pairs_workers_that_share_a_node() -> None:
    small = problem(ToyCatalog(gpus_per_node=2))
    log = SearchLog()
    with open_runner(0) as runner:
        pairs = find_pairs(small, runner, [worker(1, 5.0), worker(2, 9.0)], [worker(1, 20.0)], 8, log)
    assert [pair.candidate.gpus for pair, _ in pairs] == [2]
    assert pairs[0][0].within_node
    assert 0 < pairs[0][0].promised < 10


def test_whatever_a_placement_becomes_its_kv_takes_the_links_that_there_are() -> None:
    one = mixed_of(toy_offer(1), 2, "toy", 128)
    placement = Placement(candidate=one, promised=1.0, gpus_per_node=2)
    more = with_candidate(placement, mixed_of(toy_offer(1), 3, "toy", 128))
    assert (placement.within_node, more.within_node) == (True, False)
    pair = pair_of((toy_offer(2), 1), (toy_offer(1), 1), "toy")
    paired = Placement(candidate=pair, promised=1.0, gpus_per_node=2, is_paired=True)
    assert paired.within_node, "its stages stand side by side"
    assert with_candidate(paired, pair).within_node
    grown = pair_of((toy_offer(2), 2), (toy_offer(1), 1), "toy")
    assert not with_candidate(paired, grown).within_node
    both = pair_of((toy_offer(2), 3), (toy_offer(1), 3), "toy")
    assert with_candidate(replace(paired, copies=2), both).copies == 3
    assert with_candidate(replace(paired, copies=2), both).within_node


def test_what_is_sized_for_a_rate_hands_over_by_the_slow_link_once_it_outgrows_a_node() -> None:
    catalog = ToyCatalog(gpus_per_node=2, far_s=5.0)
    small = problem(catalog, slo=Slo(ttft_s=1.0, tpot_s=0.2))
    (placement, *_) = placements_for_rate(small, [worker(1, 9.0)], [worker(1, 9.0)], rate=8)
    assert placement.within_node
    few, many = (size_for_rate(sizing_job(small, placement, rate, SCREENING)) for rate in (4.0, 25.0))
    assert few.at_rate.keeps_slo
    assert not many.at_rate.keeps_slo, "three workers are on two nodes, where a prompt's KV takes 5 s"


def test_prompts_that_share_prefixes_are_screened_too() -> None:
    """The phase that is left out has room for all as a number, and not as a list of pages."""
    shared = replace(alike(), blocks=[(index % 3, 100 + index) for index in range(len(alike()))], block_len=64)
    cluster = phase_alone("prefill", toy_offer())
    (beside,) = (each for each in cluster.workers if each.role == "decode")
    assert not beside.prefix_cache
    assert simulate(cluster, first_tokens_of(shared)).served == len(shared)


def test_copies_of_a_pair_are_simulated_one_by_one() -> None:
    (placement, *_) = placements_for_gpus(problem(), [worker(1, 3.0)], [worker(1, 3.0)], num_gpus=8)
    pairs = with_candidate(replace(placement, copies=2), placement.candidate)
    system, copies = system_of(pairs, problem().offer_of, SLO, 1)
    assert pairs.copies == copies == 4
    assert system.workers_by_pool == {"prefill": 1, "decode": 1}


def test_workers_that_do_both_are_candidates_with_small_chunks_and_with_whole_steps() -> None:
    log = SearchLog()
    with open_runner(0) as runner:
        found = screen_colocated(problem(), runner, [toy_offer(1)], log)
    loose = problem(slo=Slo(ttft_s=1.0, tpot_s=0.2))
    with open_runner(0) as runner:
        found = screen_colocated(loose, runner, [toy_offer(1)], log)
    chunks = {one.unit.pools[0].chunk_tokens for one in found if one.unit}
    assert max(chunks) == toy_offer(1).max_batch_tokens
    (placement, *_) = colocated_placements(problem(), found, lambda one: 3)
    assert placement.candidate.gpus == 3
    assert placement.promised == pytest.approx(3 * found[0].goodput.value)


def test_in_stages_chunks_are_as_large_as_a_share_of_the_batch_leaves_room_for() -> None:
    """1 ms a request and 1 ms for 100 tokens of prompts, in each of two stages: with 55 requests in each, most keep the
    target of 100 ms. Beside half of them, 28, there is time for 2,200 tokens."""
    offer = toy_offer(1, 2, decode_s=0.0, slope_s=0.001, prompt_s=0.001)
    slo = Slo(ttft_s=1.0, tpot_s=0.1)
    assert chunk_sizes(problem(slo=slo), replace(offer, max_batch_tokens=4096)) == [2048, 4096]


def test_an_offer_that_cannot_be_had_says_why() -> None:
    with pytest.raises(PlanError, match="give a TP that divides them"):
        problem().offer_of(Degrees(8, 1), True)


@pytest.mark.parametrize("replicas", [(64,), (33, 19), (33, 21), (200, 7), (16, 15), (40, 40), (31, 1)])
def test_a_cell_stands_for_a_large_cluster_without_having_less_to_do(replicas: tuple[int, ...]) -> None:
    roles: tuple[PoolRole, ...] = ("prefill", "decode")
    pools = [pool_of(role, toy_offer(1), 1, "toy") for role in roles]
    whole = Candidate(pools=tuple(replace(p, replicas=n) for p, n in zip(pools, replicas, strict=False)))
    cell, copies = cell_of(whole, 16)
    workers = [pool.replicas for pool in cell.pools]
    loads = [n / copies / each for n, each in zip(replicas, workers, strict=True)]
    assert min(loads) >= 1 - 1e-9
    assert max(loads) < 1.05
    assert 16 <= sum(workers) <= 32 or cell == whole


def test_a_small_cluster_and_one_with_few_of_a_pool_stand_for_themselves() -> None:
    roles: tuple[PoolRole, ...] = ("prefill", "decode")
    for replicas in ((16, 15), (31, 1), (100, 2)):
        pools = [pool_of(role, toy_offer(1), n, "toy") for role, n in zip(roles, replicas, strict=True)]
        candidate = Candidate(pools=tuple(pools))
        assert cell_of(candidate, 16) == (candidate, 1.0)
