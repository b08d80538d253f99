"""What browsers, curl and gateways send besides requests of OpenAI's clients, and what they are told."""

from __future__ import annotations

import gzip

import pytest

from tests.cluster.front.http.harness import http, words

PAGE = "https://chat.example.org"
BODY = b'{"prompt": "w5", "max_tokens": 1}'
JSON = {"Content-Type": "application/json"}
ASKS_FIRST = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


async def test_a_browser_may_call_from_a_page_that_is_allowed() -> None:
    async with http(codec=words(), token="a-token-of-a-test", http_allowed_origins=[PAGE]) as h:
        first = await h.raw.options("/v1/completions", headers={**ASKS_FIRST, "Authorization": ""})
        assert first.status_code == 200, first.text
        assert first.headers["access-control-allow-origin"] == PAGE
        assert "authorization" in first.headers["access-control-allow-headers"]
        answer = await h.raw.post("/v1/completions", content=BODY, headers={**JSON, "Origin": PAGE})
        assert answer.status_code == 200, answer.text
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
        refused = await h.raw.get("/v1/models", headers={"Origin": PAGE, "Authorization": "Bearer another"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == PAGE  # so that the page can read why
        other = await h.raw.options("/v1/completions", headers={**ASKS_FIRST, "Origin": "https://evil.example.org"})
        assert other.status_code == 400
        assert "access-control-allow-origin" not in other.headers


async def test_a_browser_may_call_from_no_other_page_as_a_rule() -> None:
    async with http(codec=words()) as h:
        first = await h.raw.options("/v1/completions", headers=ASKS_FIRST)
        assert "access-control-allow-origin" not in first.headers
        assert "access-control-allow-origin" not in (await h.raw.get("/v1/models", headers={"Origin": PAGE})).headers


async def test_what_can_be_had_has_a_head() -> None:
    async with http(codec=words()) as h:
        for path in ("/", "/health", "/ready", "/version", "/metrics", "/v1/models", "/v1/models/fake"):
            head, whole = await h.raw.head(path), await h.raw.get(path)
            assert (head.status_code, head.content) == (200, b""), path
            assert head.headers["content-type" if whole.content else "content-length"]
    paths = (await _document())["paths"]
    assert all("head" not in methods for methods in paths.values())


async def test_a_slash_behind_a_path_is_passed_over() -> None:
    """A redirect would name this router as it sees itself: over HTTP, where a proxy before it speaks TLS."""
    async with http(codec=words()) as h:
        assert (await h.raw.get("/v1/models/")).json() == (await h.raw.get("/v1/models")).json()
        assert (await h.raw.get("/health/")).status_code == 200
        status, body = await h.post("/v1/completions/", prompt="w5", max_tokens=1)
        assert (status, body["object"]) == (200, "text_completion")


async def _document() -> dict[str, dict[str, dict[str, object]]]:
    async with http(codec=words()) as h:
        answer = await h.raw.get("/openapi.json")
        document: dict[str, dict[str, dict[str, object]]] = answer.json()
        return document


@pytest.mark.parametrize(
    ("body", "headers", "said"),
    [
        (BODY[:-1], JSON, "the body is no JSON: expecting ',' delimiter at character 32"),
        (b'{"prompt": "a\nb"}', JSON, "the body is no JSON: invalid control character at character 13"),
        (
            BODY,
            {"Content-Type": "application/x-www-form-urlencoded"},
            "the body was not read as JSON: send the header Content-Type: application/json",
        ),
        (
            gzip.compress(BODY),
            {**JSON, "Content-Encoding": "gzip"},
            "Content-Encoding is 'gzip'; send the body as it is, without one",
        ),
    ],
    ids=["cut", "a line break", "a form", "packed"],
)
async def test_a_body_that_cannot_be_read_is_told_why(body: bytes, headers: dict[str, str], said: str) -> None:
    async with http(codec=words()) as h:
        answer = await h.raw.post("/v1/completions", content=body, headers=headers)
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, said)
        assert answer.json()["error"]["param"] is None


async def test_what_cannot_be_promised_is_refused_by_its_value() -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    cases: list[tuple[dict[str, object], str]] = [
        (
            {"tool_choice": "required", "tools": tools},
            "structured is given but the model has no EOS, which ends such answers",
        ),
        (
            {"response_format": {"type": "json_object"}},
            "structured is given but the model has no EOS, which ends such answers",
        ),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "response_format and structured_outputs give"),
        ({"audio": {"voice": "x"}}, "audio is {'voice': 'x'}; this server does not do that"),
    ]
    async with http(codec=words()) as h:
        for asked, said in cases:
            status, body = await h.post("/v1/chat/completions", messages=[{"role": "user", "content": "w5"}], **asked)
            assert status == 400
            assert body["error"]["message"].startswith(said)
        answer = await h.raw.get("/v1/completions")
        assert answer.status_code == 405
        assert answer.json()["error"]["message"] == "/v1/completions is not for GET; see /openapi.json"
