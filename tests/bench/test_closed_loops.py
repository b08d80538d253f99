"""What bench.closed_loops fits and compares is what it says."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from bench.closed_loops.__main__ import Pair, disagreement
from bench.closed_loops.fitted import fitted
from bench.closed_loops.measured import WANTED, Case, Measured, band_of, read_measured
from bench.closed_loops.server import NONE, Overheads, holds, offer_of, simulated

pytestmark = pytest.mark.unit

CASE = Case(
    model="llama-3.1-8b",
    hardware="h100-sxm",
    tp=1,
    precision="fp16",
    concurrency=4,
    input_len=200,
    output_len=50,
)


def test_the_runs_are_all_read_with_units_and_lie_in_a_band() -> None:
    runs = read_measured()
    assert len(runs) == 523
    assert {band_of(run.case.concurrency) for run in runs} == {"1", "2 to 10", "25 to 50", "100 to 250"}
    for run in runs:
        answered_s = run.values["ttft_mean"] + (run.case.output_len - 1) * run.values["itl_mean"]
        assert run.values["throughput"] < 1.3 * run.case.concurrency * run.case.output_len / answered_s


def test_each_overhead_is_found_where_it_is_spent() -> None:
    plain = simulated(CASE, asked_each=2)
    stepped = simulated(CASE, Overheads(step_s=0.002), asked_each=2)
    streamed = simulated(CASE, Overheads(token_s=0.001), asked_each=2)
    fronted = simulated(CASE, Overheads(request_s=0.003), asked_each=2)
    assert stepped["itl_p95"] == pytest.approx(plain["itl_p95"] + 0.002, rel=0.01)
    assert streamed["itl_p95"] == pytest.approx(plain["itl_p95"] + 4 * 0.001, rel=0.01)
    assert fronted["itl_p95"] == pytest.approx(plain["itl_p95"], rel=0.1)
    assert fronted["ttft_p95"] >= plain["ttft_mean"] + 0.003
    alone = replace(CASE, concurrency=1)
    waits_s = simulated(alone, Overheads(request_s=0.003))["ttft_mean"] - simulated(alone)["ttft_mean"]
    assert waits_s == pytest.approx(0.003)


def test_factors_of_the_latency_model_are_of_their_part_alone() -> None:
    alone = replace(CASE, concurrency=1)
    plain, doubled = simulated(alone), simulated(alone, Overheads(prefill=2.0))
    assert doubled["ttft_mean"] == pytest.approx(2 * plain["ttft_mean"] - offer_of(*CASE.setting).step_overhead_s)
    assert doubled["itl_mean"] == pytest.approx(plain["itl_mean"])
    line = offer_of(*CASE.setting).latency.decode_line(1, 225)
    far = simulated(alone, Overheads(attention=101.0))
    assert far["itl_mean"] - plain["itl_mean"] == pytest.approx(100 * 225 * line.per_token_s, rel=0.01)


def fitted_again(given: Overheads, keys: tuple[str, ...], *clients: int) -> Overheads:
    cases = [replace(CASE, concurrency=each) for each in clients]
    return fitted([Measured(case=case, values=simulated(case, given, asked_each=8)) for case in cases], keys)


def test_what_was_simulated_with_is_fitted_again() -> None:
    """A front's share is found where prompts come alone: else it moves them from one step to another."""
    given = Overheads(step_s=0.001, token_s=6e-5)
    found = fitted_again(given, ("step_s", "token_s"), 1, 4, 16, 64)
    assert found.step_s == pytest.approx(given.step_s, rel=0.1)
    assert found.token_s == pytest.approx(given.token_s, rel=0.1)
    assert (found.request_s, found.prefill, found.attention) == (0.0, NONE.prefill, NONE.attention)
    alone = fitted_again(Overheads(request_s=0.004), ("request_s",), 1)
    assert alone.request_s == pytest.approx(0.004, rel=0.02)


def test_fp8_has_twice_the_kv_and_a_row_beyond_it_is_known() -> None:
    fp16, fp8 = (offer_of("llama-3.1-8b", "h100-sxm", precision, 1).kv_tokens for precision in ("fp16", "fp8"))
    assert 2 * fp16 < fp8 < 2.5 * fp16
    many = replace(CASE, concurrency=100, input_len=7000, output_len=1000)
    assert not holds(many)
    assert holds(replace(many, precision="fp8", concurrency=50))


def test_runs_disagree_by_what_no_prediction_explains() -> None:
    """Of what runs that are alike have in common nothing is left; n of them count as n - 1."""

    def pair(output_len: int, measured: float, predicted: float) -> Pair:
        run = Measured(case=replace(CASE, output_len=output_len), values=dict.fromkeys(WANTED, measured))
        return Pair(run=run, predicted=dict.fromkeys(WANTED, predicted))

    answers = [pair(50, 1.0, 2.0), pair(100, 1.1, 2.2), pair(200, 1.3, 2.6)]  # all off by twice
    off = disagreement(answers)
    assert off["fitted"] == {"runs": 3, **dict.fromkeys(WANTED, 0.0)}
    assert off["repeated"]["runs"] == off["left out"]["runs"] == 0
    again = disagreement([*answers, pair(50, 1.21, 2.0)])["repeated"]
    assert again["runs"] == 2
    assert again["ttft_mean"] == pytest.approx(math.log(1.21) / 2 * 2**0.5, abs=1e-3)
