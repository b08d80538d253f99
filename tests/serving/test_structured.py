"""Answers of a form, through the whole cluster: whole where they may end, the same over HTTP, with all else that a
request may ask for; and what cannot be kept is refused while others go on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx2
import jsonschema
import pytest
import pytest_asyncio

from cluster.deploy.local import LocalCluster
from engine.types import FinishReason
from kvrelay.client.client import AsyncClient
from kvrelay.client.types import KvrelayError
from tests.serving.conftest import ModelDir
from tests.serving.harness import WAIT_S, WORKER, counters, engine_with, random_prompt, router_with

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "names": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,5}$"}, "maxItems": 2},
        "home": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/home"}]},
    },
    "required": ["kind", "age", "names", "home"],
    "additionalProperties": False,
    "$defs": {"home": {"type": "object", "properties": {"no": {"const": 7}}, "additionalProperties": False}},
}
LONGEST = 300  # tokens, with the most spaces between them
ASKED: dict[str, Any] = {"max_tokens": LONGEST, "timeout_s": WAIT_S}


@dataclass
class Served:
    cluster: LocalCluster
    client: AsyncClient
    http: httpx2.AsyncClient

    async def post(self, path: str, **body: Any) -> tuple[int, Any]:
        answer = await self.http.post(path, json=body)
        return answer.status_code, answer.json()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(model_dir: ModelDir) -> AsyncIterator[Served]:
    """With few pages where answers are written, so that some are preempted."""
    cluster = LocalCluster(
        str(model_dir("llama")),
        prefill=1,
        decode=1,
        mixed=1,
        engine=engine_with(num_pages=96),
        decode_engine=engine_with(num_pages=40),
        worker=WORKER,
        router=router_with(http_ports=(0,)),
    )
    async with cluster, AsyncClient(cluster.endpoint) as client:
        assert cluster.server is not None
        base = f"http://127.0.0.1:{cluster.server.http_port}"
        async with httpx2.AsyncClient(base_url=base, timeout=WAIT_S) as http:
            yield Served(cluster, client, http)


async def test_every_answer_keeps_its_schema_and_ends(served: Served) -> None:
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "n": 3},
        {"temperature": 1.5, "logprobs": 2, "repetition_penalty": 1.1},
        {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "logit_bias": {7: 5.0}},
        {"temperature": 1.0, "bad_words": ["cat"], "min_tokens": 5},
        {"temperature": 1.0, "stop": ["never there"]},
    ]
    asked = [{**way, "seed": seed} for seed in range(3) for way in ways]
    whole = await asyncio.gather(
        *(
            served.client.generate(random_prompt(40, seed=i), json_schema=SCHEMA, **way, **ASKED)
            for i, way in enumerate(asked)
        )
    )
    for answer in whole:
        for choice in answer.choices:
            assert choice.finish_reason is FinishReason.STOP
            jsonschema.validate(json.loads(choice.text), SCHEMA)
    assert len({answer.text for answer in whole}) > 10
    again = await served.client.generate(random_prompt(40, seed=1), json_schema=json.dumps(SCHEMA), **asked[1], **ASKED)
    assert [choice.token_ids for choice in again.choices] == [choice.token_ids for choice in whole[1].choices]
    await served.cluster.settled()
    served.cluster.check_invariants()
    assert counters(served.cluster)["chunks_failed"] == 0


@pytest.mark.parametrize(
    ("form", "possible"),
    [
        ({"choice": ["yes", "no", "perhaps"]}, {"yes", "no", "perhaps"}),
        ({"regex": "(a|b)x{2}"}, {"axx", "bxx"}),
        ({"grammar": 'root ::= "left" | "right"'}, {"left", "right"}),
        ({"grammar": 'start: ("u" | "v") "!"'}, {"u!", "v!"}),
    ],
)
async def test_an_answer_is_one_of_those_that_are_possible(
    form: dict[str, Any], possible: set[str], served: Served
) -> None:
    asked = {**ASKED, "temperature": 5.0}
    found = [(await served.client.generate("Say", seed=seed, **form, **asked)).text for seed in range(12)]
    assert set(found) <= possible
    status, body = await served.post(
        "/v1/completions", prompt="Say", structured_outputs=form, seed=3, max_tokens=LONGEST, temperature=5.0
    )
    assert (status, body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == (200, found[3], "stop")


async def test_completions_have_openai_s_formats(served: Served) -> None:
    for given, schema in (
        ({"type": "json_schema", "json_schema": {"name": "pet", "strict": True, "schema": SCHEMA}}, SCHEMA),
        ({"type": "json_object"}, {"type": "object"}),
    ):
        asked = {"prompt": "A pet:", "response_format": given, "max_tokens": LONGEST, "seed": 5, "temperature": 0.0}
        status, body = await served.post("/v1/completions", **asked)
        assert status == 200, body
        if body["choices"][0]["finish_reason"] == "stop":  # of any object there is no longest
            jsonschema.validate(json.loads(body["choices"][0]["text"]), schema)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"json_schema": {"type": "strin"}}, "structured.json_schema cannot be kept: Invalid type: strin"),
        ({"json_schema": "{"}, "structured.json_schema cannot be read: Expecting property name"),
        ({"regex": "("}, "structured.regex cannot be kept: "),
        ({"choice": []}, "structured.choice has 0 texts; give 1 to 1024, none empty"),
        ({"regex": "a", "choice": ["b"]}, "regex and choice are given; an answer has one form"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos is set with structured, whose answers end by EOS"),
        ({"regex": "x" * 131_073}, "structured.regex has 131073 characters; give at most 131072"),
    ],
)
async def test_what_means_nothing_is_refused(form: dict[str, Any], said: str, served: Served) -> None:
    with pytest.raises(KvrelayError) as caught:
        await served.client.generate("Say", **form)
    assert caught.value.code == "INVALID_ARGUMENT"
    assert caught.value.message.startswith(said)


async def test_what_leaves_no_token_is_the_request_s_own_fault(served: Served) -> None:
    """Nobody is tried again for it, and no worker blamed."""
    before = counters(served.cluster)["router_retries"]
    with pytest.raises(KvrelayError) as caught:
        await served.client.generate("Say", regex="[0-9]{4}", allowed_token_ids=[3, 4], **ASKED)
    own = "allowed_token_ids has none that keeps the answer's form"
    assert caught.value.message in (f"prefill-0: {own}", f"mixed-0: {own}")
    assert caught.value.code == "INVALID_ARGUMENT"
    assert counters(served.cluster)["router_retries"] == before
    assert (await served.client.generate("Say", choice=["yes"], **ASKED)).text == "yes"
