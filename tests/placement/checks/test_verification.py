"""Predicted against measured: the same requests, each figure with its interval, the error kept for the next plan."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from placement.build.from_profile import sim_cluster
from placement.catalogs.base import PlanError
from placement.checks.margin import KEPT_RUNS, Margin, MarginRun, load_margin, save_margin
from placement.checks.verification import Doubt, Seen, compare, in_way, predict
from placement.checks.ways import Way
from placement.latency.under_load import LoadRun, PhaseUnderLoad, UnderLoad
from placement.plan import Slo
from placement.workload.requests import Workload
from tests.placement.latency.test_profile import profile

pytestmark = pytest.mark.unit

TENTH = Doubt(prefill=0.1, decode=0.1)
SLO = Slo(ttft_s=0.1, tpot_s=0.02)


def workload(count: int = 120, rate: float = 5.0) -> Workload:
    rng = np.random.default_rng(0)
    return Workload(
        arrival_s=np.cumsum(rng.exponential(1 / rate, count)),
        prompt_len=rng.integers(10, 600, count),
        output_len=rng.integers(1, 60, count),
    )


def seen_as(other: Seen, times: float) -> Seen:
    phases = {name: times * seconds for name, seconds in other.phases_s.items()}
    return Seen(ttft_s=other.ttft_s * times, tpot_s=other.tpot_s * times, e2e_s=other.e2e_s * times, phases_s=phases)


def test_a_prediction_that_came_true_is_off_by_nothing() -> None:
    prediction = predict(sim_cluster(profile()), workload(), TENTH)
    found = compare(prediction, prediction.expected, SLO)
    assert [(row.metric, row.percentile) for row in found.rows] == [
        (metric, p) for metric in ("ttft", "tpot", "e2e") for p in (50.0, 90.0, 99.0)
    ]
    assert all(abs(row.error) < 0.08 and row.is_inside for row in found.rows)
    assert found.measured_attainment == pytest.approx(found.attainment.value, abs=0.02)
    assert all(predicted == measured for predicted, measured in found.phases_s.values())


def test_the_phases_sum_to_the_whole_where_the_time_goes_outside_the_server() -> None:
    prediction = predict(sim_cluster(profile()), workload(), Doubt())
    late = replace(prediction.expected, e2e_s=prediction.expected.e2e_s + 0.25)
    phases = compare(prediction, late, SLO).phases_s
    assert phases["outside"][1] - phases["outside"][0] == pytest.approx(0.25)
    assert sum(measured for _, measured in phases.values()) == pytest.approx(late.e2e_s.mean())


def test_how_far_off_each_figure_is() -> None:
    prediction = predict(sim_cluster(profile()), workload(), Doubt())
    came, found = (compare(prediction, seen_as(prediction.expected, times), SLO) for times in (1.0, 1.25))
    for row, slower in zip(came.rows, found.rows, strict=True):
        assert slower.measured == pytest.approx(1.25 * row.measured)
        assert slower.error == pytest.approx(1.25 * (1 + row.error) - 1)
    assert found.measured_attainment <= found.attainment.value


def test_the_interval_is_what_the_error_of_the_times_makes_of_it() -> None:
    """With a tenth more of a time everything takes a tenth longer, nine times in ten, and more where requests queue."""
    prediction = predict(sim_cluster(profile()), workload(rate=12.0), TENTH)
    found = compare(prediction, prediction.expected, SLO)
    ttft, tpot = found.row("ttft", 90.0).predicted, found.row("tpot", 50.0).predicted
    assert ttft.high > 1.1 * ttft.value
    assert ttft.low < 0.9 * ttft.value
    assert tpot.low < 0.9 * tpot.value < 1.1 * tpot.value < tpot.high
    assert found.attainment.low <= found.attainment.value <= found.attainment.high


@pytest.mark.parametrize("swing", [0.0, 0.15])
def test_a_stated_interval_covers_nine_runs_in_ten_of_a_cluster_that_is_as_the_load_had_it(swing: float) -> None:
    """Each run's steps are so much longer or shorter than on average, as those of the load were."""
    rng, requests = np.random.default_rng(3), workload(50, rate=6.0)
    cluster, load = sim_cluster(profile()), load_of(rng, swing)
    doubt = Doubt(load=load)
    prediction = predict(cluster, requests, doubt)
    inside: list[bool] = []
    for seed in range(60):
        prefill, decode = np.exp(swing * rng.standard_normal(2))
        way = Way(prefill=float(prefill), decode=float(decode), seed=seed)
        found = compare(prediction, in_way(cluster, requests, doubt, load.runs, way), SLO)
        inside += [row.is_inside for row in found.rows if row.metric != "e2e"]
    assert np.mean(inside) >= 0.8
    assert (
        found.row("tpot", 50.0).predicted.high < (1.25 if not swing else 1.6) * found.row("tpot", 50.0).predicted.value
    )


def load_of(rng: np.random.Generator, swing: float) -> UnderLoad:
    noise = tuple(np.exp(0.1 * rng.standard_normal(40)).tolist())
    phase = PhaseUnderLoad()
    runs = [
        LoadRun(
            at_s=60.0 * i,
            rate=6.0,
            tokens_per_s=200.0,
            busy=0.3,
            requests=100,
            prefill=float(p),
            decode=float(d),
            prefill_noise=noise,
            decode_noise=noise,
            client_s=(0.001, 0.002, 0.004),
            client_rest_s=(0.0, 0.0, -0.002),
        )
        for i, (p, d) in enumerate(np.exp(swing * rng.standard_normal((12, 2))))
    ]
    return UnderLoad(prefill=phase, decode=phase, gap_s=0.0, handoff_s=0.0, runs=tuple(runs))


