"""Ways lie about what runs like the case took, as widely as runs swing, and no more widely than that."""

from __future__ import annotations

import numpy as np
import pytest

from placement.checks.ways import DRIFT, TOGETHER, Way, way_latency, ways_of
from placement.latency.profile_latency import ProfileLatency
from placement.latency.under_load import LoadRun, PhaseUnderLoad, UnderLoad, Work
from placement.workload.requests import Floats
from tests.placement.latency.test_profile import profile

pytestmark = pytest.mark.unit


def run(busy: float, prefill: float, decode: float) -> LoadRun:
    return LoadRun(
        at_s=0.0,
        rate=10 * busy,
        tokens_per_s=500 * busy,
        busy=busy,
        requests=50,
        prefill=prefill,
        decode=decode,
        prefill_noise=(1.0,),
        decode_noise=(1.0,),
        client_s=(0.001,),
        client_rest_s=(0.0,),
    )


def load(*runs: LoadRun) -> UnderLoad:
    phase = PhaseUnderLoad()
    return UnderLoad(prefill=phase, decode=phase, gap_s=0.0, handoff_s=0.0, runs=runs)


def drawn(served: UnderLoad, busy: float, error: float = 0.0) -> Floats:
    """Logarithms of the factors."""
    ways = ways_of(served, Work(busy=busy, tokens_per_s=500 * busy), error, error, 100, seed=1)
    return np.log([(way.prefill, way.decode) for way in ways])


def test_the_tables_error_is_nine_in_ten_of_the_ways() -> None:
    ways = ways_of(None, Work(busy=0.5, tokens_per_s=9.0), 0.1, 0.2, 100, seed=1)
    assert np.mean([abs(np.log(way.prefill)) <= np.log(1.1) for way in ways]) == pytest.approx(0.9, abs=0.01)
    assert np.mean([abs(np.log(way.decode)) <= np.log(1.2) for way in ways]) == pytest.approx(0.9, abs=0.01)
    assert len({way.seed for way in ways}) == 100


def test_ways_lie_where_the_runs_with_as_much_to_do_lay() -> None:
    """A rate at which the fit is wrong is known to be."""
    served = load(*(run(busy, (busy / 0.4) ** 0.3, (busy / 0.4) ** -0.2) for busy in (0.2, 0.4, 0.8) for _ in range(4)))
    for busy, as_at in ((0.2, 0.2), (0.5, 0.5), (0.01, 0.2), (2.0, 0.8)):  # not beyond what was served
        wanted = np.log(as_at / 0.4) * np.array([0.3, -0.2])
        assert drawn(served, busy).mean(axis=0) == pytest.approx(wanted, abs=1e-6)


def test_ways_swing_as_the_runs_did_and_both_phases_together_and_machines_drift() -> None:
    rng = np.random.default_rng(0)
    busy, swings = rng.uniform(0.4, 0.6, 48), rng.permutation(np.linspace(-2, 2, 48))
    served = load(*(run(b, t, t) for b, t in zip(busy.tolist(), np.exp(0.1 * swings).tolist(), strict=True)))
    logs = drawn(served, 0.5)
    swing = np.std(np.log([each.prefill for each in served.runs]), ddof=1)
    assert np.asarray(np.corrcoef(logs.T))[0, 1] == pytest.approx(
        (swing**2 + TOGETHER * DRIFT**2) / (swing**2 + DRIFT**2), abs=0.06
    )
    assert np.hypot(swing, DRIFT) < logs.std() < 1.3 * np.hypot(swing, DRIFT)  # of a swing that is known from 48


def test_what_lies_before_the_workers_drifts_with_them() -> None:
    ways = ways_of(load(run(0.5, 1.2, 0.9)), Work(busy=0.5, tokens_per_s=250.0), 0.0, 0.0, 100, seed=1)
    off = [way.prefill / 1.2 * (way.decode / 0.9) for way in ways]
    assert [way.client**2 for way in ways] == pytest.approx(off)
    assert {way.client for way in ways_of(None, Work(busy=0.5, tokens_per_s=9.0), 0.1, 0.2, 10, seed=1)} == {1.0}


def test_another_load_is_as_sure_as_each_kind_was_by_the_others() -> None:
    """Three kinds of load, of which one took longer than the others would have said."""
    kinds = ((0.2, 0.8), (0.4, 1.2), (0.8, 0.8))
    apart = load(*(run(busy, times, 1.0) for busy, times in kinds for _ in range(4)))
    prefill, decode = drawn(apart, 0.5).std(axis=0)
    assert prefill > 2.5 * DRIFT
    assert decode == pytest.approx(DRIFT, rel=0.1)


def test_one_run_says_where_the_ways_lie_and_machines_drift_from_there() -> None:
    logs = drawn(load(run(0.5, 1.2, 0.9)), 0.5)
    assert logs.mean(axis=0) == pytest.approx(np.log([1.2, 0.9]))
    assert logs.std(axis=0) == pytest.approx([DRIFT, DRIFT], rel=0.1)


def test_steps_of_a_way_are_longer_and_differ_by_its_seed() -> None:
    model, way = ProfileLatency(profile()), Way(prefill=1.5, decode=2.0, seed=3)
    made = [way_latency(model, way, (0.9, 1.1)) for _ in range(2)]
    steps = [[each.prefill_s([(100, 0)]) / model.prefill_s([(100, 0)]) for _ in range(20)] for each in made]
    assert steps[0] == steps[1]
    assert {round(step, 9) for step in steps[0]} == {1.35, 1.65}
    assert made[0].decode_line(8, 400).step_s == pytest.approx(2 * model.decode_line(8, 400).step_s)
    assert made[0].transfer_s(100) == pytest.approx(2 * model.transfer_s(100))
    assert way_latency(model, way, ()).prefill_s([(100, 0)]) == pytest.approx(1.5 * model.prefill_s([(100, 0)]))
