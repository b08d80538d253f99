"""Plans: what is chosen and said for a toy whose answer is plain, and why nothing is where nothing can be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from placement.build.from_offers import mixed_of, pair_of
from placement.catalogs.base import Degrees, Offer, PlanError
from placement.goodput.estimate import Estimate
from placement.goodput.targets import Targets
from placement.plan import Candidate, Goodput, Interval, Plan, RequestClass, Slo, to_json
from placement.search.answer import PlanAnswer
from placement.search.clusters import JOINT
from placement.search.hybrids import hybrids_of, shifted, shifts_of
from placement.search.placements import Placement
from placement.search.planner import plan
from placement.search.problem import simplest_first
from placement.search.question import PlanQuestion
from placement.search.sizing import SizedPlacement, SizingJob, size_for_rate
from placement.workload.requests import Workload
from placement.workload.traffic import Traffic
from tests.kvrelay.plan.plan_fixture import pool
from tests.placement.toys import PROMPT, ToyCatalog, alike, toy_offer

SLO = Slo(ttft_s=0.4, tpot_s=0.012)
DISTURBED = Slo(ttft_s=0.4, tpot_s=0.0125)  # any step with a prompt in it takes ten decode steps


def planned(
    slo: Slo = DISTURBED, catalog: ToyCatalog | None = None, workload: Workload | None = None, **ask: Any
) -> Plan:
    ask = {"num_gpus": 4, "processes": 1, "thoroughness": 0.05} | ask
    return plan(PlanQuestion(slo=slo, **ask), catalog or one_gpu(), workload or alike())


def one_gpu(error: float = 0.0) -> ToyCatalog:
    """Workers of one GPU; a decode worker keeps up with many prefill workers."""
    return ToyCatalog(largest=1, error=error, latency={"slope_s": 0.0001})


@pytest.fixture(scope="module")
def four_gpus() -> Plan:
    return planned(thoroughness=0.1)  # fewer requests leave it to chance which pool binds


def test_a_colocated_worker_whose_steps_are_disturbed_loses(four_gpus: Plan) -> None:
    assert four_gpus.is_disaggregated
    assert four_gpus.chosen.candidate.gpus <= 4
    assert any("colocated" in sentence for sentence in four_gpus.advice)


def test_the_pool_that_binds_is_the_one_whose_worker_more_helps(four_gpus: Plan) -> None:
    """Three prefill workers and one for decode, which could serve a dozen of them."""
    assert [pool.replicas for pool in four_gpus.chosen.candidate.pools] == [3, 1]
    assert four_gpus.binding == "prefill"
    assert any("prefill pool binds" in sentence for sentence in four_gpus.advice)
    assert four_gpus.at_rate.busy["prefill"] > 0.6
    assert set(four_gpus.phase_goodput) == {"prefill", "decode"}


@pytest.mark.parametrize(("num_gpus", "slope_s"), [(4, 0.0001), (6, 0.0004)])
def test_the_pool_that_binds_is_found_where_pairs_were_tried_too(num_gpus: int, slope_s: float) -> None:
    """On several nodes. What is chosen has one worker more of each phase in turn, and pairs are not copied for it."""
    catalog = ToyCatalog(largest=1, gpus_per_node=2, latency={"slope_s": slope_s})
    found = planned(num_gpus=num_gpus, catalog=catalog, colocated=False)
    assert found.binding == "prefill"


def test_what_the_longest_runs_lower_below_another_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, lowered = PlanAnswer._kept, list[Candidate]()

    def once_lower(answer: PlanAnswer, tried: list[Goodput], at_rate: Estimate) -> tuple[list[Goodput], Estimate]:
        [best, *others], at_rate = kept(answer, tried, at_rate)
        if not lowered:
            lowered.append(best.candidate)
            best = replace(best, goodput=Interval(0.5 * best.goodput.value, 0.0, best.goodput.high))
        return [best, *others], at_rate

    monkeypatch.setattr(PlanAnswer, "_kept", once_lower)
    found = planned()
    assert found.chosen.candidate != lowered[0]
    assert not found.chosen.is_rough
    assert found.chosen.goodput.value == max(each.goodput.value for each in found.tried if not each.is_rough)
    assert found.at_rate.rate == found.chosen.goodput.value
    assert not any(" pays: 0." in sentence for sentence in found.advice)


def test_what_misses_the_rate_in_the_longest_run_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at, missed = PlanAnswer._looked_at, list[Candidate]()

    def once_late(answer: PlanAnswer, tried: list[Goodput], rate: float) -> tuple[list[Goodput], Estimate, Estimate]:
        tried, at_rate, knee = looked_at(answer, tried, rate)
        if not missed:
            missed.append(tried[0].candidate)
            at_rate = replace(at_rate, slack=Interval(-0.8, -0.9, -0.7))
        return tried, at_rate, knee

    monkeypatch.setattr(PlanAnswer, "_looked_at", once_late)
    found = planned(num_gpus=None, rate=12.0)
    assert found.chosen.candidate != missed[0]
    (late,) = (each for each in found.tried if each.candidate == missed[0])
    assert late.goodput.value < 12.0
    assert found.chosen.goodput.value >= 12.0


def test_a_rate_that_all_miss_in_the_longest_run_is_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = PlanAnswer._looked_at

    def late(answer: PlanAnswer, tried: list[Goodput], rate: float) -> tuple[list[Goodput], Estimate, Estimate]:
        tried, at_rate, knee = looked_at(answer, tried, rate)
        point = replace(at_rate.point, attainment=Interval(0.1, 0.0, 0.3))
        return tried, replace(at_rate, point=point, slack=Interval(-0.8, -0.9, -0.7)), knee

    monkeypatch.setattr(PlanAnswer, "_looked_at", late)
    with pytest.raises(PlanError, match=r"rate is 12 requests/s, and no placement .* 10\.0% of requests meet them on "):
        planned(num_gpus=None, rate=12.0)


def test_a_first_answer_is_told_and_what_is_chosen_has_been_simulated_longer() -> None:
    told: list[Goodput] = []
    question = PlanQuestion(slo=DISTURBED, num_gpus=4, processes=0, thoroughness=0.1)
    found = plan(question, one_gpu(), alike(), on_first=told.append)
    (first,) = told
    assert first.candidate.kind in ("two pools", "one pool")
    assert first.goodput.value == pytest.approx(found.chosen.goodput.value, rel=0.15)
    assert not found.chosen.is_rough
    assert {each.candidate.kind for each in found.tried if not each.is_rough} == {"two pools", "one pool", "hybrid"}
    assert all(each.goodput.value * 0.95 <= found.chosen.goodput.value for each in found.tried if each.is_rough)


def test_the_best_is_first_and_every_curve_falls(four_gpus: Plan) -> None:
    assert four_gpus.tried[0] == four_gpus.chosen
    assert [one.goodput.value for one in four_gpus.tried] == sorted(
        (one.goodput.value for one in four_gpus.tried), reverse=True
    )
    for one in four_gpus.tried:
        assert [point.rate for point in one.curve] == sorted(point.rate for point in one.curve)
        assert one.goodput.low <= one.goodput.value <= one.goodput.high
    assert four_gpus.chosen.curve[0].attainment.value > four_gpus.chosen.curve[-1].attainment.value


def test_a_plan_is_plain_data_and_the_same_twice(four_gpus: Plan) -> None:
    again = planned(thoroughness=0.1)
    plain, other = to_json(four_gpus), to_json(again)
    plain["cpu_s"] = other["cpu_s"] = 0
    assert plain == other
    assert plain["chosen"]["candidate"]["pools"][0]["role"] == "prefill"
    assert plain["asked"]["num_gpus"] == 4


def test_where_steps_may_be_long_two_pools_are_worst_and_a_hybrid_is_tried() -> None:
    """Of the two workers one only reads prompts; the other reads too, where they would be late."""
    found = planned(slo=Slo(ttft_s=0.6, tpot_s=1.0), num_gpus=2)
    assert [each.candidate.kind for each in found.tried] == ["hybrid", "one pool", "two pools"]
    assert found.advice[0].startswith("A hybrid makes no difference that is sure: 1.0")
    assert found.binding == "none"
    alone = planned(slo=Slo(ttft_s=0.6, tpot_s=1.0), num_gpus=1)
    assert [each.candidate.kind for each in alone.tried] == ["one pool"]
    assert alone.advice[0] == "Do not disaggregate: two pools take 2 GPUs or more, and there is 1."


def test_hybrids_keep_the_workers_and_their_gpus() -> None:
    degrees = Degrees(1, 1)
    offer = ToyCatalog(largest=1).offer(degrees, within_node=True)
    assert isinstance(offer, Offer)
    offer = replace(offer, max_batch_tokens=2048)
    two = pair_of((offer, 3), (offer, 2), "toy")
    one = mixed_of(offer, 5, "toy", 512)
    labels = [candidate.label for candidate in hybrids_of(two)]
    assert len(labels) == len(set(labels)) == 4
    assert labels[:2] == [
        "3 x mixed TP 1 + 2 x mixed TP 1, chunks of 2,048 and 128",
        "3 x mixed TP 1 + 2 x mixed TP 1, chunks of 2,048 and 256",
    ]
    assert [each.label for each in hybrids_of(one)] == ["1 x prefill TP 1 + 4 x mixed TP 1, chunks of 512"]
    assert {each.gpus for each in hybrids_of(two) + hybrids_of(one)} == {5}
    assert {each.kind for each in hybrids_of(two) + hybrids_of(one)} == {"hybrid"}
    assert hybrids_of(mixed_of(offer, 1, "toy", 512)) == []


def test_a_worker_moves_to_either_pool_and_all_gpus_are_used() -> None:
    small, large = toy_offer(1), toy_offer(4)
    pair = pair_of((small, 9), (large, 2), "toy")
    assert [[pool.replicas for pool in each.pools] for each in shifts_of(pair, 17)] == [[13, 1], [5, 3]]
    assert [[pool.replicas for pool in each.pools] for each in shifts_of(pair, 19)] == [[11, 2], [7, 3]]
    assert [
        [pool.replicas for pool in each.pools] for each in shifts_of(pair_of((small, 1), (small, 1), "toy"), 2)
    ] == []
    assert shifts_of(mixed_of(small, 2, "toy", 512), 2) == []


def test_the_pool_that_binds_is_given_all_gpus_that_a_large_worker_of_the_other_leaves() -> None:
    """One worker of TP 4 less makes room for four of TP 1, not for one."""
    large = toy_offer(4)
    pair = pair_of((toy_offer(1), 9), (large, 2), "toy")
    more = shifted(pair, 0, 17)
    assert more is not None
    assert [pool.replicas for pool in more.pools] == [13, 1]
    assert shifted(pair_of((large, 1), (large, 1), "toy"), 0, 8) is None, "none would be left to decode"


def test_replicas_for_a_rate_keep_the_slo_there_and_no_worker_is_too_many() -> None:
    found = planned(num_gpus=None, rate=15.0, colocated=False)
    assert found.at_rate.rate == 15.0
    assert found.at_rate.attainment.value >= 0.9
    assert found.chosen.goodput.value >= 15.0 * 0.98
    prefill, decode = found.chosen.candidate.pools
    assert 2 <= prefill.replicas <= 3
    assert decode.replicas == 1
    assert 0 <= found.headroom < 0.6


def test_for_a_rate_a_hybrid_is_tried_with_as_many_workers_or_fewer() -> None:
    """Of two workers: one of each kind and two that do both serve alike here, so that either may be chosen."""
    found = planned(slo=Slo(ttft_s=0.6, tpot_s=1.0), num_gpus=None, rate=14.0)
    assert {each.candidate.kind for each in found.tried} == {"hybrid", "one pool", "two pools"}
    hybrid = next(each for each in found.tried if each.candidate.kind == "hybrid")
    assert hybrid.candidate.gpus == found.chosen.candidate.gpus == 2
    assert hybrid.goodput.value >= 0.95 * found.chosen.goodput.value


def test_what_long_runs_show_to_miss_the_rate_is_not_bought() -> None:
    """One worker keeps 7.2 requests/s in a short run and 7.06 in a long one; of what it becomes with another it is
    known, too."""
    found = planned(slo=Slo(ttft_s=0.6, tpot_s=1.0), num_gpus=None, rate=7.2)
    assert found.chosen.candidate.gpus == 2
    assert found.chosen.goodput.value >= 7.2
    assert found.at_rate.attainment.value >= 0.9
    (alone,) = [each for each in found.tried if each.candidate.gpus == 1]
    assert 6.5 < alone.goodput.value < 7.2
    assert found.tried[-1] == alone


@pytest.mark.parametrize(
    ("values", "rough", "rate", "chosen"),
    [
        ((9.0, 8.95, 8.92), "", 0.0, "one pool"),
        ((9.0, 8.95, 8.80), "", 0.0, "two pools"),
        ((9.0, 8.80, 8.80), "", 0.0, "hybrid"),
        ((9.0, 8.95, 8.92), "one pool", 0.0, "two pools"),  # a quick look, and nothing more
        ((9.0, 8.95, 8.92), "", 8.93, "two pools"),  # the other misses the rate
    ],
)
def test_of_what_is_as_good_the_simplest_kind_is_chosen(
    values: tuple[float, ...], rough: str, rate: float, chosen: str
) -> None:
    candidates = (
        Candidate(pools=(pool("prefill", 1, 1), pool("mixed", 1, 1))),
        Candidate(pools=(pool("prefill", 1, 1), pool("decode", 1, 1))),
        Candidate(pools=(pool("mixed", 1, 2),)),
    )
    tried = [
        Goodput(
            candidate=candidate,
            goodput=Interval(value, value, value),
            curve=(),
            usd_per_hour=0.0,
            watts=0.0,
            is_rough=candidate.kind == rough,
        )
        for candidate, value in zip(candidates, values, strict=True)
    ]
    found = simplest_first(tried, rate)
    assert found[0].candidate.kind == chosen
    assert sorted(each.goodput.value for each in found) == sorted(values)


@pytest.mark.parametrize(("plain", "guesses"), [(8.95, 0), (8.8, 4)])
def test_guesses_that_gain_nothing_are_left_out(plain: float, guesses: int) -> None:
    alone = pool("mixed", 1, 2)
    tried = [
        Goodput(
            candidate=Candidate(pools=(replace(alone, num_speculative_tokens=ahead),)),
            goodput=Interval(value, value, value),
            curve=(),
            usd_per_hour=0.0,
            watts=0.0,
        )
        for ahead, value in ((4, 9.0), (0, plain))
    ]
    assert simplest_first(tried, 0.0)[0].candidate.num_guesses == guesses


def test_each_pool_of_a_hybrid_shrinks_by_itself_and_none_grows() -> None:
    offer = toy_offer()
    reading, writing = (mixed_of(offer, count, "toy", chunks).pools[0] for count, chunks in ((2, 100), (1, 50)))

    def sized(rate: float) -> SizedPlacement:
        hybrid = Placement(candidate=Candidate(pools=(reading, writing)), promised=rate, gpus_per_node=8)
        return size_for_rate(
            SizingJob(
                placement=hybrid,
                offers={(offer.degrees, is_near): offer for is_near in (True, False)},
                rate=rate,
                traffic=Traffic(source=alike()),
                targets=Targets(slo=Slo(ttft_s=1.0, tpot_s=1.0)),
                effort=JOINT.times(0.05),
                seed=0,
                cell=16,
                may_grow=False,
            )
        )

    few, many = sized(2.0), sized(100.0)
    assert [pool.replicas for pool in few.placement.candidate.pools] == [1, 1]
    assert (few.at_rate.keeps_slo, many.at_rate.keeps_slo) == (True, False)
    assert [pool.replicas for pool in many.placement.candidate.pools] == [2, 1]


def test_a_burst_that_is_too_much_for_any_worker_alone_is_shared() -> None:
    with pytest.raises(PlanError, match="no prefill worker of up to 1 GPU keeps it"):
        planned(num_gpus=1, burstiness=0.05)
    assert planned(rate=1.0, num_gpus=None, burstiness=0.05, thoroughness=0.02).chosen.goodput.value >= 1


def test_a_budget_is_as_many_gpus_as_it_pays_for() -> None:
    found = planned(num_gpus=None, budget_usd_per_hour=5.9, colocated=False)
    assert found.chosen.candidate.gpus == 2
    assert found.chosen.usd_per_hour == 4.0
    with pytest.raises(PlanError, match="one bench costs 2; give more"):
        planned(num_gpus=None, budget_usd_per_hour=1.5)


def test_the_latency_models_error_is_in_the_interval() -> None:
    sure = planned(num_gpus=2, colocated=False).chosen.goodput
    unsure = planned(num_gpus=2, colocated=False, catalog=one_gpu(error=0.1)).chosen.goodput
    assert unsure.value == sure.value
    assert unsure.low < 0.93 * sure.low
    assert unsure.high > 1.05 * sure.high


def test_request_classes_have_targets_of_their_own() -> None:
    classes = (
        RequestClass(name="chat", share=0.5, slo=DISTURBED),
        RequestClass(name="batch", share=0.5, slo=Slo(ttft_s=60, tpot_s=1, attainment=0.99)),
    )
    found = planned(num_gpus=2, classes=classes, colocated=False)
    assert set(found.at_rate.by_class) == {"chat", "batch"}
    assert found.at_rate.by_class["batch"] >= 0.99


# what cannot be


def refusal(**ask: Any) -> str:
    with pytest.raises(PlanError) as raised:
        planned(**ask)
    return str(raised.value)


@pytest.mark.parametrize("size", [{"num_gpus": 2}, {"num_gpus": None, "rate": 12.0}], ids=["gpus", "rate"])
def test_requests_of_one_token_are_planned_as_mixed_workers(size: dict[str, Any]) -> None:
    found = planned(Slo(ttft_s=1.0, tpot_s=0.001), workload=alike(output=1), **size)
    assert [(pool.role, pool.replicas) for pool in found.chosen.candidate.pools] == [("mixed", 2)]
    assert found.chosen.goodput.value == pytest.approx(20.0, rel=0.15)  # 10 prompts a second each
    assert found.advice[0].startswith("Do not disaggregate: every output is one token, which prefill makes, ")


def test_a_tpot_below_a_single_step() -> None:
    said = refusal(slo=Slo(ttft_s=1, tpot_s=0.001), catalog=ToyCatalog())
    step = "one decode step of toy at batch 1 with 105 tokens of context (P90) takes 3.43 ms"
    assert said.startswith(f"TPOT 1 ms: {step} on bench even at TP 4; ask for")


def test_a_ttft_below_a_single_prompt() -> None:
    said = refusal(slo=Slo(ttft_s=0.02, tpot_s=1), catalog=ToyCatalog())
    assert said.startswith("TTFT 20 ms: a prompt of 100 tokens (P90) takes 33 ms alone on bench even at TP 4; ask for")


def test_a_model_that_fits_nowhere() -> None:
    assert "toy fits nowhere on 4 x bench: TP 4: the toy has 0 heads" in refusal(catalog=ToyCatalog(largest=0))


def test_prompts_longer_than_all_pages() -> None:
    long = Workload(
        arrival_s=np.arange(10.0), prompt_len=np.full(10, PROMPT), output_len=np.full(10, 400), name="long.csv"
    )
    said = refusal(catalog=ToyCatalog(largest=1, num_pages=10), workload=long)
    assert "long.csv: request 0 has 500 tokens, and the roomiest worker (TP 1) holds 160" in said


def some_longer(share: float) -> Workload:
    """Some prompts of 400 tokens, for which TP 1 has no room where it holds 240, and TP 2 has."""
    workload = alike()
    is_long = np.arange(len(workload)) < share * len(workload)
    return replace(workload, prompt_len=np.where(is_long, 4 * PROMPT, workload.prompt_len))


def test_a_worker_that_lacks_room_for_some_requests_is_not_bought() -> None:
    """However many of the others it serves in time. Where nobody has room, they are refused, and that is said."""
    catalog = ToyCatalog(largest=2, num_pages=15, latency={"slope_s": 0.0001})
    loose = Slo(ttft_s=2.0, tpot_s=0.1)
    found = planned(slo=loose, catalog=catalog, workload=some_longer(0.05), num_gpus=2)
    assert {pool.degrees.tp for pool in found.chosen.candidate.pools} == {2}
    why = found.refused["prefill TP 1"]
    assert why.startswith("it holds 240 tokens of KV on bench at TP 1, and 5.0% of the prompts are longer, up to 400:")
    assert "colocated TP 1" in found.refused
    assert not any("find no room" in sentence for sentence in found.advice)

    small = replace(catalog, largest=1)
    found = planned(slo=loose, catalog=small, workload=some_longer(0.05), num_gpus=2, colocated=False)
    assert any(sentence.startswith("5.00% of the requests find no room") for sentence in found.advice)


def test_too_few_gpus_for_two_pools() -> None:
    assert "num_gpus is 1: the smallest prefill and decode workers that keep the targets take 2" in refusal(
        num_gpus=1, colocated=False
    )


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        ({"num_gpus": 4, "rate": 3.0}, "num_gpus and rate is given; give one"),
        ({"num_gpus": None}, "nothing is given"),
        ({"num_gpus": 0}, "num_gpus is 0; give a number above 0"),
        ({"slo": Slo(ttft_s=1, tpot_s=1, attainment=1.5)}, "attainment is 1.5"),
        ({"slo": Slo(ttft_s=0)}, "ttft is 0 s"),
        ({"max_pp": 0}, "max_pp is 0"),
    ],
)
def test_an_ask_that_makes_no_sense(ask: dict[str, Any], said: str) -> None:
    assert said in refusal(**ask)
