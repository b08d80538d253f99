"""Limits of a key are told over HTTP as OpenAI's clients read them."""

from __future__ import annotations

import pytest

from cluster.front.allowance.options import Account
from tests.cluster.front.http.harness import http, words

pytestmark = pytest.mark.unit
TOKEN = "token-of-somebody"


async def test_answers_say_what_is_left_and_who_has_had_all_of_it_when_to_come_again() -> None:
    accounts = {"somebody": Account(requests_per_minute=2, tokens_per_minute=600)}
    async with http(codec=words(), token=TOKEN, accounts=accounts) as h:
        asked = {"prompt": "w5 w6 w7", "max_tokens": 5}
        first, second, third = [await h.raw.post("/v1/completions", json=asked) for _ in range(3)]
        assert (first.status_code, second.status_code, third.status_code) == (200, 200, 429)
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert first.headers["x-ratelimit-reset-requests"] in ("29s", "30s")
        assert first.headers["x-ratelimit-limit-tokens"] == "600"
        assert first.headers["x-ratelimit-remaining-tokens"] in ("592", "593")
        assert third.headers["x-ratelimit-remaining-requests"] == "0"
        assert int(third.headers["retry-after"]) >= 25
        error = third.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "resource_exhausted")
        assert "requests_per_minute of 'somebody' is 2" in error["message"]
        stranger = await h.raw.post("/v1/completions", json=asked, headers={"Authorization": "Bearer nobodys"})
        assert stranger.status_code == 401
        assert not [name for name in stranger.headers if name.startswith("x-ratelimit")]


async def test_calls_at_once_are_given_back_and_a_stream_says_its_limits() -> None:
    async with http(codec=words(), token=TOKEN, accounts={"default": Account(max_concurrent=1)}) as h:
        asked = {"prompt": "w5", "max_tokens": 2}
        answers = [await h.raw.post("/v1/completions", json={**asked, "stream": stream}) for stream in (True, False)]
        assert [answer.status_code for answer in answers] == [200, 200]
        refused = await h.raw.post("/v1/completions", json={**asked, "n": 2})
        assert refused.status_code == 429, refused.text


async def test_an_echo_alone_is_charged_its_prompt() -> None:
    accounts = {"somebody": Account(tokens_per_minute=3)}
    async with http(codec=words(), token=TOKEN, accounts=accounts) as h:
        for _ in range(2):
            status, _ = await h.post("/v1/completions", prompt="w5", max_tokens=0, echo=True)
            assert status == 200
        status, _ = await h.post("/v1/completions", prompt="w5", max_tokens=1)
        assert status == 200


async def test_the_least_priority_is_the_accounts() -> None:
    async with http(codec=words(), token=TOKEN, accounts={"somebody": Account(least_priority=3)}) as h:
        status, body = await h.post("/v1/completions", prompt="w5", max_tokens=1, priority=2)
        assert (status, body["error"]["type"]) == (403, "permission_error")
        assert body["error"]["message"].startswith("priority is 2; the token of 'somebody' may give 3 or more")
        status, _ = await h.post("/v1/completions", prompt="w5", max_tokens=1, priority=3)
        assert status == 200
