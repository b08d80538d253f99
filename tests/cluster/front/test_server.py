"""The public service: what clients get, and the one sentence for what they get wrong, after which it serves on."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import urllib.request
from collections.abc import Callable

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cluster.front import requests
from cluster.front.server import RouterServer, server_options
from cluster.front.tokenizer import TextCodec
from cluster.router.accounts import RequestShape
from cluster.router.decisions import Decision
from cluster.router.driver import Router
from cluster.router.monitoring.status import status_of
from kvrelay.v1 import cluster_pb2, generate_pb2
from tests.cluster.harness import Harness, collect, request, serving, tokens_of
from tests.fakes import EOS, VOCAB, scripted_tokens
from worker.convert import sampling_from_proto
from worker.wire.rpc import open_channel

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def words() -> TextCodec:
    """A tokenizer whose token 17 is the word w17."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return TextCodec(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


def text_of(ids: list[int]) -> str:
    """Of an answer, which goes on from a prompt."""
    return "".join(f" w{i}" for i in ids)


def said(text: str, **sampling: object) -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(text=text, sampling=generate_pb2.SamplingParams(**sampling))  # type: ignore[arg-type]


async def refusal(call: object) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call  # type: ignore[misc]
    return error.value.code(), error.value.details() or ""


# what clients get


async def test_text_goes_in_and_the_text_of_every_token_comes_out() -> None:
    async with serving(codec=words()) as h:
        ids = scripted_tokens([5, 6, 7], 8)
        responses = await collect(h.generate.Generate(said("w5 w6 w7", max_tokens=8)))
        assert list(h.prefill().submits[0].request.prompt_ids) == [5, 6, 7]
        assert "".join(r.text for r in responses) == text_of(ids)
        answer = await h.generate.GenerateOnce(said("w5 w6 w7", max_tokens=8))
        assert (answer.choices[0].text, list(answer.choices[0].token_ids)) == (text_of(ids), ids)
        assert answer.usage.completion_tokens == 8


async def test_a_stop_string_ends_the_text_before_it_and_the_work_at_the_workers() -> None:
    async with serving(codec=words()) as h:
        h.decode().max_steps = 6
        ids = scripted_tokens([5, 6, 7], 20)
        answer = await h.generate.GenerateOnce(said("w5 w6 w7", max_tokens=20, stop=[f" w{ids[3]}"]))
        [choice] = answer.choices
        assert choice.text == text_of(ids[:3])
        assert list(choice.token_ids) == ids[:4]
        assert (choice.finish_reason, choice.stop_string) == (generate_pb2.FINISH_REASON_STOP, f" w{ids[3]}")
        assert answer.usage.completion_tokens == 4
        await h.until(lambda: not h.decode().running)
        assert h.decode().cancels


async def test_the_token_that_ends_a_sequence_is_no_text() -> None:
    def script(prompt: object, index: int) -> int:
        return EOS if index == 2 else 50 + index

    async with serving(codec=words(), worker={"script": script}) as h:
        answer = await h.generate.GenerateOnce(said("w5", max_tokens=9))
        assert (answer.choices[0].text, list(answer.choices[0].token_ids)) == (" w50 w51", [50, 51, EOS])
        stopped = await h.generate.GenerateOnce(said("w5", max_tokens=9, stop_token_ids=[51]))
        assert (stopped.choices[0].text, list(stopped.choices[0].token_ids)) == (" w50", [50, 51])


async def test_log_probabilities_pass_through_one_for_each_token() -> None:
    async with serving() as h:
        responses = await collect(h.generate.Generate(request(max_tokens=5, logprobs=0)))
        chosen = [p.chosen.token_id for r in responses for p in r.logprobs]
        assert chosen == tokens_of(responses) == scripted_tokens([5, 6, 7], 5)


