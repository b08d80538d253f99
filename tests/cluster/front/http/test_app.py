"""HTTP beside gRPC: the same tokens, in the shapes that OpenAI's clients read; and what clients get wrong."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import openai
import pytest

from cluster.front.http import listening
from cluster.front.http.chat import ChatTemplates
from cluster.front.http.schemas import CompletionRequest
from cluster.front.http.streams import NESTED, WRITE_BYTES, event, json_pieces
from cluster.front.http.watching import FILES
from engine.types import InvalidRequest
from tests.cluster.front.http.harness import MARKS, Http, http, words
from tests.cluster.harness import request
from tests.fakes import EOS, VOCAB, scripted_tokens

PROMPT = [5, 6, 7]


def text_of(ids: list[int]) -> str:
    """Of an answer, which goes on from a prompt."""
    return "".join(f" w{i}" for i in ids)


# completions


async def test_text_and_tokens_are_those_of_grpc_whole_and_streamed() -> None:
    async with http(codec=words()) as h:
        asked: dict[str, Any] = {"max_tokens": 6, "seed": 3, "n": 2}
        wanted = await h.harness.generate.GenerateOnce(request(PROMPT, **asked))
        status, body = await h.post("/v1/completions", prompt=PROMPT, return_token_ids=True, **asked)
        assert status == 200, body
        assert [c["token_ids"] for c in body["choices"]] == [list(c.token_ids) for c in wanted.choices]
        assert [c["text"] for c in body["choices"]] == [c.text for c in wanted.choices]
        assert body["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": 12,
            "total_tokens": 15,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        events = await h.events("/v1/completions", prompt="w5 w6 w7", return_token_ids=True, **asked)
        for index, choice in enumerate(wanted.choices):
            own = [c for event in events for c in event["choices"] if c["index"] == index]
            assert "".join(c["text"] for c in own) == choice.text
            assert [token for c in own for token in c["token_ids"]] == list(choice.token_ids)
            assert [c["finish_reason"] for c in own if c["finish_reason"]] == ["length"]


async def test_the_prompts_tokens_are_told_once_where_tokens_are() -> None:
    async with http(codec=words()) as h:
        asked: dict[str, Any] = {"prompt": ["w5 w6", "w7"], "max_tokens": 3, "n": 2, "return_token_ids": True}
        prompts = [[5, 6], [5, 6], [7], [7]]
        _, body = await h.post("/v1/completions", **asked)
        assert [choice["prompt_token_ids"] for choice in body["choices"]] == prompts
        choices = [choice for event in await h.events("/v1/completions", **asked) for choice in event["choices"]]
        for index, prompt in enumerate(prompts):
            first, *others = [choice for choice in choices if choice["index"] == index]
            assert first["prompt_token_ids"] == prompt
            assert not any("prompt_token_ids" in choice for choice in others)
        chat: dict[str, Any] = {"messages": [{"role": "user", "content": "w5"}], "max_tokens": 3}
        _, body = await h.post("/v1/chat/completions", **chat, return_token_ids=True)
        assert body["prompt_token_ids"] == [5, 8]
        first, *others = await h.events("/v1/chat/completions", **chat, return_token_ids=True)
        assert first["prompt_token_ids"] == [5, 8]
        assert not any("prompt_token_ids" in event for event in others)
        _, body = await h.post("/v1/chat/completions", **chat)
        assert "prompt_token_ids" not in body


async def test_openais_client_completes_and_streams_with_usage() -> None:
    async with http(codec=words()) as h:
        text = text_of(scripted_tokens(PROMPT, 5))
        completion = await h.openai.completions.create(model="fake", prompt="w5 w6 w7", max_tokens=5)
        assert (completion.choices[0].text, completion.choices[0].finish_reason) == (text, "length")
        assert completion.id.startswith("cmpl-")
        stream = await h.openai.completions.create(
            model="fake", prompt="w5 w6 w7", max_tokens=5, stream=True, stream_options={"include_usage": True}
        )
        *parts, last = [part async for part in stream]
        assert "".join(part.choices[0].text for part in parts) == text
        assert (last.choices, last.usage and last.usage.total_tokens) == ([], 8)


async def test_each_prompt_of_a_list_has_its_choices() -> None:
    async with http(codec=words()) as h:
        status, body = await h.post("/v1/completions", prompt=["w5", "w6 w7"], max_tokens=3, n=2)
        assert status == 200, body
        assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
        wanted = [text_of(scripted_tokens(ids, 3)) for ids in ([5], [5], [6, 7], [6, 7])]
        assert [c["text"] for c in body["choices"]] == wanted
        assert body["usage"]["prompt_tokens"] == 3
        events = await h.events("/v1/completions", prompt=["w5", "w6 w7"], max_tokens=3)
        for index, prompt in enumerate(([5], [6, 7])):
            texts = [c["text"] for event in events for c in event["choices"] if c["index"] == index]
            assert "".join(texts) == text_of(scripted_tokens(prompt, 3))


async def test_a_stop_string_ends_it_and_is_shown_where_it_is_asked_for() -> None:
    async with http(codec=words()) as h:
        ids = scripted_tokens(PROMPT, 6)
        asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 6, "stop": f" w{ids[2]}"}
        _, body = await h.post("/v1/completions", **asked)
        [choice] = body["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (
            text_of(ids[:2]),
            "stop",
            f" w{ids[2]}",
        )
        _, body = await h.post("/v1/completions", **asked, include_stop_str_in_output=True)
        assert body["choices"][0]["text"] == text_of(ids[:3])
        _, body = await h.post("/v1/completions", prompt=PROMPT, max_tokens=6, stop_token_ids=[ids[1]])
        assert (body["choices"][0]["finish_reason"], body["choices"][0]["stop_reason"]) == ("stop", ids[1])


@pytest.mark.parametrize("shows", [False, True])
async def test_so_is_a_token_that_ends_it_but_for_a_special_one(shows: bool) -> None:
    async with http(codec=words(), worker={"script": calling}) as h:
        asked: dict[str, Any] = {"prompt": PROMPT, "include_stop_str_in_output": shows}
        _, body = await h.post("/v1/completions", **asked, stop_token_ids=[43])
        assert body["choices"][0]["text"] == " w11 w12" + ' [{"name":' * shows
        events = await h.events("/v1/completions", **asked, stop_token_ids=[43])
        assert "".join(event["choices"][0]["text"] for event in events) == body["choices"][0]["text"]
        _, body = await h.post("/v1/completions", **asked, stop_token_ids=[40])
        assert body["choices"][0]["text"] == " w11 w12"


async def test_the_prompt_is_echoed() -> None:
    async with http(codec=words()) as h:
        _, body = await h.post("/v1/completions", prompt=PROMPT, max_tokens=2, echo=True)
        assert body["choices"][0]["text"] == "w5 w6 w7" + text_of(scripted_tokens(PROMPT, 2))


async def test_an_echo_has_the_prompts_log_probabilities_first() -> None:
    async with http(codec=words()) as h:
        ids = scripted_tokens(PROMPT, 2)
        _, body = await h.post("/v1/completions", prompt=PROMPT, max_tokens=2, echo=True, logprobs=1)
        told = body["choices"][0]["logprobs"]
        assert told["tokens"] == ["w5", "w6", "w7", *(f"w{i}" for i in ids)]
        assert told["token_logprobs"] == [None, -1.5, -1.75, -0.5, -0.5]
        assert told["top_logprobs"][:3] == [None, {"w9": -0.125, "w6": -1.5}, {"w9": -0.125, "w7": -1.75}]
        assert told["text_offset"][:4] == [0, 2, 4, 6]
        events = await h.events("/v1/completions", prompt=PROMPT, max_tokens=2, echo=True, logprobs=1)
        logprobs = [choice["logprobs"] for event in events for choice in event["choices"] if choice["logprobs"]]
        assert [token for each in logprobs for token in each["tokens"]] == told["tokens"]
        _, body = await h.post("/v1/completions", prompt=PROMPT, max_tokens=0, echo=True, logprobs=0)
        [choice] = body["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("w5 w6 w7", "length")
        assert choice["logprobs"]["token_logprobs"] == [None, -1.5, -1.75]
        assert body["usage"]["completion_tokens"] == 0


async def test_prompt_logprobs_are_told_as_vllm_tells_them() -> None:
    async with http(codec=words()) as h:
        _, body = await h.post("/v1/completions", prompt=[[5, 6, 9], [7]], max_tokens=1, prompt_logprobs=1, n=2)
        scores = [choice.get("prompt_logprobs") for choice in body["choices"]]
        assert scores[:2] == [
            [
                None,
                {
                    "6": {"logprob": -1.5, "rank": None, "decoded_token": "w6"},
                    "9": {"logprob": -0.125, "rank": 1, "decoded_token": "w9"},
                },
                {"9": {"logprob": -0.125, "rank": 1, "decoded_token": "w9"}},
            ],
            None,
        ]
        assert scores[2:] == [None, None]


async def test_token_ids_alone_are_served_without_a_tokenizer() -> None:
    async with http() as h:
        _, body = await h.post("/v1/completions", prompt=PROMPT, max_tokens=3, return_token_ids=True)
        assert body["choices"][0]["token_ids"] == scripted_tokens(PROMPT, 3)
        status, body = await h.post("/v1/chat/completions", messages=[{"role": "user", "content": "w5"}])
        assert (status, body["error"]["message"]) == (
            400,
            "messages cannot be read: no tokenizer is loaded; use /v1/completions with token ids",
        )


# chats


async def test_a_chat_is_prompted_by_the_models_template() -> None:
    async with http(codec=words()) as h:
        ids = scripted_tokens([5, 6, 8], 4)
        messages: Any = [
            {"role": "system", "content": "w5"},
            {"role": "user", "content": [{"type": "text", "text": "w6"}]},
        ]
        chat = await h.openai.chat.completions.create(model="fake", messages=messages, max_completion_tokens=4)
        assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == (text_of(ids), "length")
        assert chat.usage is not None
        assert (chat.usage.prompt_tokens, chat.usage.completion_tokens) == (3, 4)
        stream = await h.openai.chat.completions.create(model="fake", messages=messages, max_tokens=4, stream=True)
        parts = [part async for part in stream]
        assert parts[0].choices[0].delta.role == "assistant"
        assert "".join(part.choices[0].delta.content or "" for part in parts) == text_of(ids)
        assert [part.choices[0].finish_reason for part in parts][-1] == "length"


async def test_a_chat_goes_on_to_the_models_length_when_nothing_is_said() -> None:
    async with http(codec=words(), worker={"max_model_len": 64}) as h:
        _, body = await h.post("/v1/chat/completions", messages=[{"role": "user", "content": "w5"}])
        assert body["usage"]["total_tokens"] == 64


async def test_nor_does_it_want_more_than_workers_have_pages_for() -> None:
    """A model of 40,960 positions on a machine with room for half of them."""
    async with http(codec=words(), worker={"max_model_len": 4096, "num_pages": 8}) as h:
        held = h.harness.router.policy.workers.decode.most_tokens
        assert held < 4096
        status, body = await h.post("/v1/chat/completions", messages=[{"role": "user", "content": "w5"}])
        assert (status, body["usage"]["total_tokens"]) == (200, held)
        asked = {"messages": [{"role": "user", "content": "w5"}], "max_tokens": held}
        assert (await h.post("/v1/chat/completions", **asked))[0] == 400, "what was asked for is not cut short"


async def test_a_chat_that_waits_for_a_decode_worker_fits_into_it_when_it_is_back() -> None:
    async with http(codec=words(), worker={"max_model_len": 4096, "num_pages": 8}) as h:
        worker = h.harness.decode()
        held = h.harness.router.policy.workers.decode.most_tokens
        await worker.kill()
        await h.harness.until(lambda: not h.harness.router.policy.workers.decode.accounts)
        asked = asyncio.create_task(h.post("/v1/chat/completions", messages=[{"role": "user", "content": "w5"}]))
        await h.harness.until(lambda: h.harness.router.num_submissions == 1)
        await worker.start()
        status, body = await asked
        assert (status, body["usage"]["total_tokens"]) == (200, held)


async def test_prompts_of_one_call_have_names_of_their_own_however_long_its_own_is() -> None:
    async with http() as h:
        headers = {"X-Request-Id": "x" * 128}
        asked = {"prompt": [[5, 6], [7, 8]], "max_tokens": 2}
        assert (await h.raw.post("/v1/completions", json=asked, headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {"choices": [], "usage": None, "more": {}},
        {"choices": [{"logprobs": {"content": [{"a": [1]}] * 300}, "ids": [*range(200)]}] * 70, "text": '\u00e9"'},
        {"choices": [{"top": [None, {"a": 0.1}] * 100, "message": {"content": "x" * 999, "calls": [{"f": {}}]}}]},
    ],
)
def test_what_is_written_piece_by_piece_is_the_same_json(body: Any) -> None:
    pieces = [*json_pieces(body, NESTED)]
    assert json.loads(b"".join(pieces)) == body
    assert max(map(len, pieces)) < 4096


def test_an_event_is_one_line_to_whoever_splits_text() -> None:
    """As httpx and requests do: at every end of a line that Unicode has."""
    body = {"text": "a\n\r\v\f\x1c\x1d\x1e\u0085\u2028\u2029\u00e9"}
    line, rest = event(body).decode().splitlines()
    assert json.loads(line.removeprefix("data: ")) == body
    assert rest == ""
    assert "\u00e9" in line


async def test_a_long_answer_is_written_in_pieces_and_says_how_long_it_is() -> None:
    async with http(worker={"max_model_len": 1 << 14, "num_pages": 1 << 12}) as h:
        asked = {"prompt": PROMPT, "max_tokens": 2000, "n": 8, "logprobs": 5, "ignore_eos": True}
        answer = await h.raw.post("/v1/completions", json=asked)
        assert int(answer.headers["content-length"]) == len(answer.content) > 8 * WRITE_BYTES
        assert [len(each["logprobs"]["tokens"]) for each in answer.json()["choices"]] == [2000] * 8


def slow_client(h: Http) -> tuple[socket.socket, Any]:
    """One of which little is on its way at a time, and the server's connections."""
    listener: Any = h.harness.server._http
    listener._sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", h.harness.server.http_port))
    return client, listener._server.server_state.connections


