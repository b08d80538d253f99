"""Whether a plan says to guess tokens ahead: it does where steps wait for memory, and not where each row costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from placement.build.from_offers import mixed_of
from placement.catalogs.base import Degrees, Offer
from placement.latency.speculation import Speculation
from placement.plan import Goodput, Interval, Plan, RatePoint, Slo
from placement.search.advice import Findings, advise
from placement.search.planner import plan
from placement.search.question import PlanQuestion
from tests.kvrelay.plan.plan_fixture import apart
from tests.placement.toys import ToyCatalog, alike, toy_offer

pytestmark = pytest.mark.unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Guessing(ToyCatalog):
    """Who guesses takes half of the pages."""

    acceptance: float

    def offer(self, degrees: Degrees, *, within_node: bool = True) -> Offer | str:
        offer = ToyCatalog.offer(self, degrees, within_node=within_node)
        if isinstance(offer, str):
            return offer
        guesses = Speculation(num_tokens=4, acceptance=self.acceptance)
        return replace(offer, speculation=guesses, speculative_pages=offer.num_pages // 2)


def planned(acceptance: float, num_pages: int) -> Plan:
    """One prefill worker, which is fast, and one that decodes: a step takes 10 ms, whatever is in it."""
    catalog = Guessing(
        largest=1, acceptance=acceptance, num_pages=num_pages, latency={"prompt_s": 0.001, "slope_s": 1e-5}
    )
    question = PlanQuestion(
        slo=Slo(ttft_s=1.0, tpot_s=0.03), num_gpus=2, processes=0, thoroughness=0.02, colocated=False
    )
    return plan(question, catalog, alike(100, output=20))


def said(found: Plan) -> str:
    return next(sentence for sentence in found.advice if "guesses ahead" in sentence)


def test_where_steps_are_few_and_rows_cost_nothing_it_speculates() -> None:
    """A step is of five requests at most, for so many have pages."""
    found = planned(acceptance=0.9, num_pages=80)
    prefill, decode = found.chosen.candidate.pools
    assert (prefill.num_speculative_tokens, prefill.num_pages) == (0, 80)
    assert (decode.num_speculative_tokens, decode.num_pages) == (4, 40)
    assert said(found).startswith(
        "Speculate: 4 guesses ahead, each right 90% of the time where those before it are, mean "
    )


def test_where_guesses_are_wrong_and_take_pages_it_does_not() -> None:
    found = planned(acceptance=0.05, num_pages=80)
    assert found.chosen.candidate.num_guesses == 0
    assert said(found).startswith(
        "Do not speculate: 4 guesses ahead, each right 5% of the time where those before it are, mean 0."
    )


def goodput(value: float, guesses: int, replicas: int = 1) -> Goodput:
    candidate = apart((1, 1), (1, replicas))
    pools = (candidate.pools[0], replace(candidate.pools[1], num_speculative_tokens=guesses))
    point = RatePoint(rate=value, attainment=Interval(0.9, 0.9, 0.9), phases_s={"decode": 2.0})
    return Goodput(
        candidate=replace(candidate, pools=pools),
        goodput=Interval(value, value, value),
        curve=(point,),
        usd_per_hour=0.0,
        watts=0.0,
    )


@pytest.mark.parametrize(
    ("tried", "rate", "told"),
    [
        (
            (goodput(9.0, 4), goodput(6.0, 0)),
            None,
            "Speculate: 4 guesses ahead, each right 70% of the time where those before it are, mean 1.50 times "
            "the goodput per GPU of the best without; a worker that decodes has 18 requests at once, and 12 without.",
        ),
        (
            (goodput(9.0, 0), goodput(6.0, 4)),
            None,
            "Do not speculate: 4 guesses ahead, each right 70% of the time where those before it are, mean 0.67 times "
            "the goodput per GPU of the best without; a worker that decodes has 12 requests at once, and 18 without.",
        ),
        ((goodput(9.1, 4), goodput(9.0, 0)), None, "Speculating makes no difference that is sure: 4 guesses ahead, "),
        (
            (goodput(9.0, 4), goodput(9.0, 0, 3)),
            8.0,
            "Speculate: 4 guesses ahead, each right 70% of the time where those before it are, mean 2 GPUs ",
        ),
        (
            (goodput(9.0, 0),),
            None,
            "Do not speculate: with guesses, each right 70% of the time where those before it are, no placement ",
        ),
        (
            (goodput(9.0, 0), goodput(7.0, 4)),
            8.0,
            "Do not speculate: with guesses, each right 70% of the time where those before it are, no placement ",
        ),
        (
            (goodput(9.0, 4),),
            None,
            "Speculate: only with 4 guesses ahead, each right 70% of the time where those before it are, the ",
        ),
    ],
)
def test_what_guesses_gain_or_cost_is_said(tried: Sequence[Goodput], rate: float | None, told: str) -> None:
    findings: dict[str, Any] = {"binding": "none", "relief": {"": 0.9}, "over": 9.9, "headroom": 0.0, "error": 0.0}
    findings |= {"chosen": tried[0], "tried": tried, "rate": rate, "asked_colocated": False, "arrivals": ""}
    assert any(sentence.startswith(told) for sentence in advise(Findings(**findings, acceptance=0.7)))
    assert not any("guesses" in sentence for sentence in advise(Findings(**findings)))


@pytest.mark.parametrize(("gpus", "taken"), [(1, "1 GPU"), (2, "2 GPUs")])
def test_one_gpu_is_not_many(gpus: int, taken: str) -> None:
    chosen = replace(goodput(9.0, 0), candidate=mixed_of(toy_offer(), gpus, "bench", 512))
    other = goodput(9.0, 0, 3)
    assert other.candidate.gpus not in (1, 2)
    findings: dict[str, Any] = {"binding": "none", "relief": {}, "over": 9.9, "headroom": 0.1, "error": 0.0}
    findings |= {"chosen": chosen, "tried": (chosen, other), "asked_colocated": True, "arrivals": ""}
    assert f" takes {taken} for 8 requests/s, against " in advise(Findings(**findings, rate=8.0))[0]


@pytest.mark.parametrize(
    ("first", "second", "rate", "told"),
    [
        (9.0, 8.9, None, "Disaggregation makes no difference that is sure: 1.01 times the goodput per GPU of"),
        (9.0, 8.9, 8.0, "Disaggregation makes no difference that is sure: 1.01 times the goodput per GPU of"),
        (9.0, 6.0, None, "Disaggregation pays: 1.50 times the goodput per GPU of"),
        (9.0, 8.9, 8.9, "Disaggregation makes no difference that is sure"),
    ],
)
def test_what_comes_out_alike_is_not_said_to_pay(first: float, second: float, rate: float | None, told: str) -> None:
    chosen = goodput(first, 0)
    other = replace(goodput(second, 0), candidate=mixed_of(toy_offer(), 2, "bench", 512))
    findings = Findings(
        chosen=chosen,
        tried=(chosen, other),
        binding="none",
        relief={},
        over=9.9,
        headroom=0.1,
        rate=rate,
        error=0.0,
        asked_colocated=True,
        arrivals="",
    )
    assert advise(findings)[0].startswith(told)