async def test_trailers_carry_the_id_and_the_timeline() -> None:
    async with serving() as h:
        call = h.generate.Generate(generate_pb2.GenerateRequest(request_id="mine-1", text="", token_ids={"ids": [5]}))
        responses = await collect(call)
        trailers = dict(await call.trailing_metadata())
        assert trailers["kvrelay-request-id"] == responses[0].request_id == "mine-1"
        parts = dict(part.split("=") for part in trailers["kvrelay-timeline"].split(";"))
        assert next(iter(parts)) == "route"
        assert sum(map(float, parts.values())) == pytest.approx(responses[-1].timeline.e2e_s, abs=1e-5)


async def test_what_is_not_set_takes_the_public_defaults_and_a_seed_of_its_own() -> None:
    async with serving() as h:
        bare = generate_pb2.GenerateRequest(token_ids={"ids": [5]})
        for _ in range(2):
            answer = await h.generate.GenerateOnce(bare)
            assert len(answer.choices[0].token_ids) == 16
        first, second = (sampling_from_proto(s.request.sampling) for s in h.prefill().submits)
        assert (first.temperature, first.top_p, first.top_k, first.logprobs) == (1.0, 1.0, 0, None)
        assert first.seed != second.seed


async def test_what_is_not_set_is_as_the_models_generation_config_has_it() -> None:
    usual = generate_pb2.SamplingParams(temperature=0.6, top_k=20, repetition_penalty=1.1)
    async with serving(worker={"usual_sampling": usual}) as h:
        for asked in (request(max_tokens=2), request(max_tokens=2, temperature=0.0, top_k=5)):
            await h.generate.GenerateOnce(asked)
        found = [sampling_from_proto(s.request.sampling) for s in h.prefill().submits]
        assert [(each.temperature, each.top_k, each.repetition_penalty) for each in found] == [
            (0.6, 20, 1.1),
            (0.0, 5, 1.1),
        ]
        told = await h.generate.GetModelInfo(generate_pb2.GetModelInfoRequest())
        assert told.usual_sampling == usual
        await h.generate.GenerateOnce(request(max_tokens=2, beam_search={"num_beams": 2}))
        search = sampling_from_proto(h.prefill().submits[-1].request.sampling)
        assert (search.top_k, search.repetition_penalty) == (0, 1.1), "a search draws nothing"


async def test_a_salt_reaches_the_workers_under_the_callers_name_in_every_choice_and_attempt() -> None:
    salted = generate_pb2.GenerateRequest(token_ids={"ids": [5]}, cache_salt="s", sampling={"n": 2, "max_tokens": 2})
    async with serving() as h:
        h.prefill().fail_with = "it broke"
        await h.generate.GenerateOnce(salted)
        await h.generate.GenerateOnce(generate_pb2.GenerateRequest(token_ids={"ids": [5]}))
        assert [s.request.cache_salt for s in h.prefill().submits] == ["s", "s", "s", ""]
    tokens = "acme: one-token-for-acme\nmine: another-token-for-me\n"
    async with serving(options=server_options(port=0, auth=True, tokens=tokens)) as h:
        for token in ("one-token-for-acme", "another-token-for-me"):
            await h.generate.GenerateOnce(salted, metadata=(("authorization", f"Bearer {token}"),))
        assert {s.request.cache_salt for s in h.prefill().submits} == {"acme\ns", "mine\ns"}


async def test_a_decimal_reaches_the_workers_as_it_was_meant() -> None:
    async with serving() as h:
        await h.generate.GenerateOnce(request(temperature=0.7, top_p=0.95, min_p=0.05, seed=11))
        params = sampling_from_proto(h.prefill().submits[0].request.sampling)
        assert (params.temperature, params.top_p, params.min_p, params.seed) == (0.7, 0.95, 0.05, 11)


async def test_max_tokens_is_clipped_to_what_the_model_can_hold() -> None:
    async with serving(worker={"max_model_len": 20}) as h:
        answer = await h.generate.GenerateOnce(request(range(3, 15), max_tokens=1000, min_tokens=500))
        assert len(answer.choices[0].token_ids) == 8
        assert answer.choices[0].finish_reason == generate_pb2.FINISH_REASON_LENGTH