async def test_a_client_that_leaves_the_last_bytes_of_an_answer_is_left() -> None:
    """They are so few that writing never had to wait."""
    async with http(max_stall_s=0.2, worker={"max_model_len": 1 << 14, "num_pages": 1 << 12}) as h:
        client, connections = slow_client(h)
        client.sendall(posted({"prompt": PROMPT, "max_tokens": 1000, "logprobs": 5, "ignore_eos": True}))
        await h.harness.until(lambda: any(each.cycle and each.cycle.response_complete for each in connections))
        (connection,) = connections
        assert 0 < connection.transport.get_write_buffer_size() < 64 * 1024
        await h.harness.until(lambda: not connections)
        client.close()


@pytest.mark.parametrize("more", ["", "Connection: close\r\n"])
async def test_so_is_one_that_reads_all_but_the_last_bytes(more: str) -> None:
    async with http(max_stall_s=0.3, worker={"max_model_len": 1 << 14, "num_pages": 1 << 12}) as h:
        client, connections = slow_client(h)
        asked = posted({"prompt": PROMPT, "max_tokens": 3000, "logprobs": 5, "ignore_eos": True})
        client.sendall(asked.replace(b"\r\n", f"\r\n{more}".encode(), 1))
        client.setblocking(False)
        await h.harness.until(lambda: any(each.flow.write_paused for each in connections))
        (connection,) = connections
        loop, left = asyncio.get_running_loop(), connection.transport.get_write_buffer_size
        while not connection.cycle.response_complete or left() > 8 * 1024:
            await loop.sock_recv(client, 1024)
        assert 0 < left() < 16 * 1024, "writing waits for nothing any more"
        await h.harness.until(lambda: not connections)
        client.close()


