"""Cases differ in all they should, and coverage counts what lies inside, below and above, quantity by quantity."""

from __future__ import annotations

from typing import Any

import pytest

from bench.coverage import BUSY, LENGTHS, QUANTITIES, TARGETS, cases, coverage_of, row_of, slo_of, table_of, workload_of
from kvrelay.bench.workload import timed_workload
from placement.build.from_profile import sim_cluster
from placement.checks.verification import Doubt, compare, predict
from tests.placement.checks.test_verification import seen_as
from tests.placement.latency.test_profile import profile

pytestmark = pytest.mark.unit


def test_over_forty_cases_none_of_them_twice() -> None:
    every = cases()
    assert len(every) > 40
    assert {case.lengths for case in every} == set(LENGTHS)
    assert {case.busy for case in every} == set(BUSY)
    assert {case.targets for case in every} == set(TARGETS)
    assert len({(case.lengths, case.busy, case.targets) for case in every}) == len(every)
    assert len({case.seed for case in every}) == len(every)
    assert cases(quick=True) == every[:3]


def figures(name: str, measured: float) -> dict[str, Any]:
    high = 0.9 if name == "attainment" else 1.2
    return {"value": 0.85, "low": 0.8, "high": high, "measured": measured, "is_inside": 0.8 <= measured <= high}


def test_coverage_is_the_share_of_cases_inside() -> None:
    rows = [{"quantities": {name: figures(name, at) for name in QUANTITIES}} for at in (0.7, 0.85, 0.85, 1.3)]
    covered = coverage_of(rows)
    assert covered["all"] == {"inside": 0.5}
    ttft, share = covered["TTFT P90"], covered["attainment"]
    assert (ttft["inside"], ttft["below"], ttft["above"]) == (0.5, 0.25, 0.25)
    assert ttft["width"] == pytest.approx(0.4 / 0.85)
    assert ttft["off"] == 0
    assert share["width"] == pytest.approx(0.1)
    assert share["off"] == 0
    assert table_of(rows).row_count == len(QUANTITIES)


def test_a_case_is_predicted_at_the_rate_and_with_the_targets_that_it_says() -> None:
    case, made = cases()[0], profile()
    options = workload_of(case, made, seconds=5.0)
    workload = timed_workload(options)
    busy = options.request_rate * sum(
        sim_cluster(made).workers[0].latency.prefill_s([(int(n), 0)]) for n in workload.prompt_len
    )
    assert busy / len(workload) == pytest.approx(case.busy, rel=0.15)
    slo = slo_of(case, made, workload)
    prediction = predict(sim_cluster(made), workload, Doubt())
    row = row_of(case, compare(prediction, seen_as(prediction.expected, 3.0), slo))
    assert tuple(row["quantities"]) == QUANTITIES
    assert not row["quantities"]["TTFT P90"]["is_inside"]
    assert row["failed"] == 0