async def test_tokenize_and_model_info() -> None:
    async with serving(codec=words(), options=server_options(port=0, model_name="mine")) as h:
        ids = (await h.generate.Tokenize(generate_pb2.TokenizeRequest(text="w9 w8"))).ids
        assert list(ids) == [9, 8]
        info = await h.generate.GetModelInfo(generate_pb2.GetModelInfoRequest(model="mine"))
        assert (info.name, info.vocab_size, info.max_model_len, info.fingerprint) == ("mine", VOCAB, 512, "f1")
        assert list((await h.generate.GenerateOnce(said("w9", max_tokens=1))).choices[0].token_ids)


# what clients get wrong


async def test_log_probabilities_of_one_prompt_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MAX_SCORES", 9)
    async with serving() as h:
        told = await h.generate.GenerateOnce(request([5, 6, 7], prompt_logprobs=2))
        assert len(told.prompt_logprobs) == 2
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await h.generate.GenerateOnce(request([5, 6, 7, 8], prompt_logprobs=2))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    why = "prompt_logprobs is 2 for a prompt of 4 tokens, which is 12 entries; ask for at most 9 in all"
    assert caught.value.details() == why


LONG = "w" * 4_000_000
BAD: dict[str, tuple[Callable[[], generate_pb2.GenerateRequest], str]] = {
    "no prompt": (generate_pb2.GenerateRequest, "the prompt is missing; give text or token_ids"),
    "empty text": (lambda: said(""), "the prompt is empty; give text with at least one token"),
    "only spaces": (lambda: said("   "), "the prompt is empty; give text with at least one token"),
    "no ids": (lambda: request([]), "the prompt is empty; give token_ids with at least one token"),
    "id beyond the vocabulary": (
        lambda: request([5, 1000]),
        "the prompt has token id 1000; the model's ids go from 0 to 999",
    ),
    "id far beyond": (
        lambda: request([4_000_000_000]),
        "the prompt has token id 4000000000; the model's ids go from 0 to 999",
    ),
    "too long": (
        lambda: request([5] * 512),
        "the prompt is 512 tokens; this model's maximum context length is 512 tokens, so give at most 511",
    ),
    "4 MB of text": (
        lambda: said(LONG),
        "the prompt is 4000000 bytes; this model's maximum context length is 512 tokens",
    ),
    "4 million ids": (
        lambda: request([5] * 4_000_000),
        "the prompt is 4000000 tokens; this model's maximum context length is 512",
    ),
    "NaN": (lambda: request(temperature=math.nan), "temperature is nan; give a number from 0 to 100"),
    "negative temperature": (lambda: request(temperature=-0.1), "temperature is -0.1; give a number from 0 to 100"),
    "top_p 0": (lambda: request(top_p=0.0), "top_p is 0; give a number above 0 to 1"),
    "top_p 2": (lambda: request(top_p=2.0), "top_p is 2; give a number above 0 to 1"),
    "max_tokens 0": (lambda: request(max_tokens=0), "max_tokens is 0; give a whole number of 1 or more"),
    "max_tokens -3": (lambda: request(max_tokens=-3), "max_tokens is -3; give a whole number of 1 or more"),
    "n 65": (lambda: request(n=65), "n is 65; give a whole number of 1 to 64"),
    "negative seed": (lambda: request(seed=-1), "seed is -1; give a whole number of 0 to 9223372036854775807"),
    "a million stop strings": (lambda: said("w5", stop=[""] * 1_000_000), "stop has 1000000 entries; give at most 16"),
    "id with a newline": (
        lambda: generate_pb2.GenerateRequest(request_id="a\nb", text="w5"),
        "request_id is 'a\\nb'; give printable ASCII characters only",
    ),
    "endless id": (
        lambda: generate_pb2.GenerateRequest(request_id="a" * 200, text="w5"),
        "request_id has 200 characters; give at most 128",
    ),
}