async def test_a_chats_logprobs() -> None:
    async with http(codec=words()) as h:
        messages: Any = [{"role": "user", "content": "w5"}]
        chat = await h.openai.chat.completions.create(
            model="fake", messages=messages, max_tokens=3, logprobs=True, top_logprobs=2
        )
        wanted = await h.harness.generate.GenerateOnce(request([5, 8], max_tokens=3, logprobs=2))
        told = chat.choices[0].logprobs
        assert told is not None
        assert told.content is not None
        assert [each.logprob for each in told.content] == [each.chosen.logprob for each in wanted.choices[0].logprobs]


def calling(prompt: list[int], index: int) -> int:
    """Thinks a word, says one, calls add({"a": 1}), and ends."""
    return [*[41, 11, 42, 12], *[40, 43, 44, 45, 46, 47], EOS][min(index, 10)]


TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("more", [{}, {"tools": TOOLS, "tool_choice": "none"}])
async def test_marks_of_calls_are_hidden_where_none_may_be_made(more: Any) -> None:
    """As other special tokens are."""
    async with http(codec=words(), worker={"script": calling}) as h:
        messages: Any = [{"role": "user", "content": "w5"}]
        chat = await h.openai.chat.completions.create(model="fake", messages=messages, **more)
        said = (chat.choices[0].message.content or "").split()
        assert said == ["w12", '[{"name":', '"add",', '"arguments":', '{"a":', "1}}]"]
        shown: Any = {"skip_special_tokens": False}
        chat = await h.openai.chat.completions.create(model="fake", messages=messages, extra_body=shown, **more)
        assert "[TOOL_CALLS]" in (chat.choices[0].message.content or "")


