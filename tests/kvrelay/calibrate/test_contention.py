"""What a live load is made to say: the interference and the swing that were put into it, and no others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from cluster.router.live.timeline import PHASES
from kvrelay.calibrate.calibration import CalibrationError, tables_of
from kvrelay.calibrate.contention import ServedRun, fit_under_load
from kvrelay.calibrate.correcting import check_measured, corrected_by
from kvrelay.calibrate.loading import BUSY, SHORTER, Rates, busy_share, turns_of
from kvrelay.calibrate.served_steps import courses_of
from kvrelay.client.types import EndedRequest
from placement.build.from_profile import sim_cluster
from placement.latency.base import DecodeLine, LatencyModel
from placement.latency.profile import MixedPoint, Profile, SlowdownPoint
from placement.latency.scaled import ScaledLatency
from placement.latency.under_load import KINDS, UnderLoad
from placement.simulator.cluster import SharedHost
from placement.simulator.outcome import Outcome
from placement.simulator.simulate import simulate
from placement.workload.requests import Workload
from tests.placement.latency.test_profile import profile as toy_profile

pytestmark = pytest.mark.unit

PROBED = (SlowdownPoint(batch_size=1, prefill=1.1, decode=1.05),)  # what twelve probes found of it
CLIENT_S = 0.02
FAIR = (1.0, 1.0, (1.0, 1.0))  # the tables are right


def profile() -> Profile:
    made = toy_profile(slowdown=PROBED)
    model = {"name": "a-model", "max_model_len": 1024}
    return replace(
        made, model=model, router={}, prefill_pool=replace(made.prefill_pool, options={"max_batch_tokens": 400})
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class More(ScaledLatency):
    """Each step takes a time more, whatever is in it."""

    more_s: float

    def prefill_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        return super(More, self).prefill_s(chunks) + self.more_s

    def decode_line(self, batch_size: int, context_tokens: int) -> DecodeLine:
        line = super(More, self).decode_line(batch_size, context_tokens)
        return replace(line, step_s=line.step_s + self.more_s)


def served(
    rate: float, prefill: float, decode: float, beside: tuple[float, float], seed: int, more_s: float = 0.0
) -> ServedRun:
    outcome = played(rate, prefill, decode, beside, seed, more_s)
    return ServedRun(
        at_s=60.0 * seed,
        rate=rate,
        courses=courses_of(ended(outcome)),
        first_token_s=[CLIENT_S, CLIENT_S - 1e-6] * 75,
        rest_s=[-0.001, 0.003] * 75,
        exposed_s=[0.004] * 150,
    )


def played(
    rate: float, prefill: float, decode: float, beside: tuple[float, float], seed: int, more_s: float = 0.0
) -> Outcome:
    """What a cluster serves whose steps take so many times what the tables say, `beside` more where both compute."""
    rng, cluster = np.random.default_rng(seed), sim_cluster(profile())

    def in_truth(model: LatencyModel) -> LatencyModel:
        return More(model=model, prefill=prefill, decode=decode, transfer=1.0, how="in truth", more_s=more_s)

    workers = tuple(replace(worker, latency=in_truth(worker.latency)) for worker in cluster.workers)
    hosts = (SharedHost(workers=tuple(w.name for w in workers), by_batch=((1, *beside),)),)
    requests = Workload(
        arrival_s=np.cumsum(rng.exponential(1 / rate, 150)),
        prompt_len=rng.integers(20, 390, 150),
        output_len=rng.integers(10, 60, 150),
    )
    return simulate(replace(cluster, workers=workers, hosts=hosts), requests)


def ended(outcome: Outcome) -> list[EndedRequest]:
    """As GetLoad has them, told at the end."""
    requests, end_s = outcome.workload, float(np.nanmax(outcome.finish_s))
    return [
        EndedRequest(
            age_s=end_s - float(requests.arrival_s[i]),
            prompt_tokens=int(requests.prompt_len[i]),
            cached_tokens=0,
            output_tokens=int(requests.output_len[i]),
            ttft_s=float(outcome.ttft_s[i]),
            tpot_s=float(outcome.tpot_s[i]),
            handoff_s=0.0,
            failed=False,
            before_first_s=tuple(float(outcome.phases[name][i]) for name in PHASES),
            after_first_s=(0.0,) * len(PHASES),
            prefill_worker="prefill-0",
            decode_worker="decode-0",
        )
        for i in range(len(outcome))
    ]


def fitted(runs: Sequence[ServedRun]) -> UnderLoad:
    found = fit_under_load(runs, tables_of(profile()))
    assert found is not None
    return found


def test_interference_is_found_apart_from_what_is_slower_anyway() -> None:
    """The probes had found a third of it."""
    load = fitted([served(rate, 1.2, 1.1, (1.3, 1.25), seed) for seed, rate in enumerate((3.0, 6.0, 9.0))])
    assert load.prefill.alone == pytest.approx(1.2, rel=0.02)
    assert load.prefill.beside == pytest.approx(1.2 * 1.3, rel=0.02)
    assert load.decode.alone == pytest.approx(1.1, rel=0.03)
    assert load.decode.beside == pytest.approx(1.1 * 1.25, rel=0.03)
    assert load.prefill.swing < 0.01
    assert load.decode.swing < 0.02
    assert load.handoff_s == pytest.approx(0.004 - profile().message_s)
    assert {run.rate for run in load.runs} == {3.0, 6.0, 9.0}
    assert np.median(load.runs[0].client_s) == pytest.approx(CLIENT_S - 2 * profile().message_s, abs=0.001)
    assert load.runs[0].client_rest_s == (0.003,) * 50 + (-0.001,) * 50  # of those whose first came late, below 0


def test_what_each_step_takes_more_is_found_apart_from_how_much_longer_it_takes() -> None:
    load = fitted([served(rate, 1.2, 1.1, (1.3, 1.25), seed, more_s=0.01) for seed, rate in enumerate((3.0, 5.0, 7.0))])
    for phase, times, beside in ((load.prefill, 1.2, 1.3), (load.decode, 1.1, 1.25)):
        assert phase.alone == pytest.approx(times, rel=0.03)
        assert phase.more_s == pytest.approx(0.01, rel=0.1)
        assert phase.beside / phase.alone == pytest.approx(beside, rel=0.03)


def test_steps_that_are_all_alike_take_longer_and_nothing_more() -> None:
    alike = [replace(c, prompt=200, prefill=(c.prefill[0], c.prefill[0] + 0.1)) for c in served(1.0, *FAIR, 1).courses]
    load = fitted([replace(served(1.0, *FAIR, 1), courses=alike)])
    assert load.prefill.more_s == pytest.approx(0.0, abs=1e-6)


def test_what_differs_between_runs_is_the_swing_and_not_the_bias() -> None:
    slower = (1.0, 1.2, 1.0, 1.2, 1.0, 1.2)
    load = fitted([served(6.0, times, times, (1.1, 1.1), seed) for seed, times in enumerate(slower)])
    assert load.prefill.swing == pytest.approx(np.std(np.log(slower), ddof=1), rel=0.1)
    assert load.prefill.bias == pytest.approx(load.prefill.swing / np.sqrt(6))
    ratios = [run.prefill for run in load.runs]
    assert ratios[1] / ratios[0] == pytest.approx(1.2, rel=0.02)
    assert np.log(ratios).mean() == pytest.approx(0.0, abs=1e-9)
    assert load.prefill.noise < 0.03  # the steps of one run were alike


def test_a_load_fitted_to_itself_predicts_it() -> None:
    runs = [served(rate, 1.2, 1.1, (1.3, 1.25), seed) for seed, rate in enumerate((3.0, 6.0, 9.0))]
    corrected = replace(profile(), load=fitted(runs))
    cluster = sim_cluster(corrected)
    again = fitted([served(6.0, 1.2, 1.1, (1.3, 1.25), 7)])
    assert again.prefill.beside == pytest.approx(corrected.load.prefill.beside, rel=0.03)  # type: ignore[union-attr]
    assert cluster.hosts[0].by_batch[0][1:] == pytest.approx((1.3, 1.25), rel=0.03)


def test_too_few_requests_say_nothing() -> None:
    run = served(3.0, 1.0, 1.0, (1.0, 1.0), 0)
    assert fit_under_load([replace(run, courses=run.courses[:4])], tables_of(profile())) is None
    assert fit_under_load([], tables_of(profile())) is None


def test_a_load_has_a_run_of_each_kind() -> None:
    assert len(BUSY) * len(SHORTER) == KINDS
    assert len(set(turns_of(KINDS))) == KINDS


def test_what_disturbs_a_minute_of_a_load_meets_all_lengths_and_rates_alike() -> None:
    """Else it would be taken for what those lengths cost."""
    turns = turns_of(27)
    for begin in range(0, len(turns), 3):
        lengths, busy = zip(*turns[begin : begin + 3], strict=True)
        assert sorted(lengths) == [0, 1, 2]
        assert sorted(busy) == sorted(BUSY)


def test_rates_follow_how_busy_prefill_was() -> None:
    """A worker that takes twice as long as the tables say is asked for half of what they say."""
    rates = Rates(profile(), (205, 35))
    guessed = rates.for_busy(0.25)
    assert 0 < guessed <= rates.for_busy(0.5) <= rates.for_busy(0.75)
    run = served(guessed, 2.0, 1.0, (1.0, 1.0), 1)
    assert busy_share(run) == pytest.approx(0.5, rel=0.3)
    rates.note(run)
    assert rates.for_busy(0.25) == pytest.approx(guessed * 0.25 / busy_share(run))


def test_a_profile_is_corrected_by_what_its_cluster_served_itself() -> None:
    """Two minutes of traffic at another speed than was measured; nothing was sent for it."""
    requests = ended(played(1.6, 1.3, 1.3, (1.0, 1.0), seed=1))
    corrected = corrected_by(profile(), requests)
    assert corrected.load is not None
    assert len(corrected.load.runs) == 2
    assert sum(run.requests for run in corrected.load.runs) == len(requests)
    assert corrected.load.prefill.alone == pytest.approx(1.3, rel=0.02)
    assert corrected.load.decode.alone == pytest.approx(1.3, rel=0.03)
    assert corrected.load.decode.swing < 0.02  # also of answers that one minute began and the next ended
    assert (corrected.prefill, corrected.decode) == (profile().prefill, profile().decode)


def test_a_profile_that_cannot_be_corrected_says_why() -> None:
    with pytest.raises(CalibrationError, match="too few requests"):
        corrected_by(profile(), ended(played(1.6, 1.0, 1.0, (1.0, 1.0), seed=1))[:3])
    mixed = MixedPoint(chunks=((8, 0),), seconds=1.0, batch_size=1, context_tokens=9)
    with pytest.raises(CalibrationError, match=r"p\.json is of a mixed worker"):
        corrected_by(replace(profile(), mixed=(mixed,)), [])


def test_a_profile_of_others_is_not_corrected() -> None:
    """By the load of another model, or of more workers, which would be taken for the machine."""
    known = replace(profile(), model={"name": "a-model", "fingerprint": "f1"})
    model: Any = SimpleNamespace(name="b-model", fingerprint="f1")
    workers = [SimpleNamespace(role=role) for role in ("prefill", "decode")]
    status: Any = SimpleNamespace(models=(), workers=workers)
    check_measured(known, model, status)
    for changed, told in (
        ({"models": ("a", "b")}, "this cluster serves a and b, and a profile is of one model"),
        ({"workers": [*workers, *workers[1:]]}, "p.json is of 1 decode workers, and this cluster has 2"),
    ):
        with pytest.raises(CalibrationError, match=told):
            check_measured(known, model, cast(Any, SimpleNamespace(**{**vars(status), **changed})))
    with pytest.raises(CalibrationError, match=r"p.json is of a-model \(f1\), and this cluster serves b-model \(f2\)"):
        check_measured(known, cast(Any, SimpleNamespace(name="b-model", fingerprint="f2")), status)
