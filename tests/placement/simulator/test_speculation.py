"""A simulated worker that guesses ahead: tokens of a step, how many guesses there are, and that no other notices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from decode_worker.options import DecodeOptions
from mixed_worker.options import MixedOptions
from placement.latency.base import DecodeLine
from placement.latency.speculation import Speculation
from placement.simulator.cluster import Drain, Loss, SimWorker
from placement.simulator.outcome import Outcome
from placement.simulator.simulate import simulate
from placement.workload.requests import Workload
from tests.placement.simulator.test_simulate import Plain, cluster, play, requests, same, workers

pytestmark = pytest.mark.unit


@dataclass(frozen=True)
class ByRow(Plain):
    """10 ms a step, and row_s for each row that decodes."""

    row_s: float = 0.0
    step_s: float = 0.01

    def decode_line(self, batch_size: int, context_tokens: int) -> DecodeLine:
        return DecodeLine(self.step_s + self.row_s * batch_size, 0.0)


def guessing(role: str, count: int = 1, *, row_s: float = 0.0, most: int = 4, **given: Any) -> list[SimWorker]:
    """`given`: of the speculation."""
    policy = policy_of(role, most)
    speculation = Speculation(num_tokens=most, **{"acceptance": 0.7, **given})
    made = workers(role, count, latency=ByRow(row_s=row_s), policy=policy, num_pages=2000)
    return [replace(worker, speculation=speculation) for worker in made]


def policy_of(role: str, most: int) -> DecodeOptions:
    kind = DecodeOptions if role == "decode" else MixedOptions
    return kind(max_batch_size=512, num_speculative_tokens=most)


def at_once(count: int, output_len: int) -> Workload:
    return Workload(arrival_s=np.zeros(count), prompt_len=np.full(count, 20), output_len=np.full(count, output_len))


def decode_s(outcome: Outcome) -> float:
    return float(outcome.phases["decode"].mean())


@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("most", [1, 3, 6])
def test_tokens_of_a_step_are_as_many_as_leviathan_says(acceptance: float, most: int) -> None:
    """Rows cost next to nothing, so that all guesses are run: after the trials, k in every step."""
    setup = cluster(workers("prefill"), guessing("decode", most=most, acceptance=acceptance, row_s=1e-9))
    _, outcome = play(setup, at_once(1, 8000))
    tokens_per_step = 8000 * 0.01 / decode_s(outcome)
    expected = (1 - acceptance ** (most + 1)) / (1 - acceptance)
    assert tokens_per_step == pytest.approx(expected, rel=0.06)


@pytest.mark.parametrize("role", ["decode", "mixed"])
def test_a_guess_that_is_never_right_costs_rows_and_one_that_always_is_saves_steps(role: str) -> None:
    setup = cluster(workers("prefill"), guessing(role, row_s=1e-9, acceptance=1.0))
    plain, workload = replace(setup, workers=tuple(without(w) for w in setup.workers)), at_once(1, 5000)
    right, none = decode_s(simulate(setup, workload)), decode_s(simulate(plain, workload))
    assert none / right == pytest.approx(5, rel=0.1)
    wrong = [replace(w, speculation=w.speculation and replace(w.speculation, acceptance=0.0)) for w in setup.workers]
    assert none <= decode_s(simulate(replace(setup, workers=tuple(wrong)), workload)) < 1.01 * none


def without(worker: SimWorker) -> SimWorker:
    return replace(worker, speculation=None)


def drafted(batch: int, **given: Any) -> float:
    """Guesses a token."""
    outcome = simulate(cluster(workers("prefill"), guessing("decode", **given)), at_once(batch, 400))
    return outcome.counters["drafted_tokens"] / (batch * 400)


def test_a_large_batch_guesses_less_where_rows_cost() -> None:
    """A row takes 0.3 ms and a step 10: of few requests a guess saves a share of the 10, of many it costs its row."""
    few, many = (drafted(batch, row_s=3e-4, acceptance=0.6) for batch in (1, 60))
    assert few > 0.5
    assert many < 0.3 * few
    assert drafted(60, row_s=1e-9, acceptance=0.6) > 0.9, "and where they do not, it guesses on"


def test_a_draft_model_takes_time_of_its_own_and_reads_prompts() -> None:
    """1 ms a pass: four guesses add 4 ms to a step of 10 ms."""
    slow = ByRow(step_s=0.001)
    workload = at_once(1, 2000)
    looked_up, by_model, by_heads = (
        decode_s(simulate(cluster(workers("prefill"), guessing("decode", row_s=1e-9, acceptance=0.95, **of)), workload))
        for of in ({}, {"draft": slow}, {"draft": slow, "reads": False})
    )
    assert by_model / looked_up == pytest.approx(1.4, rel=0.05)
    assert by_heads == pytest.approx(by_model, rel=0.05)
    dear = drafted(1, row_s=1e-9, draft=ByRow(step_s=0.009))
    assert dear < 0.2, "a pass that takes as long as a step is not worth its guess"


@pytest.mark.parametrize("num_pages", [2000, 80])
@pytest.mark.parametrize("draft", [None, ByRow(step_s=0.0005)], ids=["looked up", "model"])
def test_with_few_pages_losses_and_moves_nothing_is_left_behind(num_pages: int, draft: ByRow | None) -> None:
    pools = [guessing(role, 2, row_s=1e-5, draft=draft) for role in ("decode", "mixed")]
    pools = [[replace(worker, num_pages=num_pages) for worker in pool] for pool in pools]
    trouble = {"losses": (Loss(worker="decode-0", at_s=3.0, back_s=5.0),), "drains": (Drain(worker="mixed-0", at_s=6),)}
    setup = cluster(workers("prefill"), *pools, **trouble)
    workload = requests(300, rate=20)
    _, outcome = play(setup, workload)
    assert outcome.served == len(workload)
    assert outcome.counters["moved"] > 0
    assert 0 < outcome.counters["accepted_tokens"] < outcome.counters["drafted_tokens"]
    assert same(outcome, simulate(setup, workload))


def test_what_guesses_nothing_is_as_it_was() -> None:
    """A policy with guesses of which nobody says how often they are right; and one without that could be told."""
    workload = requests(200, rate=15)
    for role in ("decode", "mixed"):
        pools = [workers("prefill"), guessing(role, 2)]
        mute = [[without(worker) for worker in pool] for pool in pools]
        off = [replace(worker, policy=policy_of(role, 0)) for worker in pools[1]]
        plain = [without(worker) for worker in off]
        outcomes = [simulate(cluster(pools[0], made), workload) for made in (mute[1], off, plain)]
        assert same(outcomes[0], outcomes[1])
        assert same(outcomes[0], outcomes[2])
        assert outcomes[0].counters == outcomes[1].counters == outcomes[2].counters
        assert "drafted_tokens" not in outcomes[0].counters