async def test_thoughts_and_calls_are_told_apart_from_what_is_said() -> None:
    async with http(codec=words(), worker={"script": calling}) as h:
        messages: Any = [{"role": "user", "content": "w5"}]
        chat = await h.openai.chat.completions.create(model="fake", messages=messages, tools=TOOLS)
        [choice] = chat.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.tool_calls is not None
        [call] = choice.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}')  # type: ignore[union-attr]
        assert (choice.message.content or "").strip() == "w12"
        assert choice.message.reasoning_content.strip() == "w11"  # type: ignore[attr-defined]
        stream = await h.openai.chat.completions.create(model="fake", messages=messages, tools=TOOLS, stream=True)
        deltas = [part.choices[0] async for part in stream]
        [called] = [call for delta in deltas for call in delta.delta.tool_calls or []]
        assert called.function is not None
        assert (called.index, called.function.name, called.function.arguments) == (0, "add", '{"a": 1}')
        assert deltas[-1].finish_reason == "tool_calls"


def calling_twice(prompt: list[int], index: int) -> int:
    call = [40, 43, 44, 45, 46, 47]
    return [*call, *call, EOS][min(index, 12)]


@pytest.mark.parametrize(("parallel", "num_calls"), [(None, 2), (True, 2), (False, 1)])
async def test_of_calls_that_may_not_be_parallel_the_first_goes_out(parallel: bool | None, num_calls: int) -> None:
    async with http(codec=words(), worker={"script": calling_twice}) as h:
        asked = {"messages": [{"role": "user", "content": "w5"}], "tools": TOOLS, "parallel_tool_calls": parallel}
        _, body = await h.post("/v1/chat/completions", **asked)
        [choice] = body["choices"]
        assert (len(choice["message"]["tool_calls"]), choice["finish_reason"]) == (num_calls, "tool_calls")
        choices = [choice for event in await h.events("/v1/chat/completions", **asked) for choice in event["choices"]]
        calls = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
        assert [call["index"] for call in calls] == [*range(num_calls)]
        assert choices[-1]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("key", ["chat_template", "tools", "tokenize", "messages"])
async def test_a_request_brings_no_template_of_its_own(key: str) -> None:
    async with http(codec=words()) as h:
        asked: Any = {"messages": [{"role": "user", "content": "w5"}], "chat_template_kwargs": {key: "w1"}}
        status, body = await h.post("/v1/chat/completions", **asked)
        assert (status, body["error"]["message"]) == (
            400,
            f"chat_template_kwargs has {key}, which is not the template's to know",
        )


