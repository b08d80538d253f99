"""What moves an answer, for a toy whose prefill workers bind: prefill's times and lengths do, decode's do not."""

from __future__ import annotations

import pytest

from placement.plan import Plan, Slo, Swing
from placement.search.clusters import LONG
from placement.search.planner import plan
from placement.search.question import PlanQuestion
from tests.placement.toys import ToyCatalog, alike

SLO = Slo(ttft_s=0.4, tpot_s=0.0125)


@pytest.fixture(scope="module")
def planned() -> Plan:
    """One prefill and one decode worker, which could serve a dozen of it."""
    catalog = ToyCatalog(largest=1, latency={"slope_s": 0.0001})
    question = PlanQuestion(slo=SLO, rate=5.0, processes=1, thoroughness=0.2, colocated=False, what_if=True)
    return plan(question, catalog, alike())


def swing(planned: Plan, what: str) -> Swing:
    return next(swing for swing in planned.swings if swing.what == what)


def test_what_binds_moves_the_goodput_and_what_does_not_leaves_it(planned: Plan) -> None:
    goodput = planned.chosen.goodput.value
    for what in ("prefill times", "prompts"):
        found = swing(planned, what)
        assert found.at_less > 1.03 * goodput
        assert found.at_more < 0.97 * goodput
    assert swing(planned, "transfer times").span < 0.05 * goodput
    assert swing(planned, "prefill times").span > 3 * swing(planned, "decode times").span


def test_nothing_worse_raises_the_goodput_that_was_verified_by_longer_runs(planned: Plan) -> None:
    goodput = planned.chosen.goodput.value
    for found in planned.swings:
        worse, better = sorted((found.at_less, found.at_more))
        assert worse <= 1.001 * goodput, found.what
        assert better >= 0.999 * goodput, found.what


def test_the_largest_swing_is_first_and_each_says_how_far_it_went(planned: Plan) -> None:
    spans = [swing.span for swing in planned.swings]
    assert spans == sorted(spans, reverse=True)
    assert {(swing.less, swing.more) for swing in planned.swings} >= {
        ("10% shorter", "10% longer"),
        ("20% tighter", "20% looser"),
    }


def test_sentences_say_which_target_costs_most_and_what_a_worker_more_and_twice_the_rate_take(planned: Plan) -> None:
    said = " ".join(planned.advice)
    assert "The TTFT target costs most: 20% looser, and the goodput is" in said
    assert "One more prefill worker (1 GPU, 2.00 USD an hour) takes the goodput from" in said
    assert "At twice the rate, 10 requests/s, the cheapest of the best placements, grown, is" in said


def test_what_is_promised_at_the_rate_is_of_runs_as_long_as_those_that_verify_the_goodput(planned: Plan) -> None:
    """Shorter ones flatter: at a rate near the goodput more would meet their targets than at a lower one."""
    assert planned.at_rate.num_requests >= 0.2 * LONG.first_requests


def test_nothing_of_it_is_simulated_where_nobody_asked() -> None:
    question = PlanQuestion(slo=SLO, rate=5.0, processes=1, thoroughness=0.05, colocated=False)
    found = plan(question, ToyCatalog(largest=1, latency={"slope_s": 0.0001}), alike())
    assert found.swings == ()
    assert not any("twice the rate" in sentence for sentence in found.advice)
