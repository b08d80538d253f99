"""Why nothing can be planned: the figure that is told is one that forbids it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from placement.build.from_offers import mixed_of, offers_of
from placement.catalogs.base import PlanError
from placement.catalogs.roofline import open_catalog
from placement.goodput.bounds import prefill_bound
from placement.goodput.targets import Targets
from placement.plan import RequestClass, Slo
from placement.search.infeasible import idle_reason, no_room, raise_if_nothing_fits, room_reason, why_nothing
from placement.search.problem import PlacementProblem, SearchLog
from placement.workload.traffic import Traffic, with_classes
from tests.placement.toys import ToyCatalog, alike, toy_offer

CLASSES = (
    RequestClass(name="chat", share=0.5, slo=Slo(ttft_s=0.25, tpot_s=0.02)),
    RequestClass(name="jobs", share=0.5, slo=Slo(ttft_s=5.0, attainment=0.99)),
)


def problem(*classes: RequestClass, slo: Slo | None = None) -> PlacementProblem:
    catalog = ToyCatalog()
    traffic = Traffic(source=with_classes(alike(), classes, 0))
    targets = Targets(slo=slo or Slo(), classes=classes)
    return PlacementProblem(catalog=catalog, offer_of=offers_of(catalog), traffic=traffic, targets=targets)


def test_the_step_that_forbids_a_tpot_is_that_of_a_request_which_misses_it() -> None:
    """One in five has a long context, more than may miss the target; the mean context meets it."""
    catalog, source = open_catalog("llama-3.1-8b", "h100-sxm"), alike(output=21)
    is_long = np.arange(len(source)) % 5 == 0
    source = replace(source, prompt_len=np.where(is_long, 100_000, source.prompt_len))
    asked = replace(
        problem(slo=Slo(tpot_s=0.02)), catalog=catalog, offer_of=offers_of(catalog), traffic=Traffic(source=source)
    )
    offer = asked.offer_of(catalog.degrees(1)[0], True)
    step = "one decode step of llama-3.1-8b at batch 1 with 100,010 tokens of context (P90)"
    assert idle_reason(asked, "decode", offer).startswith(f"TPOT 20 ms: {step} takes 34.")
    with pytest.raises(PlanError, match=r"100,010 tokens of context \(P90\) takes 34\.\d ms"):
        raise_if_nothing_fits(asked, [offer], SearchLog(), 1)


def test_a_trace_that_begins_unlike_itself_is_judged_by_all_of_it() -> None:
    """Its first 600 requests of 10,000 have prompts that take 10 s alone; one in ten may be late."""
    source = alike(10_000)
    source = replace(source, prompt_len=np.where(np.arange(len(source)) < 600, 10_000, source.prompt_len))
    asked = replace(problem(slo=Slo(ttft_s=0.2)), traffic=Traffic(source=source))
    assert idle_reason(asked, "prefill", toy_offer()) == ""
    raise_if_nothing_fits(asked, [toy_offer()], SearchLog(), 1)
    assert prefill_bound(toy_offer(), source) == pytest.approx(1.1 / 0.694, rel=0.15)  # 0.1 s and 6% of 10 s


def test_the_figure_is_of_the_class_that_misses_its_targets() -> None:
    late = replace(CLASSES[1], slo=Slo(ttft_s=0.05, attainment=0.99))
    told = idle_reason(problem(CLASSES[0], late), "prefill", toy_offer())
    assert told == "TTFT 50 ms: a prompt of 100 tokens (P99) takes 100 ms alone on bench at TP 1"


def test_what_is_cached_of_a_prompt_is_told_with_its_time() -> None:
    source = replace(alike(), blocks=[(1, 2, row) for row in range(400)], block_len=32)
    asked = replace(problem(slo=Slo(ttft_s=0.05)), traffic=Traffic(source=source))
    assert idle_reason(asked, "prefill", toy_offer()) == ""
    told = idle_reason(replace(asked, targets=Targets(slo=Slo(ttft_s=0.03))), "prefill", toy_offer())
    assert told == "TTFT 30 ms: a prompt of 100 tokens (P90, 64 of them cached) takes 36 ms alone on bench at TP 1"


def test_targets_of_classes_are_the_strictest_and_none_is_infinite() -> None:
    def told(*classes: RequestClass, slo: Slo = CLASSES[0].slo) -> str:
        log = SearchLog()
        log.refused["prefill TP 1"] = "it holds too little"
        return why_nothing(problem(*classes, slo=slo), [toy_offer()], log, 4, [], [], [])

    wanted = "for as many requests of each class as are to meet them but when idle"
    assert told(*CLASSES, slo=Slo()).startswith(f"TTFT 250 ms: no prefill worker of up to 1 GPU keeps it {wanted}")
    assert told().startswith("TTFT 250 ms: no prefill worker of up to 1 GPU keeps it for 90% of requests but when")
    assert "keeps it for 99.9% of requests" in told(slo=replace(CLASSES[0].slo, attainment=0.999))
    assert told(slo=Slo(tpot_s=0.02)).startswith(
        "no prefill worker of up to 1 GPU serves these requests (it holds too little); allow more GPUs"
    )


def test_requests_beyond_the_models_positions_ask_for_no_more_memory() -> None:
    """They are refused by every worker, however much it holds."""
    catalog, source = open_catalog("llama-3.1-8b", "h100-sxm"), alike(output=21)
    source = replace(source, prompt_len=np.where(np.arange(len(source)) % 100 == 7, 900_000, source.prompt_len))
    asked = replace(problem(), catalog=catalog, offer_of=offers_of(catalog), traffic=Traffic(source=source))
    offers = [asked.offer_of(degrees, True) for degrees in catalog.degrees(8)]
    assert {offer.longest for offer in offers} == {131_072}
    assert [room_reason(asked, "decode", offer, offers) for offer in offers] == [""] * len(offers)
    raise_if_nothing_fits(asked, offers, SearchLog(), 8)
    candidate = mixed_of(offers[0], 1, "h100", 512)
    assert no_room(source, candidate, 131_072) == ""
    assert "1.00% of the requests find no room" in no_room(source, candidate, 0)
