"""kvrelay's own clients of OpenAI's API, against a router: what they would find at any other server, too."""

from __future__ import annotations

from contextlib import aclosing, nullcontext

import pytest

from kvrelay.bench.openai import OpenAITarget
from kvrelay.bench.options import PlayOptions, WorkloadOptions
from kvrelay.bench.run import run
from kvrelay.client.openai_http import OpenAIServer
from kvrelay.client.types import KvrelayError
from tests.cluster.front.http.harness import http, words

WORKLOAD = WorkloadOptions(num_prompts=6, random_input_len=8, random_output_len=5)


async def test_a_benchmark_counts_the_same_over_http_and_grpc() -> None:
    async with http(codec=words()) as h:
        target = OpenAITarget(base_url=f"{h.base}/v1", vocab_size=500)
        by_http = await run(target, WORKLOAD, PlayOptions(), watch=lambda _: nullcontext(lambda outcome: None))
        endpoint = f"127.0.0.1:{h.harness.server.port}"
        by_grpc = await run(endpoint, WORKLOAD, PlayOptions(), watch=lambda _: nullcontext(lambda outcome: None))
        for (model, outcomes, _), name in ((by_http, "fake"), (by_grpc, "fake")):
            assert model.name == name
            assert [(each.code, each.input_len, each.output_len) for each in outcomes] == [("", 8, 5)] * 6
            assert all(each.usage and each.usage.prompt_tokens == 8 for each in outcomes)


async def test_what_a_server_refuses_is_told_with_grpcs_code() -> None:
    async with http(token="the-token-of-somebody") as h, OpenAIServer(h.base, key="wrong-wrong-wrong-wrong") as server:
        with pytest.raises(KvrelayError) as error:
            await server.get("/v1/models")
        assert error.value.code == "UNAUTHENTICATED"
    async with http() as h, OpenAIServer(h.base, key="") as server:
        with pytest.raises(KvrelayError, match="the prompt is empty") as error:
            async with aclosing(server.events("/v1/completions", {"prompt": [[]]})) as events:
                [_ async for _ in events]
        assert error.value.code == "INVALID_ARGUMENT"


async def test_where_nothing_answers_it_says_so() -> None:
    async with OpenAIServer("http://127.0.0.1:9", key="") as server:
        with pytest.raises(KvrelayError, match=r"nothing answers at http://127\.0\.0\.1:9"):
            await server.get("/v1/models")
