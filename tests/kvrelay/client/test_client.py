"""The client's promises: it says what was asked, hands back what came, cancels when left, and raises one exception."""

from __future__ import annotations

import asyncio
import math
import threading
from socketserver import BaseRequestHandler, ThreadingTCPServer

import pytest

from engine.types import FinishReason
from kvrelay.client.client import AsyncClient, Client
from kvrelay.client.types import KvrelayError
from tests.kvrelay.client.scripted import MAX_MODEL_LEN, ScriptedServer

DEADLINE_S = 20.0


def test_generate_hands_back_the_whole_answer(server: ScriptedServer) -> None:
    with Client(server.endpoint) as client:
        answer = client.generate("hello", max_tokens=3, n=2)
    assert answer.text == "é0 é1 é2 "
    assert answer.token_ids == (100, 101, 102)
    assert answer.finish_reason is FinishReason.LENGTH
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6
    assert answer.timeline is not None
    assert dict(answer.timeline.phases_s) == {"prefill": 0.25, "decode": 0.75}
    assert answer.receipt is not None
    assert answer.receipt.bytes == 4000
    assert [receipt.bytes for receipt in answer.moved] == [5000]


@pytest.mark.parametrize("timeout_s", [math.inf, 1e300])
def test_a_deadline_that_never_comes_is_none(server: ScriptedServer, timeout_s: float) -> None:
    with Client(server.endpoint) as client:
        client.wait_ready(timeout_s)
        assert client.generate("hello", max_tokens=3, timeout_s=timeout_s).token_ids == (100, 101, 102)


def test_every_option_reaches_the_server(server: ScriptedServer) -> None:
    with Client(server.endpoint) as client:
        client.generate(
            [5, 6],
            temperature=0.5,
            top_k=4,
            top_p=0.25,
            min_p=0.125,
            seed=2**40,
            max_tokens=2,
            min_tokens=1,
            stop="END",
            stop_token_ids=[9],
            ignore_eos=True,
            logprobs=0,
            repetition_penalty=1.5,
            presence_penalty=-1.0,
            frequency_penalty=0.5,
            n=1,
            model="m",
            request_id="mine",
            cache_salt="salt",
            slo_ttft_ms=300,
            slo_tpot_ms=12.5,
            priority=-3,
        )
    (seen,) = server.requests
    assert list(seen.token_ids.ids) == [5, 6]
    assert (seen.model, seen.request_id, seen.cache_salt) == ("m", "mine", "salt")
    assert (seen.slo_ttft_ms, seen.slo_tpot_ms, seen.priority) == (300.0, 12.5, -3)
    sampling = seen.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 4, 0.25, 0.125)
    assert (sampling.seed, sampling.max_tokens, sampling.min_tokens) == (2**40, 2, 1)
    assert (list(sampling.stop), list(sampling.stop_token_ids), sampling.ignore_eos) == (["END"], [9], True)
    assert sampling.HasField("logprobs")
    assert sampling.logprobs == 0
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.5, -1.0, 0.5)


def test_what_is_left_out_is_left_to_the_server(server: ScriptedServer) -> None:
    with Client(server.endpoint) as client:
        client.generate("hello")
    assert server.requests[0].sampling.ListFields() == []


def test_stream_yields_as_it_comes_and_adds_up(server: ScriptedServer) -> None:
    with Client(server.endpoint) as client, client.stream("hello", max_tokens=3, logprobs=1) as stream:
        assert stream.ttft_s is None
        deltas = list(stream)
        whole = client.generate("hello", max_tokens=3, logprobs=1)
    assert "".join(delta.text for delta in deltas) == whole.text
    assert stream.completion() == whole
    assert stream.completion().choices[0].logprobs[0].chosen.logprob == -0.5
    assert stream.ttft_s is not None
    assert stream.tpot_s is not None


def test_leaving_a_stream_cancels_the_request(server: ScriptedServer) -> None:
    with Client(server.endpoint) as client:
        with client.stream("hang") as stream:
            assert next(stream).text == "first"
        assert server.cancelled.wait(DEADLINE_S)
        assert list(stream) == []


