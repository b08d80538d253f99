"""Goodput: the rate that a formula gives, more with more workers, and the same however many processes search."""

from __future__ import annotations

from dataclasses import astuple, replace

import pytest

from placement.build.from_offers import first_tokens_of, phase_alone
from placement.goodput.estimate import Effort, Estimate, estimate
from placement.goodput.runner import open_runner
from placement.goodput.search import GoodputProblem, crossing, find_goodput, goodput_of
from placement.goodput.targets import Targets
from placement.plan import Interval, RatePoint, Slo
from placement.simulator.systems import LiveSystem
from placement.workload.traffic import Traffic
from tests.placement.goodput.test_estimate import waits_at_most
from tests.placement.toys import alike, toy_offer

QUICK = Effort(first_requests=800, max_requests=3200, half_width=0.015, decides=True)
TARGETS = Targets(slo=Slo(ttft_s=0.25, attainment=0.9))


def problem(system: LiveSystem | None = None, top: float = 11.0, **changes: object) -> GoodputProblem:
    system = system or LiveSystem(replace(phase_alone("prefill", toy_offer()), message_s=1e-7))
    traffic = Traffic(source=first_tokens_of(alike()))
    return replace(GoodputProblem(system=system, traffic=traffic, targets=TARGETS, top=top, effort=QUICK), **changes)  # type: ignore[arg-type]


def rate_of_formula(ttft_s: float = 0.25, wanted: float = 0.9) -> float:
    """Where the wait in an M/D/1 queue is short enough for the share that is wanted."""
    low, high = 0.1, 9.9
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if waits_at_most(ttft_s - 0.1, middle) >= wanted else (low, middle)
    return low


def test_goodput_of_a_queue_is_what_the_formula_gives() -> None:
    found = find_goodput(problem())
    assert found.goodput.value == pytest.approx(rate_of_formula(), rel=0.05)
    assert found.goodput.low <= rate_of_formula() <= found.goodput.high
    assert found.goodput.high < 1.3 * found.goodput.low


@pytest.mark.parametrize("top", [2.0, 5.0, 400.0])
def test_a_wrong_bound_costs_time_and_not_the_answer(top: float) -> None:
    assert find_goodput(problem(top=top)).goodput.value == pytest.approx(rate_of_formula(), rel=0.05)


@pytest.mark.parametrize("rate", [1e-9, 0.001, 0.5, 5.0])
def test_a_rate_asked_for_far_below_the_goodput_does_not_hide_it(rate: float) -> None:
    found = find_goodput(problem(bottom=rate, top=1.25 * rate)).goodput
    assert found.value == pytest.approx(rate_of_formula(), rel=0.06)


@pytest.mark.parametrize(("bottom", "top"), [(5.0, 3.0), (8.0, 8.0), (11.0, 7.0)])
def test_a_bound_below_what_was_seen_sends_the_search_nowhere_else(bottom: float, top: float) -> None:
    """It went down to 1e-19 requests/s, where two reports lie closer than a float tells times apart."""
    found = find_goodput(problem(bottom=bottom, top=top))
    assert found.goodput.value == pytest.approx(rate_of_formula(), rel=0.06)
    assert min(each.point.rate for each in found.estimates) > 1.0


def test_what_is_known_of_a_rate_is_not_simulated_again() -> None:
    asked = problem(bottom=5.0, top=8.0)
    anew, known = find_goodput(asked), asked.estimate(5.0)
    found = find_goodput(replace(asked, known=known))
    assert found.goodput == anew.goodput
    assert any(each is known for each in found.estimates)
    assert found.num_simulated == anew.num_simulated - known.num_simulated


def test_looser_targets_never_lower_the_goodput() -> None:
    found = [
        find_goodput(problem(targets=Targets(slo=Slo(ttft_s=ttft_s, attainment=share)))).goodput.value
        for ttft_s, share in ((0.15, 0.9), (0.25, 0.9), (0.5, 0.9), (0.5, 0.5))
    ]
    assert found == sorted(found)
    assert found[0] < 0.7 * found[-1]


