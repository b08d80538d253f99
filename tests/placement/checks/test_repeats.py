"""Bias is what all runs of a case have in common, noise what they have not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from placement.build.from_profile import sim_cluster
from placement.checks.repeats import Repeated, repeats_of
from placement.checks.verification import Doubt, Verification, compare, predict
from placement.plan import Slo
from tests.placement.checks.test_verification import seen_as, workload
from tests.placement.latency.test_profile import profile

pytestmark = pytest.mark.unit


def runs(*times: float) -> list[Verification]:
    prediction = predict(sim_cluster(profile()), workload(), Doubt())
    found = compare(prediction, prediction.expected, Slo(ttft_s=0.1, tpot_s=0.02))
    came = replace(found, rows=tuple(replace(row, measured=row.predicted.value) for row in found.rows))
    seen = [compare(prediction, seen_as(prediction.expected, each), found.slo) for each in times]
    return [
        replace(each, rows=tuple(replace(row, measured=row.predicted.value * t) for row in came.rows))
        for each, t in zip(seen, times, strict=True)
    ]


def of(what: str, *times: float) -> Repeated:
    return next(each for each in repeats_of(runs(*times)) if each.what == what)


def test_what_all_runs_have_in_common_is_bias() -> None:
    found = of("TTFT P90", 1.19, 1.21, 1.2, 1.2)
    assert found.bias.value == pytest.approx(0.2)
    assert found.noise == pytest.approx(np.std([0.19, 0.21, 0.2, 0.2], ddof=1))
    assert found.repeats
    assert 0.18 < found.bias.low < 0.2 < found.bias.high < 0.22
    assert found.words.startswith("TTFT P90 was off by +20.0% (")
    assert "in all 4 runs: that repeats, and is bias; one run differs from another by 0.8%" in found.words


def test_what_differs_between_them_is_noise() -> None:
    found = of("TPOT P50", 0.8, 1.25, 1.0, 1.0)
    assert not found.repeats
    assert found.noise == pytest.approx(np.std([-0.2, 0.25, 0, 0], ddof=1))
    assert "which may be chance" in found.words


def test_every_quantity_is_split() -> None:
    assert [each.what for each in repeats_of(runs(1.0, 1.1))] == [
        "attainment",
        *(f"{metric} P{p}" for metric in ("TTFT", "TPOT", "E2E") for p in (50, 90, 99)),
    ]
