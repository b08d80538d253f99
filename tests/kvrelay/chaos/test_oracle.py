"""A verdict is wrong for nothing that may happen, and right about all that must not."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.chaos.load import Ended, Stream
from kvrelay.chaos.oracle import verdict
from kvrelay.chaos.templates import Template
from kvrelay.client.types import GenerateOptions

pytestmark = pytest.mark.unit

DUE = (7, 8, 9, 10)
ALLOWED = frozenset(("UNAVAILABLE",))


def stream(tokens: tuple[int, ...], ended: Ended, **changes: Any) -> Stream:
    client: Any = None
    template = Template([1, 2], GenerateOptions(), DUE)
    played = Stream(template=template, client=client, timeout_s=5.0, tokens=list(tokens), ended=ended)
    played.began_s, played.ended_s = 100.0, changes.pop("ended_s", 101.0)
    for name, value in changes.items():
        setattr(played, name, value)
    return played


@pytest.mark.parametrize(
    "played",
    [
        stream(DUE, Ended.DONE),
        stream(DUE[:2], Ended.LEFT),
        stream((), Ended.FAILED, code="UNAVAILABLE"),
        stream(DUE[:3], Ended.FAILED, code="UNAVAILABLE"),
    ],
)
def test_right_tokens_and_allowed_codes_are_right(played: Stream) -> None:
    assert verdict(played, ALLOWED) == ""


@pytest.mark.parametrize(
    ("played", "why"),
    [
        (stream((7, 8, 8), Ended.LEFT), "token 2 is 8, and 9 was due"),
        (stream((7, 8, 9, 10, 11), Ended.DONE), "token 4 is 11, and none was due"),
        (stream(DUE[:3], Ended.DONE), "it ended well with 3 tokens of 4"),
        (stream(DUE[:1], Ended.RUNS), "it hangs, with 1 tokens of 4"),
        (stream((), Ended.FAILED, code="INTERNAL"), "it ended INTERNAL, which no client should see: "),
        (stream((), Ended.FAILED, code="DEADLINE_EXCEEDED"), "it ended DEADLINE_EXCEEDED with 0 tokens of 4: "),
        (stream((), Ended.FAILED, code="UNAVAILABLE", ended_s=106.0), "it ended 1.00 s after its deadline"),
    ],
)
def test_everything_else_is_told(played: Stream, why: str) -> None:
    assert verdict(played, ALLOWED) == why


def test_a_streams_silence_counts_from_the_fault() -> None:
    played = stream(DUE, Ended.DONE, times_s=[101.0, 102.0, 106.0, 107.0], ended_s=107.0)
    assert played.silence_after(103.0) == 3.0
    assert played.silence_after(106.5) == 0.5
    assert played.silence_after(108.0) == 0.0