# what is wrong


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "prompt: field required"),
        ({"prompt": "w5", "temperature": -1}, "temperature is -1; give a number from 0 to 100"),
        ({"prompt": "w5", "temperature": []}, "temperature is []: input should be a valid number"),
        ({"prompt": "w5", "max_tokens": 2**40}, "max_tokens is 1099511627776: input should be less than 2147483648"),
        ({"prompt": 5}, "prompt is 5: input should be a valid string"),
        ({"prompt": [5, -1]}, "prompt.1 is -1: input should be greater than or equal to 0"),
        ({"prompt": [[1, 2], [3, 2**40]]}, "prompt.1.1 is 1099511627776: input should be less than 4294967296"),
        ({"prompt": "w5", "kv_window_tokens": -1}, "kv_window_tokens is -1; give 0 or more"),
        ({"prompt": "w5", "stop": 5}, "stop is 5: input should be a valid string"),
        ({"prompt": ""}, "the prompt is empty; give text with at least one token"),
        ({"prompt": []}, "prompt has 0 prompts; give 1 to 128"),
        ({"prompt": "w5", "best_of": 3}, "best_of is 3; this server returns all that it draws, so give n alone"),
        (
            {"prompt": "w5", "logit_bias": {"5": 101}},
            "logit_bias of 5 is 101; give a number from -100 to 100",
        ),
        ({"prompt": [VOCAB]}, f"the prompt has token id {VOCAB}; the model's ids go from 0 to {VOCAB - 1}"),
        (
            {"prompt": "w5 " * 600},
            "the prompt is 600 tokens; this model's maximum context length is 512 tokens, so give at most 511",
        ),
        ({"prompt": ["w5"] * 128, "n": 64}, "n is 64 with 128 prompts; give at most 7"),
        ({"prompt": "w5", "n": 0}, "n is 0; give a whole number of 1 to 64"),
        ({"prompt": "w5", "n": 2**31 - 1}, "n is 2147483647; give a whole number of 1 to 64"),
        (
            {"prompt": "w5", "slo_ttft_ms": -1},
            "slo_ttft_ms is -1; give milliseconds above 0, or 0 for the router's own target",
        ),
    ],
)
async def test_a_mistake_is_one_sentence(body: dict[str, Any], message: str) -> None:
    async with http(codec=words()) as h:
        status, answer = await h.post("/v1/completions", **body)
        assert (status, answer["error"]["message"]) == (400, message)
        assert answer["error"]["type"] == "invalid_request_error"
        assert (await h.post("/v1/completions", **body, stream=True))[0] == 400
        assert (await h.post("/v1/completions", prompt="w5", max_tokens=1))[0] == 200


async def test_a_prompt_that_is_too_long_is_told_as_clients_know_it() -> None:
    """Some by OpenAI's code, some by vLLM's words: they cut the prompt, or ask a model that takes more."""
    async with http(codec=words()) as h:
        for asked in ({"prompt": "w5 " * 600}, {"prompt": [5] * 600}, {"prompt": [5] * 600, "echo": True}):
            _, answer = await h.post("/v1/completions", **asked)
            assert answer["error"]["code"] == "context_length_exceeded"
            assert "this model's maximum context length is 512 tokens" in answer["error"]["message"]
        _, answer = await h.post("/v1/completions", prompt="w5", n=0)
        assert answer["error"]["code"] is None


@pytest.mark.parametrize(
    "form",
    [
        lambda schema: {"structured_outputs": {"json": schema}},
        lambda schema: {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
    ],
)
def test_a_schema_that_is_nested_too_deep_is_refused(form: Callable[[Any], dict[str, Any]]) -> None:
    schema: dict[str, Any] = {}
    for _ in range(3000):
        schema = {"items": schema}
    with pytest.raises(InvalidRequest, match="nested too deep"):
        CompletionRequest(prompt="w5", **form(schema)).form()


async def test_after_a_failure_of_ours_the_connection_is_said_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChatTemplates, "of", lambda *_: 1 / 0)
    async with http(codec=words()) as h:
        answer = await h.raw.post("/tokenize", json={"messages": [{"role": "user", "content": "w5"}]})
        assert (answer.status_code, answer.headers["connection"]) == (500, "close")
        assert (await h.raw.get("/health")).status_code == 200


async def test_what_is_no_json_is_refused() -> None:
    async with http() as h:
        said = {
            b"{": "the body is no JSON: expecting property name enclosed in double quotes at character 1",
            b"\xff": "the body is no UTF-8; send JSON in that",
            b"[" * 100_000: "the body is nested too deep; send JSON with fewer levels",
            b"9" * 5000: "the body has a number that is too long; send JSON with at most 4300 digits in each",
            b"[]": "the body: input should be a valid dictionary or object to extract fields from",
            b"null": "the body: input should be a valid dictionary or object to extract fields from",
            b'{"prompt": "\\ud800"}': "",
        }
        for content, message in said.items():
            answer = await h.raw.post("/v1/completions", content=content, headers={"content-type": "application/json"})
            assert answer.status_code == 400, (content[:80], answer.text)
            told = answer.json()["error"]["message"]
            assert told == message or (not message and told), content[:80]


@pytest.mark.parametrize(
    ("path", "asked", "message"),
    [
        ("/tokenize", {}, "prompt: field required"),
        ("/tokenize", {"prompt": 5}, "prompt is 5: input should be a valid string"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "w5"}], "max_completion_tokens": 0},
            "max_completion_tokens is 0; give a whole number from 1 on",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "w5"}], "logprobs": True, "top_logprobs": 21},
            "top_logprobs is 21; give a whole number of 0 to 20",
        ),
    ],
)
async def test_a_mistake_is_named_by_its_key(path: str, asked: dict[str, Any], message: str) -> None:
    async with http(codec=words()) as h:
        status, answer = await h.post(path, **asked)
        assert (status, answer["error"]["message"]) == (400, message)
        assert answer["error"]["param"] == re.split("[: ]", message)[0]


