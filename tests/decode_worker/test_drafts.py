"""Prompt lookup guesses what stood there before, and as many guesses are run as pay for themselves."""

from __future__ import annotations

import random
from functools import partial

import pytest

from decode_worker.batches import DecodeBatch, DecodeEntry
from decode_worker.drafts import CANDIDATES, TRIALS, WINDOW, Drafts, PromptLookup
from decode_worker.options import DecodeOptions
from engine.types import Draft, SampledToken, SampleSpec, SamplingParams
from kvrelay.v1 import worker_pb2 as pb
from worker.requests import HeldRequest
from worker.steps.costs import StepCosts

pytestmark = pytest.mark.unit

EOS = 1
FREE = StepCosts(fixed_s=5e-3, prompt_token_s=0.0, request_s=1e-4, context_token_s=0.0)
DEAR = StepCosts(fixed_s=0.0, prompt_token_s=1e-3, request_s=1e-3, context_token_s=0.0)


def request(name: str, tokens: list[int], **params: object) -> HeldRequest:
    state = pb.RequestState(request_id=name, prompt_ids=tokens)
    return HeldRequest(state=state, params=SamplingParams(**{"max_tokens": 100, **params}), tokens=list(tokens))  # type: ignore[arg-type]


def drafts(costs: StepCosts | None = FREE, tokens: int = 4, *, trials: int = 0) -> Drafts:
    made = Drafts(DecodeOptions(num_speculative_tokens=tokens), lambda: costs, [EOS])
    made._num_run = TRIALS - trials
    return made


def begin(made: Drafts, wanted: tuple[tuple[str, int], ...]) -> None:
    entries = tuple(DecodeEntry(request_id=name, position=0, pages=(), drafted=count) for name, count in wanted)
    made.begin(DecodeBatch(entries=entries, joined=(), preempted=()))


def drawn(name: str, *token_ids: int) -> list[SampledToken]:
    return [SampledToken(request_id=name, token_id=token_id) for token_id in token_ids]


@pytest.mark.parametrize(
    ("tokens", "guess"),
    [
        ([1, 2, 3, 4, 9, 1, 2], [3, 4, 9]),
        ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2]),  # the latest of those that have as much in common
        ([7, 1, 2, 3, 5, 1, 2, 4, 7, 1, 2], [3, 5, 1]),  # the one that has more
        ([5, 5, 5], [5, 5, 5]),
        ([8, 6, 7, 6, 7], [6, 7, 6]),  # beyond the end, what repeats itself
        ([1, 2, 3, 4], []),
        ([1], []),
        ([], []),
    ],
)
def test_what_followed_before_is_guessed(tokens: list[int], guess: list[int]) -> None:
    assert PromptLookup(tokens, least=2, most=4).guess(3) == guess


def test_tokens_that_come_are_looked_through_as_well() -> None:
    rng = random.Random(5)
    tokens = [rng.randrange(3) for _ in range(30)]
    followed = PromptLookup(tokens, least=2, most=5)
    for _ in range(300):
        assert followed.guess(6) == PromptLookup(list(tokens), least=2, most=5).guess(6)
        tokens.append(rng.randrange(3))


def test_of_a_long_prompt_only_the_end_is_looked_through() -> None:
    unique = list(range(100, 100 + WINDOW))
    assert PromptLookup([1, 2, 3, *unique, 1, 2], least=2, most=4).guess(2) == []
    assert PromptLookup([1, 2, 3, *unique[:-9], 1, 2], least=2, most=4).guess(2) == [3, 100]


def test_only_so_many_places_are_compared() -> None:
    tokens = [7, 1, 2, 9, *[8, 1, 2, 6] * CANDIDATES, 7, 1, 2]
    assert PromptLookup(tokens, least=2, most=4).guess(1) == [6], "the place with more in common is too far back"


def test_guesses_that_cost_nothing_are_all_run_and_stand_as_far_as_they_are_drawn() -> None:
    made = drafts()
    one, new = request("one", [3, 4, 5, 6, 7, 3, 4]), request("new", [3, 4, 5])
    wanted = made.wanted([one, new])
    assert wanted == (("one", 4),)
    begin(made, (("one", 3),))
    assert list(made.of("one")) == [5, 6, 7]
    assert list(made.of("new")) == []
    counted, kept = made.end([*drawn("one", 5, 6, 9, 9), *drawn("new", 2)])
    assert [(token.request_id, token.token_id) for token in counted] == [("one", 5), ("one", 6), ("one", 9), ("new", 2)]
    assert kept == {"one": (3, 3)}


def test_all_that_were_run_may_be_right_and_one_that_was_not_run_ends_nothing() -> None:
    made = drafts()
    one = request("one", [3, 4, 5, 6, 7, 3, 4])
    made.wanted([one])
    begin(made, (("one", 2),))
    counted, kept = made.end(drawn("one", 5, 6, 7))
    assert [token.token_id for token in counted] == [5, 6, 7]
    assert kept == {"one": (2, 3)}


