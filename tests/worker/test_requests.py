"""read_request: what no worker could compute is refused before an engine sees it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from engine.types import InvalidRequest, ModelInfo
from kvrelay.v1 import generate_pb2
from kvrelay.v1 import worker_pb2 as pb
from worker.requests import HeldRequest, read_request

pytestmark = pytest.mark.unit

MODEL = ModelInfo(
    name="m",
    architecture="A",
    fingerprint="f",
    dtype="float32",
    vocab_size=100,
    max_model_len=32,
    eos_token_ids=(2,),
    num_layers=1,
    num_params=1,
    weight_bytes=1,
)
ENGINE: Any = SimpleNamespace(info=MODEL)


def state(prompt: list[int], output: list[int], **sampling: Any) -> pb.RequestState:
    params = generate_pb2.SamplingParams(**{"max_tokens": 4, **sampling})
    return pb.RequestState(request_id="a", prompt_ids=prompt, output_ids=output, sampling=params)


def test_a_request_is_read_with_the_tokens_it_has_so_far() -> None:
    params, tokens = read_request(state([5, 99], [7], temperature=0.7), MODEL)
    assert (params.temperature, params.max_tokens, tokens) == (0.7, 4, [5, 99, 7])


@pytest.mark.parametrize(
    ("request_state", "reason"),
    [
        (state([], []), "prompt_ids is empty; give a token or more"),
        (state([5, 100], []), "its tokens have id 100; the model's go from 0 to 99"),
        (state([5], [2**32 - 1]), "its tokens have id 4294967295; the model's go from 0 to 99"),
        (state([5], [1, 2, 3, 4]), "output_ids has 4 tokens; max_tokens is 4"),
        (state([5] * 29, []), "prompt and max_tokens are 33 tokens; the model takes 32"),
        (state([5], [], max_tokens=0), "max_tokens is 0; give a whole number of 1 or more"),
        (state([5], [], seed=-1), "seed is -1; give a whole number of 0 to 9223372036854775807"),
        (state([5], [], temperature=float("nan")), "temperature is nan; give a number from 0 to 100"),
        (state([5], [], stop_token_ids=[100]), "stop_token_ids has 100; the model's ids go from 0 to 99"),
        (
            state([5], [], bad_token_ids=[generate_pb2.TokenIds()]),
            "bad_token_ids has one of 0 tokens; give 1 to 256",
        ),
        (
            state([5], [], allowed_token_ids=[3, 4], bad_token_ids=[generate_pb2.TokenIds(ids=[i]) for i in (4, 3)]),
            "bad_token_ids has all of allowed_token_ids; leave one to draw",
        ),
    ],
)
def test_what_the_model_cannot_compute_is_refused(request_state: pb.RequestState, reason: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_request(request_state, MODEL)
    assert str(caught.value) == reason


def test_a_model_of_other_limits_takes_it() -> None:
    assert read_request(state([5] * 29, []), replace(MODEL, max_model_len=33))[1] == [5] * 29


def held(output: list[int], **sampling: Any) -> HeldRequest:
    request = state([5], output, max_tokens=9, **sampling)
    params, tokens = read_request(request, MODEL)
    return HeldRequest(state=request, params=params, tokens=tokens)


@pytest.mark.parametrize(
    ("output", "banned"),
    [([], (7,)), ([8], (7, 9)), ([8, 9], (7, 6)), ([5, 8, 9], (7, 6)), ([9], (7,)), ([8, 8], (7, 9))],
)
def test_a_bad_sequence_forbids_its_last_token_where_the_output_ends_with_the_rest(
    output: list[int], banned: tuple[int, ...]
) -> None:
    bad = [generate_pb2.TokenIds(ids=ids) for ids in ([7], [8, 9], [8, 9, 6])]
    request = held(output, bad_token_ids=bad)
    assert request.params.reads_output
    assert request.sample_spec(1 + len(output), ENGINE).banned_ids == banned


def test_a_bad_token_by_itself_waits_for_no_other() -> None:
    request = held([8], bad_token_ids=[generate_pb2.TokenIds(ids=[7])], min_tokens=2)
    assert not request.params.reads_output
    assert request.sample_spec(2, ENGINE).banned_ids == (7, 2)