async def test_an_unknown_model_and_an_unknown_place_are_not_found() -> None:
    async with http(codec=words()) as h:
        with pytest.raises(openai.NotFoundError, match="model is 'other'; this router serves 'fake'"):
            await h.openai.completions.create(model="other", prompt="w5")
        answer = await h.raw.get("/v1/nothing")
        assert (answer.status_code, answer.json()["error"]["message"]) == (
            404,
            "there is nothing at /v1/nothing; see /openapi.json",
        )
        assert (await h.raw.get("/v1/completions")).status_code == 405


async def test_what_is_refused_under_load_says_when_to_come_again() -> None:
    async with http(max_calls=1) as h:
        h.harness.prefill().is_holding = True
        held = asyncio.create_task(h.post("/v1/completions", prompt=PROMPT, max_tokens=1))
        await h.harness.prefill().wait_for(lambda: len(h.harness.prefill().held) == 1)
        answer = await h.raw.post("/v1/completions", json={"prompt": PROMPT})
        assert answer.status_code == 429
        assert answer.json()["error"]["message"] == "1 calls run at this router, of 1"
        assert 1 <= int(answer.headers["retry-after"]) <= 2
        assert h.harness.router.metrics.codes == {"RESOURCE_EXHAUSTED": 1}
        assert (await h.raw.get("/health")).status_code == 200
        h.harness.prefill().release()
        assert (await held)[0] == 200


async def test_a_failure_in_a_stream_is_an_event() -> None:
    async with http() as h:
        h.harness.decode().max_steps = 2
        body = {"prompt": PROMPT, "max_tokens": 50, "stream": True}
        async with h.raw.stream("POST", "/v1/completions", json=body) as answer:
            lines = (line async for line in answer.aiter_lines() if line)
            await anext(lines)
            await h.harness.router.close()
            *_, failed, done = [line async for line in lines]
        assert json.loads(failed.removeprefix("data: "))["error"]["code"] == "unavailable"
        assert done == "data: [DONE]"


# whoever leaves


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_its_request(stream: bool) -> None:
    async with http() as h:
        h.harness.decode().max_steps = 3
        body = {"prompt": PROMPT, "max_tokens": 50, "stream": stream}
        call = asyncio.create_task(h.raw.post("/v1/completions", json=body))
        await h.harness.until(lambda: bool(h.harness.decode().running))
        call.cancel()
        await h.harness.until(lambda: not h.harness.decode().running and h.harness.router.num_submissions == 0)
        assert h.harness.router.metrics.codes["CANCELLED"] == 1


# names, keys, probes


async def test_a_request_is_called_what_its_client_calls_it() -> None:
    async with http() as h:
        answer = await h.raw.post(
            "/v1/completions", json={"prompt": PROMPT, "max_tokens": 1}, headers={"X-Request-Id": "mine"}
        )
        assert (answer.headers["x-request-id"], answer.json()["id"]) == ("mine", "cmpl-mine")
        answer = await h.raw.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1})
        assert answer.json()["id"] == f"cmpl-{answer.headers['x-request-id']}"
        status, body = await h.post("/v1/completions", prompt=PROMPT, request_id="é")
        assert (status, body["error"]["param"]) == (400, "request_id")


async def test_requests_of_one_name_are_served_beside_each_other() -> None:
    async with http() as h:
        body = {"prompt": [PROMPT, PROMPT], "max_tokens": 4}
        headers = {"X-Request-Id": "trace"}
        answers = await asyncio.gather(*(h.raw.post("/v1/completions", json=body, headers=headers) for _ in range(3)))
        assert [answer.status_code for answer in answers] == [200] * 3
        names = [answer.headers["x-request-id"] for answer in answers]
        assert len(set(names)) == 3
        assert sorted(name.partition("-")[0] for name in names) == ["trace"] * 3
        answer = await h.raw.post("/v1/completions", json=body, headers=headers)
        assert answer.headers["x-request-id"] == "trace", "nobody has it now"


async def test_who_has_no_key_is_refused_but_for_probes() -> None:
    async with http(token="secret-token-of-somebody") as h:
        assert (await h.post("/v1/completions", prompt=PROMPT, max_tokens=1))[0] == 200
        for headers in ({"Authorization": "Bearer wrong"}, {"Authorization": ""}):
            answer = await h.raw.post("/v1/completions", json={"prompt": PROMPT}, headers=headers)
            assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
            assert answer.headers["www-authenticate"] == "Bearer"
            assert (await h.raw.get("/metrics", headers=headers)).status_code == 401
            assert (await h.raw.get("/health", headers=headers)).status_code == 200
            assert (await h.raw.get("/ready", headers=headers)).status_code == 200


async def test_models_tokens_version_and_metrics() -> None:
    async with http(codec=words()) as h:
        [model] = (await h.openai.models.list()).data
        assert model.id == "fake"
        assert (await h.openai.models.retrieve("fake")).id == "fake"
        status, body = await h.post("/tokenize", prompt="w5 w6", return_token_strs=True)
        assert (status, body) == (
            200,
            {"tokens": [5, 6], "count": 2, "max_model_len": 512, "token_strs": ["w5", "w6"]},
        )
        _, body = await h.post("/tokenize", messages=[{"role": "user", "content": "w5"}])
        assert body["tokens"] == [5, 8]
        assert (await h.post("/detokenize", tokens=[5, 6]))[1] == {"prompt": "w5 w6"}
        assert (await h.post("/detokenize", tokens=[VOCAB]))[0] == 400
        assert set((await h.raw.get("/version")).json()) == {"version"}
        assert "kvrelay:requests_total" in (await h.raw.get("/metrics")).text