def test_of_one_whose_tokens_did_not_come_the_first_counts() -> None:
    made = drafts()
    made.wanted([request("one", [3, 4, 5, 3, 4])])
    begin(made, (("one", 2),))
    made.forget("one")
    assert made.end([]) == ([], {"one": (0, 1)})


def test_nothing_is_guessed_beyond_the_end_of_the_answer() -> None:
    repeated = [3, 4, 5, 6, EOS, 3, 4]
    assert drafts().wanted([request("one", repeated)]) == (("one", 2),)
    assert drafts().wanted([request("one", repeated, ignore_eos=True)]) == (("one", 4),)
    assert drafts().wanted([request("one", repeated, stop_token_ids=(6,))]) == (("one", 1),)
    assert drafts().wanted([request("one", repeated, max_tokens=2)]) == (("one", 1),), "the step draws one more"
    assert drafts().wanted([request("one", repeated, max_tokens=1)]) == ()


def test_a_guess_that_costs_as_much_as_a_token_is_run_only_where_it_is_nearly_always_right() -> None:
    """A step's time is that of its rows: a guess wins nothing, and loses where it is wrong."""
    made = drafts(DEAR)
    loop = request("loop", [3, 4, 5, 6] * 8)
    for _ in range(3):
        assert made.wanted([loop]) == ()
        made.begin(DecodeBatch(entries=(), joined=(), preempted=()))
        made.end(drawn("loop", 3))


def test_a_batch_gives_its_rows_to_those_whose_guesses_have_come_true() -> None:
    """Also of guesses that were not run it is seen whether they were right."""
    costs = StepCosts(fixed_s=1e-3, prompt_token_s=6e-4, request_s=6e-4, context_token_s=0.0)
    made = drafts(costs, 2)
    requests = [request(name, [3, 4, 5, 6] * 8) for name in ("right", "wrong")]
    for _ in range(30):
        made.wanted(requests)
        made.begin(DecodeBatch(entries=(), joined=(), preempted=()))
        made.end([*drawn("right", 3), *drawn("wrong", 9)])
    assert dict(made.wanted(requests)) == {"right": 2}


def test_before_more_are_run_those_of_one_request_are_tried() -> None:
    requests = [request(name, [3, 4, 5, 6] * 3) for name in "abc"]
    assert drafts(None).wanted(requests) == (), "nothing is known of steps"
    made = drafts(trials=1)
    assert made.wanted(requests) == (("a", 4),)
    begin(made, (("a", 4),))
    assert {name for name, _ in made.wanted(requests)} == {"a", "b", "c"}


def test_of_a_draft_model_that_request_is_tried_which_it_has_read() -> None:
    requests = [request(name, [3, 4, 5]) for name in "abc"]
    states = {
        each.id: Draft(tokens=each.tokens, spec=lambda at, guesses: SampleSpec(params=SamplingParams(), position=at))
        for each in requests
    }
    made = Drafts(DecodeOptions(num_speculative_tokens=4), lambda: FREE, make_draft=lambda name: states[name])
    assert made.wanted(requests) == (("a", 4),)
    states["b"].num_read = 2
    assert made.wanted(requests) == (("b", 4),)


def test_what_a_draft_model_guessed_before_says_nothing_of_a_step_without_guesses() -> None:
    state = Draft(tokens=[3, 4, 5], spec=lambda at, guesses: SampleSpec(params=SamplingParams(), position=at))
    made = Drafts(DecodeOptions(num_speculative_tokens=4), lambda: FREE, make_draft=lambda name: state)
    one = request("one", [3, 4, 5])
    begin(made, made.wanted([one]))
    assert made.asked_of("one") is state
    state.guesses = [6, 7]
    assert made.end(drawn("one", 6, 7, 8))[1] == {"one": (2, 3)}
    chance = made._guesses["one"].chance
    made.wanted([one])
    begin(made, ())
    made.end(drawn("one", 9))
    assert made._guesses["one"].chance == chance


def test_a_pass_of_a_draft_model_is_made_for_as_many_as_pay_for_it() -> None:
    states = {
        name: Draft(tokens=[], spec=lambda at, guesses: SampleSpec(params=SamplingParams(), position=at))
        for name in "abc"
    }
    requests = [request(name, [3, 4, 5]) for name in "abc"]
    for pass_s, wanted in ((1e-4, {"a": 4, "b": 4, "c": 4}), (4e-3, {}), (1.6e-3, {"a": 1, "b": 1, "c": 1})):
        made = Drafts(
            DecodeOptions(num_speculative_tokens=4),
            lambda: FREE,
            make_draft=lambda name: states[name],
            pass_s=partial(float, pass_s),
        )
        made._num_run = TRIALS
        assert dict(made.wanted(requests)) == wanted
