"""A form is read once, however many ask for it at the same moment; of different ones so many may wait."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cluster.front.structured import MAX_WAITING, Forms
from cluster.router.live.requests import RequestFailed
from engine.sampling import structured
from engine.types import InvalidRequest
from kvrelay.v1 import generate_pb2
from tests.forms import EOS_ID, MODEL, byte_tokenizer

pytestmark = pytest.mark.unit

INFO = generate_pb2.GetModelInfoResponse(vocab_size=MODEL.vocab_size, eos_token_ids=[EOS_ID])


async def ask(forms: Forms, *patterns: str) -> list[Any]:
    asked = (forms.grammar(generate_pb2.StructuredOutput(regex=pattern), INFO) for pattern in patterns)
    return await asyncio.gather(*asked, return_exceptions=True)


async def test_one_that_many_ask_for_at_once_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(structured, "check_grammar", lambda form, grammar, tokens: read.append(grammar))
    forms = Forms(byte_tokenizer())
    answers = await ask(forms, *["[ab]c"] * (3 * MAX_WAITING))
    assert read == list(dict.fromkeys(answers))
    assert await ask(forms, "[ab]c") == answers[:1]
    assert len(read) == 1
    forms.close()


async def test_one_that_cannot_be_read_is_refused_to_all_and_keeps_no_place() -> None:
    forms = Forms(byte_tokenizer())
    answers = await ask(forms, *["("] * MAX_WAITING)
    assert {type(answer) for answer in answers} == {InvalidRequest}
    assert isinstance((await ask(forms, *["[ab]c"] * MAX_WAITING))[-1], str)
    forms.close()


async def test_more_different_ones_than_may_wait_are_refused() -> None:
    forms = Forms(byte_tokenizer())
    answers = await ask(forms, *[f"a{{{i}}}" for i in range(1, MAX_WAITING + 2)])
    assert [type(answer) for answer in answers] == [str] * MAX_WAITING + [RequestFailed]
    forms.close()