async def test_the_page_is_open_and_what_it_shows_is_not() -> None:
    async with http(token="secret-token-of-somebody") as h:
        stranger = {"Authorization": ""}
        page = await h.raw.get("/", headers=stranger)
        assert page.status_code == 200
        for path in (parts := re.findall(r'(?:href|src)="(page/[^"]+)"', page.text)):
            assert (await h.raw.get(f"/{path}", headers=stranger)).status_code == 200, path
        assert len(parts) == 2
        assert (await h.raw.get("/page/../app.py", headers=stranger)).status_code in (401, 404)
        assert (await h.raw.get("/watch", headers=stranger)).status_code == 401


def test_the_page_asks_for_nothing_from_the_root_of_its_host() -> None:
    """A proxy may have it under a path of its own (nginx: location /chat/ { proxy_pass http://127.0.0.1:8000/; })."""
    for name, path in FILES.items():
        assert re.findall(r"""["'`(]/\w+""", path.read_text()) == [], name


async def test_watching_tells_the_status_and_who_has_ended() -> None:
    async with http(codec=words()) as h:
        await h.post("/v1/completions", prompt="w5", max_tokens=3)
        async with h.raw.stream("GET", "/watch") as answer:
            lines = (line async for line in answer.aiter_lines() if line)
            first = json.loads((await anext(lines)).removeprefix("data: "))
            assert [each["output_tokens"] for each in first["ended"]] == [3]
            assert {worker["name"] for worker in first["status"]["workers"]} == set(h.harness.workers)
            await h.post("/v1/completions", prompt="w5", max_tokens=4)
            second = json.loads((await anext(lines)).removeprefix("data: "))
            assert [each["output_tokens"] for each in second["ended"]] == [4]
            assert second["status"]["counters"]["finished"] == "2"


async def test_how_others_fared_is_for_operators() -> None:
    async with http(codec=words(), token="secret-token-of-somebody") as h:
        await h.post("/v1/completions", prompt="w5", max_tokens=3)
        async with h.raw.stream("GET", "/watch") as answer:
            first = json.loads((await anext(answer.aiter_lines())).removeprefix("data: "))
        assert first["ended"] == []
        assert first["status"]["workers"]


async def test_who_needs_no_token_may_send_no_body() -> None:
    async with http(token="secret-token-of-somebody") as h:
        answer = await h.raw.request("GET", "/health", content=b"x" * 1000, headers={"Authorization": ""})
        assert answer.status_code == 413


