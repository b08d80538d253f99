"""The router's guess at what caches hold: the hashes that workers make, made once for a call, apart for each salt."""

from __future__ import annotations

import pytest

from cluster.router.live import prompt_hashes
from cluster.router.live.prompt_hashes import PromptHashes
from cluster.router.live.requests import NewRequest, Submission
from cluster.router.live.turns import Turns
from engine.pages.pool import page_hashes
from kvrelay.v1 import generate_pb2

pytestmark = pytest.mark.unit
PAGE = 4
PROMPT = list(range(10, 21))  # two pages and three tokens


@pytest.mark.parametrize("num_outputs", [0, 1, 2, 5, 6])
def test_they_are_those_of_prompt_and_output_together(num_outputs: int) -> None:
    output = list(range(num_outputs))
    assert PromptHashes(PROMPT, "").followed_by(output, PAGE) == page_hashes([*PROMPT, *output], PAGE)
    assert PromptHashes(PROMPT[:2], "").followed_by(output, PAGE) == page_hashes([*PROMPT[:2], *output], PAGE)


def test_another_salt_or_page_size_has_others() -> None:
    mine, yours = PromptHashes(PROMPT, "mine"), PromptHashes(PROMPT, "yours")
    assert not set(mine.followed_by([], PAGE)) & set(yours.followed_by([], PAGE))
    assert len(mine.followed_by([], 1)) == len(PROMPT)
    assert len(mine.followed_by([], PAGE)) == 2


def test_64_choices_of_a_long_prompt_hash_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def counting(tokens: list[int], *args: object, **kwargs: object) -> list[bytes]:
        hashed.append(len(tokens))
        return page_hashes(tokens, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(prompt_hashes, "page_hashes", counting)
    sampling = [generate_pb2.SamplingParams(max_tokens=9)] * 64
    new = NewRequest(id="a", prompt_ids=PROMPT, sampling=sampling, arrived_s=0.0)
    for live in Submission.of(new, "router", 1, Turns()).choices:
        live.hashes.followed_by(live.output_ids, PAGE)
        live.hashes.followed_by([1], PAGE)  # a later attempt computes what is new
    assert hashed == [11, *[4] * 64]
