"""Tokens that wait for slow clients: counted until they are read; somebody's request ends when they are too many."""

from __future__ import annotations

import pytest

from cluster.router.live.requests import ChoiceUpdate, NewRequest, Submission
from cluster.router.live.turns import Turns
from cluster.router.live.unread import TOKEN_BYTES, Unread, token_bytes
from kvrelay.v1 import generate_pb2

pytestmark = pytest.mark.unit


def submission(name: str, **sampling: int) -> Submission:
    params = generate_pb2.SamplingParams(**sampling)  # type: ignore[arg-type]
    return Submission.of(NewRequest(id=name, prompt_ids=[1], sampling=[params], arrived_s=0.0), "router", 1, Turns())


def tokens(count: int) -> list[ChoiceUpdate]:
    return [ChoiceUpdate(0, [5]) for _ in range(count)]


def test_a_request_with_too_much_ends() -> None:
    unread = Unread(10 * TOKEN_BYTES, 100 * TOKEN_BYTES)
    slow = submission("slow")
    assert unread.put(slow, 10) is None
    unread.release(slow, tokens(4))
    assert unread.put(slow, 4) is None
    assert unread.put(slow, 1) == (slow, f"{11 * TOKEN_BYTES} bytes of its tokens were not read, of {10 * TOKEN_BYTES}")


def test_of_all_the_one_with_most_ends() -> None:
    unread = Unread(100 * TOKEN_BYTES, 10 * TOKEN_BYTES)
    slow, quick = submission("slow"), submission("quick")
    assert unread.put(slow, 9) is None
    too_much = unread.put(quick, 2)
    assert too_much is not None
    assert too_much[0] is slow
    unread.forget(slow)
    assert unread.total_bytes == 2 * TOKEN_BYTES
    unread.release(slow, tokens(9))  # was on its way when it was given up
    unread.release(quick, tokens(2))
    assert unread.total_bytes == 0


def test_log_probabilities_count() -> None:
    assert token_bytes(submission("all", logprobs=20)) > 10 * token_bytes(submission("none"))