async def raw(h: Http, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", h.harness.server.http_port)
    writer.write(data)
    await writer.drain()
    return reader, writer


def posted(body: dict[str, Any]) -> bytes:
    text = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: {len(text)}"
    return head.encode() + b"\r\n\r\n" + text


@pytest.mark.parametrize("size", [1, 1000])
async def test_an_offer_to_upgrade_is_passed_over(size: int) -> None:
    """By bodies of two kinds, and a client that stays."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
    text = json.dumps({"prompt": PROMPT, "max_tokens": 2}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n" + offer
    told = head + b"Content-Length: %d\r\n\r\n" % len(text) + text
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(text), text)
    async with http() as h, asyncio.timeout(10):
        reader, writer = await raw(h, b"")
        for data in (told, chunked, b"GET /health HTTP/1.1\r\nHost: h\r\n" + offer + b"\r\n", told):
            for start in range(0, len(data), size):
                writer.write(data[start : start + size])
                await asyncio.sleep(0)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200"), answer
            length = re.search(rb"content-length: (\d+)", answer)
            assert length is not None
            await reader.readexactly(int(length[1]))
        writer.write(b"CONNECT a:1 HTTP/1.1\r\nHost: h\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 4")
        writer.close()


async def test_to_a_client_of_http_1_0_nothing_is_sent_in_chunks() -> None:
    async with http() as h, asyncio.timeout(10):
        for is_stream in (True, False):
            asked = posted({"prompt": PROMPT, "max_tokens": 5, "stream": is_stream})
            reader, writer = await raw(h, asked.replace(b"HTTP/1.1", b"HTTP/1.0"))
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            assert b"transfer-encoding" not in head.lower()
            assert b"connection: close" in head.lower()
            if is_stream:
                assert all(line.startswith(b"data: ") for line in body.splitlines() if line)
                assert body.endswith(b"data: [DONE]\n\n")
            else:
                assert f"content-length: {len(body)}".encode() in head.lower()
            writer.close()


async def test_a_client_that_asks_twice_at_once_gets_the_first_answer_and_the_end() -> None:
    health = b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n"
    async with http() as h, asyncio.timeout(10):
        for data in (health + health, posted({"prompt": PROMPT, "max_tokens": 5}) + health + b"x" * 100_000):
            reader, writer = await raw(h, data)
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            assert b"connection: close" in head.lower()
            length = re.search(rb"content-length: (\d+)", head)
            assert length is not None
            assert len(body) == int(length[1]), "and nothing behind it"
            writer.close()
        await h.harness.until(lambda: h.harness.router.num_submissions == 0)


async def test_a_client_that_asks_twice_at_once_and_leaves_cancels_the_first() -> None:
    async with http() as h:
        h.harness.decode().max_steps = 3
        _, writer = await raw(h, posted({"prompt": PROMPT, "max_tokens": 50}))
        await h.harness.until(lambda: bool(h.harness.decode().running))
        writer.write(b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n")
        await writer.drain()
        writer.close()
        await h.harness.until(lambda: not h.harness.decode().running and h.harness.router.num_submissions == 0)


async def test_connections_beyond_the_most_are_closed_and_the_others_served() -> None:
    health = b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n"
    async with http(max_connections=2) as h, asyncio.timeout(10):
        first = await raw(h, health)
        second = await raw(h, health)
        third = await raw(h, b"")
        assert await third[0].read() == b""
        for reader, writer in (first, second):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            writer.write(health)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        first[1].close()
        answer = b""
        while not answer.startswith(b"HTTP/1.1 200"):  # as soon as it is seen to have left
            reader, writer = await raw(h, health)
            with suppress(ConnectionError):
                answer = await reader.read(100)
            writer.close()
        for _, writer in (second, third):
            writer.close()


async def test_a_client_that_says_no_more_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "HEADERS_S", 0.2)
    async with http() as h, asyncio.timeout(10):
        for begin in (b"", b"GET / HT", b"\r\n"):
            reader, writer = await raw(h, begin)
            with suppress(ConnectionError):
                await reader.read()
            writer.close()
        reader, writer = await raw(h, b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"\r\n")
        with suppress(ConnectionError):
            await reader.read()
        writer.close()


async def test_headers_that_are_too_large_are_answered_and_heard_out_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with http() as h, asyncio.timeout(20):
        answer = await h.raw.get("/health", headers={"x-a": "a" * (8 * listening.MAX_HEADER_BYTES)})
        assert (answer.status_code, answer.headers["connection"]) == (431, "close")
        assert answer.json()["error"]["message"] == f"the headers are larger than {listening.MAX_HEADER_BYTES} bytes"
        monkeypatch.setattr(listening, "HEADERS_S", 2.0)
        endless = b"x-a: " + b"a" * (16 * listening.MAX_HEADER_BYTES)
        reader, writer = await raw(h, b"GET / HTTP/1.1\r\n" + endless)
        assert (await reader.read(len(b"HTTP/1.1 431 "))) == b"HTTP/1.1 431 "
        with suppress(ConnectionError):
            await reader.read()  # until it is left
        writer.close()
        chunked = b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
        reader, writer = await raw(h, chunked + endless)
        with suppress(ConnectionError):
            assert await reader.read() == b"", "its end never comes"
        writer.close()


async def test_a_body_that_is_refused_before_it_has_come_is_heard_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of clients that would close the connection behind the answer, as nginx and urllib do: they send on, then read."""
    body = b"x" * 8_000_000
    head = b"POST /v1/completions HTTP/%b\r\nHost: h\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    async with http(token="secret-token-of-somebody") as h, asyncio.timeout(60):
        for version in (b"1.0", b"1.1"):
            reader, writer = await raw(h, head % (version, len(body)) + body)
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 401 ")
            assert answer.endswith(b"}}"), "whole, and then the end"
            writer.close()
        monkeypatch.setattr(listening, "HEADERS_S", 0.5)
        reader, writer = await raw(h, head % (b"1.1", len(body)) + b"x")
        with suppress(ConnectionError):
            await reader.read()
        with suppress(ConnectionError):
            while True:  # until it is left
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.05)


async def test_a_client_that_reads_nothing_is_left() -> None:
    async with http(max_stall_s=0.3, worker={"max_model_len": 1 << 16, "num_pages": 1 << 12}) as h:
        asked = {"prompt": PROMPT, "max_tokens": 60_000, "stream": True, "n": 8, "logprobs": 5, "ignore_eos": True}
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # soon full
        client.connect(("127.0.0.1", h.harness.server.http_port))
        _, writer = await asyncio.open_connection(sock=client, limit=1)
        writer.write(posted(asked))
        await h.harness.until(lambda: h.harness.router.num_submissions == 1)
        await h.harness.until(lambda: h.harness.router.num_submissions == 0)
        writer.close()


async def test_it_is_not_ready_before_its_workers_are() -> None:
    async with http() as h:
        assert (await h.raw.get("/ready")).status_code == 200
        for worker in h.harness.workers.values():
            await worker.kill()
        await h.harness.until(lambda: not h.harness.router.is_ready)
        answer = await h.raw.get("/ready")
        assert (answer.status_code, answer.headers["retry-after"]) in [(503, "1"), (503, "2")]
        for worker in h.harness.workers.values():
            await worker.start()


async def test_the_openapi_document_names_every_route() -> None:
    async with http() as h:
        paths = (await h.raw.get("/openapi.json")).json()["paths"]
        assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/health", "/metrics"} <= set(
            paths
        )


def test_marks_are_special_tokens_of_their_own() -> None:
    assert words().ids_of([*MARKS, "w5"]) == set(MARKS.values())