def test_slower_times_lower_the_goodput_and_no_rate_keeps_what_cannot_be_kept() -> None:
    slow = find_goodput(problem(factor=1.2)).goodput.value
    assert slow < 0.85 * find_goodput(problem()).goodput.value
    never = find_goodput(problem(targets=Targets(slo=Slo(ttft_s=0.09))))
    assert never.goodput.value == 0.0


def test_copies_share_the_rate() -> None:
    one, three = find_goodput(problem()), find_goodput(problem(copies=3, top=33.0))
    assert three.goodput.value == pytest.approx(3 * one.goodput.value, rel=0.05)


def test_the_same_seed_gives_the_same_in_any_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("placement.compiled.pool.compiled_folder", lambda cache=None: None)
    short = Effort(first_requests=400, max_requests=400, decides=True)
    problems = [problem(seed=seed, effort=short) for seed in (1, 2, 3)]
    with open_runner(0) as runner:
        expected = runner.map(find_goodput, problems, "here")
    with open_runner(2) as runner:
        found = runner.map(find_goodput, problems, "there")
    assert [knee.goodput for knee in found] == [knee.goodput for knee in expected]
    assert len({knee.goodput for knee in expected}) == 3


def test_a_rate_that_only_a_short_run_keeps_is_found_out() -> None:
    """Just above capacity, with a target of half a minute, the queue takes thousands of requests to be late."""
    loose = Targets(slo=Slo(ttft_s=30.0, attainment=0.9))
    short = Effort(first_requests=800, max_requests=800, decides=True)
    flattered = find_goodput(problem(targets=loose, effort=short))
    assert flattered.goodput.value > 10.5
    longer = Effort(first_requests=8000, max_requests=8000)
    checked = find_goodput(problem(targets=loose, effort=short, longer=longer))
    assert checked.goodput.value < 10.35  # 8,000 arrivals may come so much slower than they should
    assert checked.num_simulated >= 8000


def test_crossings_are_read_off_the_line_between_two_points() -> None:
    assert crossing([(1, 0.1), (2, -0.1)]) == pytest.approx(1.5)
    assert crossing([(1, -0.1), (2, 0.1)]) == 0.0
    assert crossing([(1, 0.1), (2, 0.05)]) == 2
    assert crossing([(1, 0.1), (2, -0.1), (3, 0.2)]) == pytest.approx(1.5)


def test_the_interval_of_a_goodput_is_where_the_attainments_could_cross() -> None:
    found = goodput_of([looked(1, 0.1, 0.0), looked(2, 0.0, 0.02), looked(3, -0.1, 0.02)], most_slack=0.1)
    assert astuple(found) == pytest.approx((2, 1.8, 2.2))


def test_rates_are_lowered_until_one_surely_keeps_the_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short runs are sure up to 8 requests/s; long ones only below 7."""

    def estimated(self: GoodputProblem, rate: float) -> Estimate:
        is_long = self.effort is not QUICK
        slack = -0.3 if rate > 8 else 0.01 if is_long and rate > 7 else 0.1
        return looked(rate, slack, 0.05 if is_long else 0.01)

    monkeypatch.setattr(GoodputProblem, "estimate", estimated)
    found = find_goodput(problem(bottom=7.8, top=8.2, longer=Effort()))
    assert found.goodput.low > 6
    assert [at.slack.low >= 0 for at in found.estimates][:2] == [True, False]


def test_between_two_rates_that_are_sure_the_goodput_is_anywhere() -> None:
    found = goodput_of([looked(1, 0.1, 0.01), looked(2, -0.4, 0.05)], most_slack=0.1)
    assert astuple(found) == pytest.approx((1.2, 1, 2))


def looked(rate: float, slack: float, half: float) -> Estimate:
    return Estimate(
        point=RatePoint(rate=rate, attainment=Interval(0.9 + slack, 0, 1)),
        slack=Interval(slack, slack - half, slack + half),
        is_growing=False,
        missed_ttft=0,
        missed_tpot=0,
        num_simulated=1,
        cpu_s=0,
    )


def test_the_estimate_that_is_asked_for_is_the_one_that_the_search_saw() -> None:
    seen = find_goodput(problem()).estimates[0]
    again = estimate(problem().system, problem().traffic, seen.point.rate, TARGETS, effort=QUICK)
    assert again.point == seen.point