def test_a_p99_may_be_off_by_stalls_that_no_other_percentile_shows() -> None:
    prediction = predict(sim_cluster(profile()), workload(), Doubt())
    stalled = Seen(**{name: 1.25 * getattr(prediction.expected, name) for name in ("ttft_s", "tpot_s", "e2e_s")})
    found = {(row.metric, row.percentile): row.is_inside for row in compare(prediction, stalled, SLO).rows}
    assert found == {(metric, p): p == 99.0 for metric in ("ttft", "tpot", "e2e") for p in (50.0, 90.0, 99.0)}


def test_what_lies_between_client_and_router_is_added() -> None:
    cluster, requests = sim_cluster(profile()), workload()
    near, far = predict(cluster, requests, Doubt()), predict(cluster, requests, Doubt(client_s=0.5))
    np.testing.assert_allclose(far.expected.ttft_s, near.expected.ttft_s + 0.5)
    np.testing.assert_allclose(far.expected.e2e_s, near.expected.e2e_s + 0.5)
    np.testing.assert_array_equal(far.expected.tpot_s, near.expected.tpot_s)


def test_whose_first_token_is_late_has_the_others_the_sooner() -> None:
    cluster, requests = sim_cluster(profile()), workload()
    run, way = load_of(np.random.default_rng(0), 0.0).runs[0], Way(prefill=1.0, decode=1.0, seed=1)
    late = replace(run, client_s=(0.001, 0.501), client_rest_s=(0.0, -0.5))
    seen = in_way(cluster, requests, Doubt(), [late], way)
    soon = in_way(cluster, requests, Doubt(), [replace(late, client_rest_s=(0.0, 0.0))], way)
    is_late = seen.ttft_s > 0.5
    np.testing.assert_array_equal(seen.ttft_s, soon.ttft_s)
    assert (seen.tpot_s[is_late] <= soon.tpot_s[is_late]).all()
    assert seen.tpot_s.min() == 0.0  # all of them came at once
    np.testing.assert_allclose(seen.tpot_s[~is_late], soon.tpot_s[~is_late])


def test_a_failed_request_is_infinitely_late() -> None:
    prediction = predict(sim_cluster(profile()), workload(), Doubt())
    columns = [np.where(np.arange(120) % 2 == 0, np.nan, column) for column in (prediction.expected.ttft_s,) * 3]
    found = compare(prediction, Seen(ttft_s=columns[0], tpot_s=columns[1], e2e_s=columns[2]), Slo())
    assert found.failed == 60
    assert found.measured_attainment == 0.5
    assert found.row("ttft", 90.0).measured == math.inf
    plain = found.to_json()
    json.dumps(plain, allow_nan=False)


def test_a_run_past_the_knee_says_so() -> None:
    prediction = predict(sim_cluster(profile(router={})), workload(rate=200.0), Doubt())
    assert compare(prediction, prediction.expected, SLO).is_past_knee
    assert not compare(prediction, prediction.expected, Slo()).is_past_knee


# The margin


def run(ttft: float, tpot: float = 0.0, **changed: object) -> MarginRun:
    values = {"date": "d", "source": "p.json", "rate": 1.0, "num_requests": 100, "attainment": 0.01}
    return MarginRun(ttft=ttft, tpot=tpot, **values | changed)  # type: ignore[arg-type]


def test_the_margin_is_what_nine_runs_in_ten_were_off_by_at_most_either_way() -> None:
    kept = Margin()
    for i in range(1, 11):
        kept = kept.with_run(run(-0.01 * i, 0.02 * i))
    assert kept.ttft == pytest.approx(0.09)
    assert kept.error == kept.tpot == pytest.approx(0.18)


def test_runs_past_the_knee_are_kept_and_do_not_count() -> None:
    kept = Margin().with_run(run(0.1)).with_run(run(5.0, counts=False))
    assert len(kept.runs) == 2
    assert kept.error == 0.1
    assert Margin().error == 0.0


def test_old_runs_are_forgotten() -> None:
    kept = Margin()
    for i in range(KEPT_RUNS + 5):
        kept = kept.with_run(run(float(i)))
    assert [kept.runs[0].ttft, len(kept.runs)] == [5.0, KEPT_RUNS]


def test_a_margin_comes_back_as_it_was_kept(tmp_path: Path) -> None:
    kept = Margin().with_run(run(0.1)).with_run(run(-0.2, counts=False))
    save_margin(kept, tmp_path / "m.json")
    assert load_margin(tmp_path / "m.json") == kept


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not JSON"),
        ("{}", "no kvrelay-margin"),
        ('{"format": "kvrelay-margin", "version": 1, "runs": 3}', "runs is 3"),
        ('{"format": "kvrelay-margin", "version": 1, "runs": [{"rate": "x"}]}', r"runs\[0\].rate is 'x'"),
    ],
)
def test_a_margin_that_cannot_be_used_is_said_with_its_key(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "m.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=says):
        load_margin(path)
    with pytest.raises(PlanError, match="cannot be read"):
        load_margin(tmp_path / "none.json")