@pytest.mark.parametrize("code", ["INVALID_ARGUMENT", "NOT_FOUND", "UNAVAILABLE", "INTERNAL"])
def test_a_refusal_is_one_sentence_with_its_code(server: ScriptedServer, code: str) -> None:
    with Client(server.endpoint) as client:
        for call in (client.generate, lambda prompt: list(client.stream(prompt))):
            with pytest.raises(KvrelayError) as caught:
                call(f"fail {code}")
            assert (caught.value.code, caught.value.message) == (code, f"the script says {code}")
            assert caught.value.retry_after_s is None
            assert caught.value.__cause__ is None


def test_a_full_server_says_how_long_to_wait(server: ScriptedServer) -> None:
    with Client(server.endpoint) as client, pytest.raises(KvrelayError) as caught:
        client.generate("fail RESOURCE_EXHAUSTED")
    assert caught.value.retry_after_s == 1.5


def test_a_stream_that_breaks_keeps_what_came(server: ScriptedServer) -> None:
    with Client(server.endpoint) as client:
        stream = client.stream("break UNAVAILABLE")
        with pytest.raises(KvrelayError):
            list(stream)
    assert stream.completion().text == "one two "
    assert stream.completion().finish_reason is None


def test_the_deadline_reaches_the_server_and_ends_the_call(server: ScriptedServer) -> None:
    with Client(server.endpoint) as client:
        client.tokenize("connected")
        with pytest.raises(KvrelayError) as caught:
            list(client.stream("hang", timeout_s=1.0))
    assert caught.value.code == "DEADLINE_EXCEEDED"
    assert server.deadlines_s[0] is not None
    assert server.deadlines_s[0] <= 1.1
    assert server.cancelled.wait(DEADLINE_S)


def test_nobody_there_and_a_lost_server_say_so() -> None:
    with ScriptedServer() as server, Client(server.endpoint) as client:
        stream = client.stream("hang")
        next(stream)
        server.stop_abruptly()
        with pytest.raises(KvrelayError) as lost:
            next(stream)
        with pytest.raises(KvrelayError) as absent:
            client.generate("hello")
    assert lost.value.code in ("UNAVAILABLE", "CANCELLED")
    assert absent.value.code == "UNAVAILABLE"
    assert server.endpoint in absent.value.message
    assert "kvrelay up" in absent.value.message


@pytest.mark.parametrize("endpoint", ["", "localhost", "localhost:", "localhost:http", "localhost:0", ":50051"])
def test_an_endpoint_without_host_or_port_is_refused(endpoint: str) -> None:
    with pytest.raises(KvrelayError, match="give host:port"):
        Client(endpoint)


def test_an_ipv6_address_wants_brackets() -> None:
    with pytest.raises(KvrelayError, match=r"endpoint is '::1:51308'; give \[::1\]:51308$"):
        Client("::1:51308")
    Client("[::1]:51308").close()


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:50051", "HTTPS://router:50051"])
def test_a_url_is_no_endpoint(endpoint: str) -> None:
    with pytest.raises(KvrelayError, match=f"endpoint is '{endpoint}'; give host:port"):
        Client(endpoint)


class HttpOnly(BaseRequestHandler):
    def handle(self) -> None:
        self.request.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")


def test_a_server_that_speaks_http_is_told_as_one() -> None:
    with ThreadingTCPServer(("127.0.0.1", 0), HttpOnly) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        endpoint = f"127.0.0.1:{other.server_address[1]}"
        with Client(endpoint) as client, pytest.raises(KvrelayError) as refused:
            client.status()
        other.shutdown()
    assert refused.value.message == f"{endpoint} speaks HTTP, not gRPC; give the router's port, not its http_port"


@pytest.mark.parametrize(
    ("prompt", "options", "key"),
    [
        ("x", {"max_tokens": 2**40}, "max_tokens"),
        ("x", {"temperature": "hot"}, "temperature"),
        ("x", {"stop_token_ids": ["a"]}, "stop_token_ids"),
        ("x", {"max_token": 3}, "max_token"),
        ("\udcff", {}, "prompt"),
        ([1, -1], {}, "prompt token ids"),
        (7, {}, "prompt token ids"),
    ],
)
def test_what_the_wire_cannot_carry_is_refused_by_name(
    server: ScriptedServer, prompt: object, options: dict[str, object], key: str
) -> None:
    with Client(server.endpoint) as client, pytest.raises(KvrelayError) as caught:
        client.stream(prompt, **options)  # type: ignore[arg-type]
    assert caught.value.code == "INVALID_ARGUMENT"
    assert caught.value.message.startswith(f"{key} is ")


