"""Several models in one cluster: each request gets the tokens of its own, and models come and go while others serve."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx2
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from cluster.deploy.local import LocalCluster
from cluster.router.live.requests import RequestFailed
from kvrelay.client.client import AsyncClient
from kvrelay.client.types import KvrelayError
from tests.serving.conftest import ModelDir
from tests.serving.harness import ENGINE, WORKER, random_prompt, router_with, transformers_tokens, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPTS = [random_prompt(length, seed=length) for length in (5, 40, 90)]
TOKENS = 12
Expected = dict[str, list[list[int]]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(model_dir: ModelDir) -> AsyncIterator[LocalCluster]:
    models = {"gemma": str(model_dir("gemma2"))}
    router = router_with(model_name="llama", http_ports=(0,))
    async with LocalCluster(
        str(model_dir("llama")), models=models, engine=ENGINE, worker=WORKER, router=router
    ) as made:
        yield made


@pytest.fixture(scope="module")
def expected(model_dir: ModelDir) -> Expected:
    return {
        name: transformers_tokens(model_dir(kind), PROMPTS, TOKENS)
        for name, kind in (("llama", "llama"), ("gemma", "gemma2"))
    }


async def answer(client: AsyncClient, model: str, prompt: Sequence[int], tokens: int = TOKENS) -> list[int]:
    how: dict[str, Any] = {"temperature": 0.0, "max_tokens": tokens, "min_tokens": tokens}
    return list((await client.generate(list(prompt), model=model, **how)).token_ids)


async def test_each_request_is_answered_by_the_model_that_it_names(cluster: LocalCluster, expected: Expected) -> None:
    async with AsyncClient(cluster.endpoint) as client:
        asked = [(model, i) for model in expected for i in range(len(PROMPTS))] * 2
        answers = await asyncio.gather(*(answer(client, model, PROMPTS[i]) for model, i in asked))
        assert answers == [expected[model][i] for model, i in asked]
        assert await answer(client, "", PROMPTS[0]) == expected["llama"][0], "without a name it is the cluster's own"
        with pytest.raises(KvrelayError, match="this router serves 'llama' and 'gemma'") as refused:
            await answer(client, "gpt", PROMPTS[0])
        assert refused.value.code == "NOT_FOUND"
        cluster.check_invariants()
    await cluster.settled()


async def test_an_id_is_of_one_request_whatever_model_it_asks_for(cluster: LocalCluster) -> None:
    async with AsyncClient(cluster.endpoint) as client:
        how: dict[str, Any] = {"request_id": "one", "max_tokens": 100, "min_tokens": 100}
        asked = [client.generate(PROMPTS[0], model=model, **how) for model in ("llama", "gemma")]
        first, second = await asyncio.gather(*asked, return_exceptions=True)
    told = [each for each in (first, second) if isinstance(each, KvrelayError)]
    assert [each.code for each in told] == ["ALREADY_EXISTS"]


async def test_http_has_all_of_them(cluster: LocalCluster, expected: Expected) -> None:
    assert cluster.server is not None
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{cluster.server.http_port}") as http:
        models = (await http.get("/v1/models")).json()["data"]
        assert [(each["id"], "parent" in each) for each in models] == [("llama", False), ("gemma", False)]
        body = {"model": "gemma", "prompt": PROMPTS[1], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        told = (await http.post("/v1/completions", json={**body, "return_token_ids": True})).json()
        assert (told["model"], told["choices"][0]["token_ids"]) == ("gemma", expected["gemma"][1])
        assert (await http.post("/v1/completions", json={**body, "model": "gpt"})).status_code == 404
        page = (await http.get("/metrics")).text
    families = {family.name: family for family in text_string_to_metric_families(page)}
    told_ready = {s.labels["model_name"]: s.value for s in families["kvrelay:router_ready"].samples}
    assert told_ready == {"llama": 1, "gemma": 1}
    workers = {(s.labels["model_name"], s.labels["worker"]) for s in families["kvrelay:worker_ready"].samples}
    assert workers >= {("llama", "decode-0"), ("gemma", "gemma-decode-0")}
    assert page.count("# HELP kvrelay:worker_ready ") == 1, "a family stands there once"


async def test_operators_see_and_reach_the_workers_of_each(cluster: LocalCluster) -> None:
    assert cluster.server is not None
    catalog = cluster.server.catalog
    status = catalog.status
    assert list(status.models) == ["llama", "gemma"]
    assert {worker.name: worker.model for worker in status.workers} == {
        "prefill-0": "",
        "decode-0": "",
        "gemma-prefill-0": "gemma",
        "gemma-decode-0": "gemma",
    }
    router = catalog.router_of("gemma-decode-0")
    with pytest.raises(RequestFailed, match="gemma-decode-0 is the only worker for decode"):
        router.drain("gemma-decode-0")
    with pytest.raises(RequestFailed, match="there is no worker 'clerk'; there are prefill-0, decode-0, gemma-pre"):
        catalog.router_of("clerk")
    assert set(catalog.takers) == {"prefill", "decode", "prefill of gemma", "decode of gemma"}


async def test_a_model_goes_and_comes_while_others_serve(cluster: LocalCluster, expected: Expected) -> None:
    """Its running requests end whole; the others do not notice."""
    server = cluster.server
    assert server is not None
    wanted = dict(server.options.models)
    async with AsyncClient(cluster.endpoint) as client:
        others = asyncio.create_task(_keep_asking(client, "llama"))
        running = [asyncio.create_task(answer(client, "gemma", prompt, 200)) for prompt in PROMPTS]
        gemma = server.catalog.of("gemma")
        await until(lambda: gemma.router.num_live == len(PROMPTS), "they run")
        await server.take_models({})
        assert "gemma" in server.catalog.standing.models, "it has requests"
        with pytest.raises(KvrelayError, match=r"this router serves 'llama'$"):
            await answer(client, "gemma", PROMPTS[0])
        assert [tokens[:TOKENS] for tokens in await asyncio.gather(*running)] == expected["gemma"]
        await until(lambda: "gemma" not in server.catalog.standing.models, "its last call has ended")
        own = [worker for worker in cluster._endpoints if not worker.model]
        server.set_workers(own)
        counted = server.catalog.status.counters["finished"]
        await until(lambda: server.catalog.leaving("gemma") is None, "it is forgotten")
        assert server.catalog.status.counters["finished"] >= counted, "what it has answered is"
        assert await server.models.why_not({"bad": "/nowhere"})
        assert not await server.models.why_not(wanted)
        await server.take_models(wanted)
        server.set_workers(cluster._endpoints)
        await until(lambda: server.catalog.is_whole, "its workers are met again")
        assert await answer(client, "gemma", PROMPTS[2]) == expected["gemma"][2]
        others.cancel()
        assert await others == expected["llama"][0]
    await cluster.settled()


async def _keep_asking(client: AsyncClient, model: str) -> list[int]:
    """What is said each time."""
    said = await answer(client, model, PROMPTS[0])
    try:
        while True:
            assert await answer(client, model, PROMPTS[0]) == said
    except asyncio.CancelledError:
        return said
