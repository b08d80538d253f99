"""StepTimes: what a worker's steps take is found from those it has run, and what it has not done lately is not lost."""

from __future__ import annotations

import random

import pytest

from worker.steps.costs import StepCosts, share_after
from worker.steps.times import StepTimes

pytestmark = pytest.mark.unit

TRUE = StepCosts(fixed_s=4e-3, prompt_token_s=2e-5, request_s=1e-5, context_token_s=4e-8, both_s=1e-3)


def noted(times: StepTimes, costs: StepCosts, rng: random.Random, *, prompts: bool, decodes: bool) -> None:
    prompt_tokens = rng.randrange(1, 2048) if prompts else 0
    requests = rng.randrange(1, 128) if decodes else 0
    context = requests * rng.randrange(100, 3000)
    noise = rng.uniform(0.95, 1.05) * (50.0 if rng.random() < 0.01 else 1.0)  # the machine stands still now and then
    times.note(
        prompt_tokens, requests, context, costs.step_s(prompt_tokens, requests, context, prompts and decodes) * noise
    )


def is_like(found: StepCosts | None, wanted: StepCosts, within: float) -> bool:
    steps = ((0, 64, 64_000, 0), (512, 64, 64_000, 1), (2048, 0, 0, 0), (128, 8, 8_000, 1))
    return found is not None and all(found.step_s(*s) == pytest.approx(wanted.step_s(*s), rel=within) for s in steps)


@pytest.mark.parametrize("seed", range(5))
def test_costs_are_found_whatever_the_machine_does_now_and_then(seed: int) -> None:
    rng, times = random.Random(seed), StepTimes()
    for _ in range(600):
        noted(times, TRUE, rng, prompts=rng.random() < 0.5, decodes=True)
        noted(times, TRUE, rng, prompts=True, decodes=False)
    assert is_like(times.costs(), TRUE, within=0.1), times.costs()


def test_nothing_is_told_of_too_few_steps_and_no_cost_is_below_0() -> None:
    times = StepTimes()
    assert times.costs() is None
    for size in range(1, 9):
        times.note(0, size, 100 * size, 0.01 - 1e-4 * size)  # faster with more requests
    costs = times.costs()
    assert costs is not None
    assert min(costs.fixed_s, costs.prompt_token_s, costs.request_s, costs.context_token_s) >= 0
    times.note(1, 0, 0, 0.0)  # a clock that stands still
    assert times.costs() == costs


def test_what_a_phase_costs_is_not_told_before_it_was_computed() -> None:
    times, rng = StepTimes(), random.Random(3)
    for _ in range(20):
        noted(times, TRUE, rng, prompts=False, decodes=True)
    assert times.costs(("decode",)) is not None
    assert times.costs(("prefill", "decode")) is None
    noted(times, TRUE, rng, prompts=True, decodes=False)
    assert times.costs(("prefill", "decode")) is not None


def test_a_machine_that_has_become_slower_is_known_soon() -> None:
    rng, times = random.Random(1), StepTimes()
    slower = StepCosts(**{name: 3 * getattr(TRUE, name) for name in TRUE.__dataclass_fields__})
    for costs, count in ((TRUE, 2000), (slower, 4000)):
        for _ in range(count):
            noted(times, costs, rng, prompts=rng.random() < 0.5, decodes=True)
    assert is_like(times.costs(), slower, within=0.1), times.costs()


def test_how_much_steps_differ_is_told_of_them_and_of_no_other_time() -> None:
    rng = random.Random(2)
    for share in (0.0, 0.05, 0.2):
        times = StepTimes()
        for size in [rng.randrange(1, 100) for _ in range(3000)]:
            times.note(0, size, 500 * size, TRUE.step_s(0, size, 500 * size, 0) * rng.uniform(1 - share, 1 + share))
        costs = times.costs()
        assert costs is not None
        assert costs.spread == pytest.approx(share / 3**0.5, rel=0.15, abs=1e-4)  # of what is even between two ends


def test_what_prompts_take_is_known_after_long_decoding() -> None:
    rng, times = random.Random(1), StepTimes()
    for prompts in (True, False):
        for _ in range(500 if prompts else 20_000):
            noted(times, TRUE, rng, prompts=prompts, decodes=True)
    assert is_like(times.costs(), TRUE, within=0.1), times.costs()


def test_the_share_of_prompts_is_the_same_step_by_step_and_many_at_once() -> None:
    times = StepTimes()
    for tokens in (512, 512, 0, 0, 0):
        times.note(tokens, 3, 300, 0.01)
        times.note(tokens, 0, 0, 0.01)  # nobody is held up by it
    assert times.prompt_share == pytest.approx(share_after(share_after(0.0, 512, 2), 0, 3))
    assert share_after(0.0, 512, 2000) == pytest.approx(512)


def test_guesses_cost_what_a_prompt_s_tokens_do_and_are_no_share_of_prompts() -> None:
    times = StepTimes()
    for guesses in (0, 4, 8) * 8:
        times.note(0, 4, 400, 5e-3 + 1e-4 * guesses, guesses)
    assert times.prompt_share == 0.0
    costs = times.costs(("decode",))
    assert costs is not None
    assert costs.prompt_token_s * 8 + costs.both_s == pytest.approx(8e-4, rel=0.05)