async def test_each_bad_request_gets_its_sentence_and_the_server_serves_on() -> None:
    async with serving(codec=words()) as h:
        for name, (make, sentence) in BAD.items():
            code, details = await refusal(h.generate.GenerateOnce(make()))
            assert code is grpc.StatusCode.INVALID_ARGUMENT, name
            assert details.startswith(sentence), name
            assert "\n" not in details, name
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await collect(h.generate.Generate(request(top_p=2.0)))
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert not h.prefill().submits
        assert (await h.generate.GenerateOnce(said("w5", max_tokens=3))).usage.completion_tokens == 3


async def test_an_unknown_model_is_not_found() -> None:
    async with serving() as h:
        wanted = (grpc.StatusCode.NOT_FOUND, "model is 'other'; this router serves 'fake'")
        assert await refusal(h.generate.GenerateOnce(generate_pb2.GenerateRequest(model="other"))) == wanted
        assert await refusal(h.generate.Tokenize(generate_pb2.TokenizeRequest(model="other"))) == wanted
        assert await refusal(h.generate.GetModelInfo(generate_pb2.GetModelInfoRequest(model="other"))) == wanted


async def test_bytes_that_are_no_message_are_refused_not_crashed_on() -> None:
    async with serving(codec=words()) as h:
        raw = h.channel.unary_unary("/kvrelay.v1.Generate/GenerateOnce")
        for data in (b"\x12\x02\xff\xfe", b"\xff\xff\xff"):  # a text that is no UTF-8; no protobuf at all
            code, details = await refusal(raw(data))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert details.startswith("the request cannot be read")


async def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    async with serving() as h:
        h.prefill().is_holding = True
        mine = generate_pb2.GenerateRequest(request_id="mine", token_ids={"ids": [5]})
        first = h.generate.GenerateOnce(mine)
        await h.prefill().wait_for(lambda: bool(h.prefill().held))
        code, details = await refusal(h.generate.GenerateOnce(mine))
        assert code is grpc.StatusCode.ALREADY_EXISTS
        assert details == "request_id 'mine' is in use; give another, or none"
        h.prefill().release()
        assert (await first).request_id == "mine"
        assert (await h.generate.GenerateOnce(mine)).request_id == "mine"


async def test_text_without_a_tokenizer_asks_for_ids() -> None:
    async with serving() as h:
        code, details = await refusal(h.generate.GenerateOnce(said("hello")))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details == "the prompt is text but no tokenizer is loaded; give token_ids"


async def test_a_request_that_no_worker_can_ever_hold_is_invalid() -> None:
    async with serving(worker={"num_pages": 4}) as h:
        code, details = await refusal(h.generate.GenerateOnce(request([5] * 60, max_tokens=400)))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details == (
            "prompt and max_tokens together are 460 tokens; the largest decode worker holds 64, so give fewer"
        )


async def test_a_full_queue_says_when_to_come_again_and_tokenises_nothing() -> None:
    options = server_options(port=0, max_backlog_tokens=10, max_queued_requests=1)
    codec = words()
    async with serving(options=options, codec=codec) as h:
        h.prefill().is_holding = True
        calls = [h.generate.GenerateOnce(request([5] * 9)) for _ in range(2)]
        await h.until(lambda: h.router.policy.num_queued == 1 and bool(h.prefill().held))
        codec.backend = None  # nobody may ask it
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await h.generate.GenerateOnce(said("w5 w6"))
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.value.details() == "the router's queue is full: 1 requests of 1"
        assert int(dict(error.value.trailing_metadata())["retry-after-ms"]) > 0
        h.prefill().release()
        await asyncio.gather(*calls)
        assert h.count("rejected") == 1


# health, reflection, secrets, metrics