def test_small_questions(server: ScriptedServer) -> None:
    with Client(server.endpoint) as client:
        assert client.tokenize("ab") == [97, 98]
        assert client.model_info().max_model_len == MAX_MODEL_LEN
        status = client.status()
    assert status.counters == {"requests": 1}
    assert (status.workers[0].name, status.workers[0].counters) == ("decode-0", {"tokens": 3})


def test_wait_ready_waits_for_the_server_to_say_so() -> None:
    with ScriptedServer(ready=False) as server, Client(server.endpoint) as client:
        with pytest.raises(KvrelayError, match=r"not ready within 0.3 s"):
            client.wait_ready(timeout_s=0.3)
        threading.Timer(0.2, server.become_ready).start()
        client.wait_ready(timeout_s=DEADLINE_S)


async def test_async_generate_and_stream_agree(server: ScriptedServer) -> None:
    async with AsyncClient(server.endpoint) as client:
        await client.wait_ready(timeout_s=DEADLINE_S)
        whole = await client.generate("hello", max_tokens=3)
        async with client.stream("hello", max_tokens=3) as stream:
            texts = [delta.text async for delta in stream]
        assert "".join(texts) == whole.text == "é0 é1 é2 "
        assert stream.completion() == whole
        assert (await client.model_info()).name == "scripted"
        assert await client.tokenize("a") == [97]
        assert (await client.status()).model == "scripted"


@pytest.mark.parametrize("how", ["close", "cancel the task", "cancel generate"])
async def test_async_leaving_cancels_the_request(server: ScriptedServer, how: str) -> None:
    async with AsyncClient(server.endpoint) as client:
        if how == "close":
            async with client.stream("hang") as stream:
                assert (await anext(stream)).text == "first"
        else:
            task = asyncio.create_task(_drain(client, once=how == "cancel generate"))
            assert await asyncio.to_thread(server.hanging.wait, DEADLINE_S)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert await asyncio.to_thread(server.cancelled.wait, DEADLINE_S)


@pytest.mark.parametrize("once", [False, True])
async def test_a_client_that_is_closed_cancels_its_requests_and_not_the_tasks_that_wait_for_them(
    server: ScriptedServer, once: bool
) -> None:
    client = AsyncClient(server.endpoint)
    task = asyncio.create_task(_drain(client, once=once))
    assert await asyncio.to_thread(server.hanging.wait, DEADLINE_S)
    await client.close()
    with pytest.raises(KvrelayError) as caught:
        await task
    assert caught.value.code == "CANCELLED"


async def _drain(client: AsyncClient, *, once: bool) -> None:
    if once:
        await client.generate("hang")
    async for _ in client.stream("hang"):
        pass


async def test_async_refusals_and_deadlines(server: ScriptedServer) -> None:
    async with AsyncClient(server.endpoint) as client:
        for prompt, code in [("fail RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED"), ("break INTERNAL", "INTERNAL")]:
            with pytest.raises(KvrelayError) as caught:
                async for _ in client.stream(prompt):
                    pass
            assert caught.value.code == code
            with pytest.raises(KvrelayError) as caught:
                await client.generate(prompt)
            assert caught.value.code == code
        with pytest.raises(KvrelayError) as caught:
            async for _ in client.stream("hang", timeout_s=0.3):
                pass
        assert caught.value.code == "DEADLINE_EXCEEDED"


async def test_async_nobody_there() -> None:
    with ScriptedServer() as server:
        endpoint = server.endpoint
    async with AsyncClient(endpoint) as client:
        with pytest.raises(KvrelayError) as caught:
            await client.generate("hello")
        assert caught.value.code == "UNAVAILABLE"
        assert endpoint in caught.value.message
        with pytest.raises(KvrelayError, match="not ready within"):
            await client.wait_ready(timeout_s=0.3)
