"""What a client gets wrong: the right status, one sentence that names the key, the value and the mend, and the server
serves on as if nothing had been.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from cluster.deploy.local import LocalCluster
from kvrelay.client.client import AsyncClient
from kvrelay.client.types import GenerateOptions, KvrelayError
from kvrelay.demo_model import BOS_ID
from kvrelay.v1 import generate_pb2
from tests.serving.conftest import ModelDir
from tests.serving.harness import PAGE_SIZE, ROUTER, counters, engine_with, random_prompt, worker_with
from tests.zoo import VOCAB
from worker.wire.rpc import open_channel

pytestmark = pytest.mark.asyncio(loop_scope="module")

MAX_MODEL_LEN = 512
DECODE_PAGES = 16
MOST_TOKENS = DECODE_PAGES * PAGE_SIZE
MANY_BYTES = 4_000_000  # below the router's max_message_bytes
GOOD = random_prompt(20, seed=3)
METHODS = ("Generate", "GenerateOnce")


@dataclass
class Served:
    cluster: LocalCluster
    client: AsyncClient
    channel: grpc.aio.Channel
    tokens: tuple[int, ...]  # of the good request

    async def check(self) -> None:
        """The good request gets its tokens, and nobody holds anything."""
        answer = await self.client.generate(GOOD, temperature=0.0, timeout_s=60)
        assert answer.token_ids == self.tokens
        await self.cluster.settled()
        self.cluster.check_invariants()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(model_dir: ModelDir) -> AsyncIterator[Served]:
    cluster = LocalCluster(
        str(model_dir("llama")),
        engine=engine_with(max_model_len=MAX_MODEL_LEN),
        decode_engine=engine_with(max_model_len=MAX_MODEL_LEN, num_pages=DECODE_PAGES),
        worker=worker_with(),
        router=ROUTER,
    )
    async with cluster, AsyncClient(cluster.endpoint) as client:
        channel = open_channel(cluster.endpoint)
        answer = await client.generate(GOOD, temperature=0.0, timeout_s=60)
        yield Served(cluster, client, channel, answer.token_ids)
        await channel.close()


BAD_OPTIONS: dict[str, tuple[GenerateOptions, str]] = {
    "top_p 0": (GenerateOptions(top_p=0.0), "top_p is 0; give a number above 0 to 1"),
    "top_p 2": (GenerateOptions(top_p=2.0), "top_p is 2; give a number above 0 to 1"),
    "typical_p 0": (GenerateOptions(typical_p=0.0), "typical_p is 0; give a number above 0 to 1"),
    "min_p 1.5": (GenerateOptions(min_p=1.5), "min_p is 1.5; give a number from 0 to 1"),
    "top_k -1": (GenerateOptions(top_k=-1), "top_k is -1; give a whole number of 0 or more"),
    "nan": (GenerateOptions(temperature=float("nan")), "temperature is nan; give a number from 0 to 100"),
    "inf": (GenerateOptions(temperature=float("inf")), "temperature is inf; give a number from 0 to 100"),
    "cold": (GenerateOptions(temperature=-0.5), "temperature is -0.5; give a number from 0 to 100"),
    "penalty 0": (
        GenerateOptions(repetition_penalty=0.0),
        "repetition_penalty is 0; give a number from 0.015625 to 100",
    ),
    "presence 3": (GenerateOptions(presence_penalty=3.0), "presence_penalty is 3; give a number from -2 to 2"),
    "max_tokens 0": (GenerateOptions(max_tokens=0), "max_tokens is 0; give a whole number of 1 or more"),
    "max_tokens -1": (GenerateOptions(max_tokens=-1), "max_tokens is -1; give a whole number of 1 or more"),
    "min_tokens": (GenerateOptions(min_tokens=9, max_tokens=8), "min_tokens is 9; give a whole number of 0 to 8"),
    "seed -1": (GenerateOptions(seed=-1), "seed is -1; give a whole number of 0 to"),
    "n 0": (GenerateOptions(n=0), "n is 0; give a whole number of 1 to 64"),
    "n 65": (GenerateOptions(n=65), "n is 65; give a whole number of 1 to 64"),
    "logprobs 21": (GenerateOptions(logprobs=21), "logprobs is 21; give a whole number of 0 to 20"),
    "stops": (GenerateOptions(stop=["x"] * 10_000), "stop has 10000 entries; give at most 16"),
    "long stop": (GenerateOptions(stop="x" * 1025), "stop has a string of 1025 characters; give 1 to 1024"),
    "no stop": (GenerateOptions(stop=[""]), "stop has a string of 0 characters; give 1 to 1024"),
    "stop ids": (GenerateOptions(stop_token_ids=[VOCAB]), f"stop_token_ids has {VOCAB}; the model's ids go from 0 to"),
    "bias": (GenerateOptions(logit_bias={5: 100.5}), "logit_bias of 5 is 100.5; give a number from -100 to 100"),
    "bias nan": (GenerateOptions(logit_bias={5: float("nan")}), "logit_bias of 5 is nan; give a number from -100 to"),
    "bias id": (GenerateOptions(logit_bias={VOCAB: 1.0}), f"logit_bias has {VOCAB}; the model's ids go from 0 to"),
    "biases": (GenerateOptions(logit_bias=dict.fromkeys(range(1025), 1.0)), "logit_bias has 1025 entries; give at"),
    "allowed": (GenerateOptions(allowed_token_ids=[-1]), "allowed_token_ids has -1; the model's ids go from 0 to"),
    "all allowed": (GenerateOptions(allowed_token_ids=[1] * 8193), "allowed_token_ids has 8193 entries; give at most"),
    "bad word": (GenerateOptions(bad_words=[" "]), "bad_words has one of 1 characters; give 1 to 256"),
    "bad words": (GenerateOptions(bad_words=["x"] * 129), "bad_words has 129 entries; give at most 128"),
    "scores": (GenerateOptions(prompt_logprobs=21), "prompt_logprobs is 21; give a whole number of 0 to 20"),
    "id": (GenerateOptions(request_id="a\nb"), "request_id is 'a\\nb'; give printable ASCII characters only"),
    "long id": (GenerateOptions(request_id="a" * 129), "request_id has 129 characters; give at most 128"),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
async def test_an_option_out_of_range_is_refused(case: str, served: Served) -> None:
    options, sentence = BAD_OPTIONS[case]
    await _is_refused(served, GOOD, options, "INVALID_ARGUMENT", sentence)
    await served.check()


BAD_PROMPTS: dict[str, tuple[Callable[[], str | list[int]], GenerateOptions, str]] = {
    "longer than the model": (
        lambda: random_prompt(MAX_MODEL_LEN, seed=1),
        GenerateOptions(),
        "the prompt is 512 tokens; this model's maximum context length is 512 tokens, so give at most 511",
    ),
    "text longer than the model": (lambda: "word " * 2000, GenerateOptions(), "so give at most 511"),
    "4 MB": (lambda: "x" * MANY_BYTES, GenerateOptions(), "the prompt is 4000000 "),
    "an id out of range": (
        lambda: [*GOOD, VOCAB],
        GenerateOptions(),
        f"the prompt has token id {VOCAB}; the model's ids go from 0 to {VOCAB - 1}",
    ),
    "a huge id": (lambda: [2**32 - 1], GenerateOptions(), "the prompt has token id 4294967295"),
    "no ids": (list, GenerateOptions(), "the prompt is empty; give token_ids with at least one token"),
    "more than the pool": (
        lambda: random_prompt(200, seed=1),
        GenerateOptions(max_tokens=57),
        f"prompt and max_tokens together are 257 tokens; the largest decode worker holds {MOST_TOKENS}, so give fewer",
    ),
}


@pytest.mark.parametrize("case", BAD_PROMPTS)
async def test_a_prompt_that_cannot_be_served_is_refused(case: str, served: Served) -> None:
    prompt, options, sentence = BAD_PROMPTS[case]
    await _is_refused(served, prompt(), options, "INVALID_ARGUMENT", sentence)
    await served.check()


async def test_the_longest_prompt_that_fits_the_pool_is_served(served: Served) -> None:
    answer = await served.client.generate(
        random_prompt(200, seed=1), max_tokens=56, temperature=0.0, ignore_eos=True, timeout_s=60
    )
    assert len(answer.token_ids) == MOST_TOKENS - 200
    await served.check()


async def test_an_empty_text_is_a_prompt_of_the_token_that_begins_each(served: Served) -> None:
    answer = await served.client.generate("", temperature=0.0, timeout_s=60)
    assert answer.token_ids == (await served.client.generate([BOS_ID], temperature=0.0, timeout_s=60)).token_ids
    await served.check()


async def test_another_model_is_not_found(served: Served) -> None:
    await _is_refused(served, GOOD, GenerateOptions(model="gpt-5"), "NOT_FOUND", "model is 'gpt-5'; this router serves")
    await served.check()


NOT_UTF8 = b"\x12\x04\xff\xfe\xfd\xfc"  # field 2, the text
RAW: dict[str, tuple[bytes, str]] = {
    "not UTF-8": (NOT_UTF8, "the request cannot be read; send a message of this method, with strings in UTF-8"),
    "cut off": (b"\x12\x40abc", "the request cannot be read"),
    "no prompt": (b"", "the prompt is missing; give text or token_ids"),
    "a million ids": (
        b"\x1a\xc4\x84\x3d\x0a\xc0\x84\x3d" + b"\x07" * 1_000_000,
        "the prompt is 1000000 tokens; this model's maximum context length is 512 tokens, so give at most 511",
    ),
}


@pytest.mark.parametrize("case", RAW)
@pytest.mark.parametrize("method", METHODS)
async def test_bytes_that_no_client_of_ours_sends_are_refused(method: str, case: str, served: Served) -> None:
    data, sentence = RAW[case]
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await _call_raw(served.channel, method, data)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert sentence in (refused.value.details() or "")
    await served.check()


async def test_a_request_id_in_use_is_refused_and_its_owner_is_served(served: Served) -> None:
    first = served.client.stream(GOOD, request_id="mine", max_tokens=200, ignore_eos=True, seed=1, timeout_s=60)
    await anext(first)
    sentence = "request_id 'mine' is in use; give another, or none"
    await _is_refused(served, GOOD, GenerateOptions(request_id="mine"), "ALREADY_EXISTS", sentence)
    async for _ in first:
        pass
    assert len(first.completion().token_ids) == 200
    again = await served.client.generate(GOOD, request_id="mine", max_tokens=2, timeout_s=60)
    assert again.request_id == "mine"
    await served.check()


async def test_nothing_of_this_reached_a_worker(served: Served) -> None:
    """The last of this module: only prompts that were served were computed, and nothing failed."""
    counts = counters(served.cluster)
    assert counts["handoffs_failed"] == 0
    assert counts["router_retries"] == 0
    assert counts["router_requests"] == counts["router_finished"] + counts["router_failed"] + counts["router_cancelled"]


async def _is_refused(
    served: Served, prompt: str | list[int], options: GenerateOptions, code: str, sentence: str
) -> None:
    with pytest.raises(KvrelayError) as once:
        await served.client.generate(prompt, timeout_s=60, **options)
    with pytest.raises(KvrelayError) as streamed:
        async for _ in served.client.stream(prompt, timeout_s=60, **options):
            pass
    for error in (once.value, streamed.value):
        assert error.code == code
        assert sentence in error.message
        assert error.message.count("\n") == 0
        assert len(error.message) < 300


async def _call_raw(channel: grpc.aio.Channel, method: str, data: bytes) -> None:
    path = f"/kvrelay.v1.Generate/{method}"
    if method == "Generate":
        async for _ in channel.unary_stream(path, None, generate_pb2.GenerateResponse.FromString)(data, timeout=60):
            pass
    else:
        await channel.unary_unary(path, None, generate_pb2.GenerateOnceResponse.FromString)(data, timeout=60)