async def health_of(h: Harness, service: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(h.channel)
    return int((await stub.Check(health_pb2.HealthCheckRequest(service=service))).status)


async def test_health_follows_the_workers() -> None:
    async with serving() as h:
        watch = health_pb2_grpc.HealthStub(h.channel).Watch(
            health_pb2.HealthCheckRequest(service="kvrelay.v1.Generate")
        )
        states = aiter(watch)
        assert (await anext(states)).status == SERVING
        assert [await health_of(h, s) for s in ("", "kvrelay.v1.Generate")] == [SERVING, SERVING]
        await h.decode().kill()
        assert (await anext(states)).status == NOT_SERVING
        assert await health_of(h) == NOT_SERVING
        await h.decode().start()
        assert (await anext(states)).status == SERVING
        watch.cancel()


async def test_without_workers_it_is_unavailable_and_says_so() -> None:
    async with serving(0, 0) as h:
        assert await health_of(h) == NOT_SERVING
        code, details = await refusal(h.generate.GenerateOnce(request()))
        assert (code, details) == (grpc.StatusCode.UNAVAILABLE, "no worker is ready yet; try again later")


async def test_reflection_lists_the_services() -> None:
    async with serving() as h:
        stub = reflection_pb2_grpc.ServerReflectionStub(h.channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        answer = await anext(aiter(call))
        names = {service.name for service in answer.list_services_response.service}
        assert {"kvrelay.v1.Generate", "kvrelay.v1.Cluster", "grpc.health.v1.Health"} <= names
        call.cancel()


async def test_status_counts_what_happened_and_shows_what_workers_hold() -> None:
    async with serving() as h:
        await h.generate.GenerateOnce(request(max_tokens=5))
        await h.until(lambda: all(report is not None for _, report, _ in h.router.workers()))
        status = await h.status()
        assert {k: status.counters[k] for k in ("requests", "finished", "generation_tokens", "prompt_tokens")} == {
            "requests": 1,
            "finished": 1,
            "generation_tokens": 5,
            "prompt_tokens": 3,
        }
        assert [(w.name, w.role, w.state, w.total_pages) for w in status.workers] == [
            ("prefill-0", "prefill", "ready", 256),
            ("decode-0", "decode", "ready", 256),
        ]
        assert status.workers[0].counters["steps"] == 1
        assert (status.num_queued, status.num_in_flight, status.model) == (0, 0, "fake")


async def test_metrics_are_served_under_vllms_names() -> None:
    async with serving(options=server_options(port=0, metrics_port=0)) as h:
        await h.generate.GenerateOnce(request(max_tokens=5))
        page = await page_of(h)
        assert 'kvrelay:time_to_first_token_seconds_count{model_name="fake"} 1.0' in page
        assert 'kvrelay:inter_token_latency_seconds_count{model_name="fake"} 4.0' in page
        assert 'kvrelay:generation_tokens_total{model_name="fake"} 5.0' in page
        assert 'kvrelay:num_requests_running{model_name="fake",worker="decode-0",worker_type="decode"} 0.0' in page


async def page_of(h: Harness, **headers: str) -> str:
    asked = urllib.request.Request(f"http://127.0.0.1:{h.server.metrics_port}/metrics", headers=headers)
    return (await asyncio.to_thread(lambda: urllib.request.urlopen(asked, timeout=20).read())).decode()  # type: ignore[no-any-return]


@pytest.mark.parametrize("escaping", ["", ";escaping=allow-utf-8", ";escaping=underscores"])
async def test_prometheus_gets_the_names_that_dashboards_and_alerts_ask_for(escaping: str) -> None:
    """It would rather have OpenMetrics, in which prometheus_client writes kvrelay_ for kvrelay:."""
    accepts = f"application/openmetrics-text;version=1.0.0{escaping},text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
    async with serving(options=server_options(port=0, metrics_port=0)) as h:
        page = await page_of(h, Accept=accepts)
    assert 'kvrelay:requests_total{model_name="fake"} 0.0' in page
    assert "kvrelay_" not in page


async def test_a_scrape_reads_what_lives_in_the_event_loop_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dictionary that changes while another thread goes through it raises."""
    readers: list[int] = []

    def status(router: Router) -> cluster_pb2.GetStatusResponse:
        readers.append(threading.get_ident())
        return status_of(router)

    monkeypatch.setattr("cluster.front.server.status_of", status)
    async with serving(options=server_options(port=0, metrics_port=0)) as h:
        await page_of(h)
        assert readers == [threading.get_ident()]


async def test_metrics_say_what_whoever_is_on_call_asks() -> None:
    async with serving(options=server_options(port=0, metrics_port=0)) as h:
        h.decode().max_steps = 1
        call = h.generate.Generate(request(max_tokens=5))
        await h.until(lambda: h.decode().steps == 1)
        await refusal(h.generate.GenerateOnce(request([])))
        page = await page_of(h)
        call.cancel()
        await h.until(lambda: h.router.metrics.codes["CANCELLED"] == 1)
        later = await page_of(h)
    ttft = 'kvrelay:time_to_first_token_seconds_count{model_name="fake"} 1.0'
    assert ttft in page, "the first token has left, whatever comes of the request"
    assert ttft in later
    assert 'kvrelay:calls_ended_total{code="INVALID_ARGUMENT",model_name="fake"} 1.0' in page
    assert 'kvrelay:calls_ended_total{code="CANCELLED",model_name="fake"} 1.0' in later
    assert 'kvrelay:num_requests_queued{model_name="fake"} 0.0' in page
    assert 'kvrelay:calls{model_name="fake"} 1.0' in page
    worker = '{model_name="fake",worker="decode-0",worker_type="decode"}'
    for name in ("leased", "fenced", "quarantined"):
        assert f"kvrelay:kv_pages_{name}{worker} 0.0" in page
    for name in ("worker_step_age_seconds", "worker_loop_lag_seconds", "worker_circuit_open", "worker_losses_total"):
        assert f"kvrelay:{name}{worker}" in page
    assert 'kvrelay:worker_events_total{counter="steps",model_name="fake",worker="prefill-0"' in page
    assert 'kvrelay:router_loop_lag_seconds{model_name="fake"}' in page


async def test_a_workers_own_counters_are_told_only_while_it_is_heard() -> None:
    """Once a counter has been 0, Prometheus takes all that it tells for new: old failures would raise an alarm."""
    options = server_options(port=0, metrics_port=0, dead_after_s=0.2, lost_after_s=0.4)
    async with serving(options=options) as h:
        assert (
            'kvrelay:worker_events_total{counter="chunks_failed",model_name="fake",worker="decode-0"'
            in await page_of(h)
        )
        h.decode().is_silent = True
        await h.until(lambda: h.count("workers_lost") == 1)
        page = await page_of(h)
        assert [line for line in page.splitlines() if "worker_events" in line and "decode-0" in line] == []
        assert 'worker_losses_total{model_name="fake",worker="decode-0",worker_type="decode"} 1.0' in page
        h.decode().is_silent = False


async def test_each_request_leaves_one_line_where_that_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvrelay.requests")
    async with serving(options=server_options(port=0, log_requests="json")) as h:
        h.prefill().fail_with = "it broke"
        await h.generate.GenerateOnce(generate_pb2.GenerateRequest(request_id="mine", token_ids={"ids": [5]}))
        await refusal(h.generate.GenerateOnce(request([])))
    lines = [json.loads(record.message) for record in caplog.records if record.name == "kvrelay.requests"]
    whole, refused = lines
    assert (whole["request_id"], whole["code"], whole["client"], whole["model"]) == ("mine", "OK", "", "fake")
    assert (whole["prompt_tokens"], whole["completion_tokens"], whole["attempts"]) == (1, 16, 2)
    assert (whole["prefill_worker"], whole["decode_worker"]) == ("prefill-0", "decode-0")
    assert sum(whole["phases_s"].values()) == pytest.approx(whole["e2e_s"], abs=1e-4)
    assert (refused["code"], refused["model"]) == ("INVALID_ARGUMENT", "fake")
    assert refused["reason"].startswith("the prompt is empty")


# start and stop


async def test_a_taken_port_is_named() -> None:
    async with serving() as h:
        other = RouterServer(server_options(port=h.server.port))
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{h.server.port}: address already in use"):
            await other.start()
        await other.stop()
        metrics = RouterServer(server_options(port=0, metrics_port=h.server.port))
        sentence = (
            f"cannot serve metrics on 127.0.0.1:{h.server.port}: address already in use; give another metrics_port"
        )
        with pytest.raises(OSError, match=sentence):
            await metrics.start()
        await metrics.stop()


async def test_a_drain_lets_running_requests_end_and_refuses_new_ones() -> None:
    async with serving() as h:
        h.prefill().is_holding = True
        running = h.generate.GenerateOnce(request(max_tokens=6))
        await h.prefill().wait_for(lambda: bool(h.prefill().held))
        stopping = asyncio.create_task(h.server.stop(grace_s=20))
        async with asyncio.timeout(20):
            while await health_of(h) == SERVING:
                await asyncio.sleep(0.002)
        code, details = await refusal(h.generate.GenerateOnce(request()))
        assert (code, details) == (grpc.StatusCode.UNAVAILABLE, "the router is stopping; try another")
        h.prefill().release()
        assert list((await running).choices[0].token_ids) == scripted_tokens([5, 6, 7], 6)
        await stopping


async def test_what_outlives_the_grace_fails_as_unavailable_and_is_cancelled_at_the_workers() -> None:
    async with serving() as h:
        h.decode().max_steps = 1
        call = h.generate.Generate(request(max_tokens=6))
        reader = asyncio.create_task(collect(call))
        await h.until(lambda: h.decode().steps == 1)
        await h.server.stop(grace_s=0.05)
        code, details = await refusal(reader)
        assert (code, details) == (grpc.StatusCode.UNAVAILABLE, "the router is stopping; try another")
        await h.until(lambda: not h.decode().running)


async def test_a_closed_port_after_stop() -> None:
    async with serving() as h:
        await h.server.stop()
        channel = open_channel(f"127.0.0.1:{h.server.port}")
        code, _ = await refusal(channel.unary_unary("/kvrelay.v1.Generate/GetModelInfo")(b"", timeout=30))
        assert code is grpc.StatusCode.UNAVAILABLE
        await channel.close()


async def test_targets_reach_the_policy_and_what_is_none_is_refused() -> None:
    async with serving() as h:
        asked: list[tuple[float, float, int]] = []
        assign = h.router.policy.assign

        def seen(shape: RequestShape, now: float, *, is_resent: bool = False) -> Decision:
            asked.append((shape.slo_ttft_s, shape.slo_tpot_s, shape.priority))
            return assign(shape, now, is_resent=is_resent)

        h.router.policy.assign = seen  # type: ignore[method-assign]
        await h.generate.GenerateOnce(
            generate_pb2.GenerateRequest(token_ids={"ids": [5]}, slo_ttft_ms=300, slo_tpot_ms=12.5, priority=-2)
        )
        assert asked == [(0.3, 0.0125, -2)]
        for key, value in (("slo_ttft_ms", -1.0), ("slo_tpot_ms", float("nan"))):
            request = generate_pb2.GenerateRequest(token_ids={"ids": [5]})
            setattr(request, key, value)
            with pytest.raises(grpc.aio.AioRpcError, match=f"{key} is .*; give milliseconds above 0") as error:
                await h.generate.GenerateOnce(request)
            assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
