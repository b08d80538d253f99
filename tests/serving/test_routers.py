"""Several routers over the same workers: each has streams of its own, and what one loses is its own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cluster.deploy.local import LocalCluster
from kvrelay.client.client import AsyncClient
from kvrelay.client.types import KvrelayError
from tests.serving.conftest import ModelDir
from tests.serving.harness import ENGINE, ROUTER, WAIT_S, WORKER, Gate, random_prompt, transformers_tokens, until

NEW_TOKENS = 12
PROMPTS = [random_prompt(length, seed=length) for length in (20, 70, 33, 90)]


async def test_two_routers_serve_the_same_tokens_from_the_same_workers(model_dir: ModelDir) -> None:
    directory = model_dir("llama")
    expected = transformers_tokens(directory, PROMPTS, NEW_TOKENS)
    async with LocalCluster(str(directory), engine=ENGINE, worker=WORKER, router=ROUTER) as cluster:
        second = await cluster.add_router()
        clients = [AsyncClient(cluster.endpoint), AsyncClient(f"127.0.0.1:{second.port}")]
        answers = await asyncio.gather(
            *(
                clients[i % 2].generate(prompt, max_tokens=NEW_TOKENS, min_tokens=NEW_TOKENS, temperature=0.0)
                for i, prompt in enumerate(PROMPTS)
            )
        )
        assert [list(answer.token_ids) for answer in answers] == expected
        assert all(server.router.metrics.counts["finished"] == 2 for server in cluster.routers)
        (cluster_id,) = {(await client.status()).cluster_id for client in clients}
        assert cluster_id.startswith("local-")
        await cluster.settled()
        cluster.check_invariants()
        for client in clients:
            await client.close()


async def test_a_lost_router_takes_only_its_own_requests_with_it(model_dir: ModelDir) -> None:
    directory = model_dir("llama")
    [expected] = transformers_tokens(directory, PROMPTS[:1], NEW_TOKENS)
    async with LocalCluster(str(directory), engine=ENGINE, worker=WORKER, router=ROUTER) as cluster:
        second = await cluster.add_router()
        kept, lost = AsyncClient(cluster.endpoint), AsyncClient(f"127.0.0.1:{second.port}")
        gate = Gate(cluster.decode[0].engine)
        ask: dict[str, Any] = {
            "max_tokens": NEW_TOKENS,
            "min_tokens": NEW_TOKENS,
            "temperature": 0.0,
            "timeout_s": WAIT_S,
        }
        goes_on = asyncio.create_task(kept.generate(PROMPTS[0], **ask))
        goes_down = asyncio.create_task(lost.generate(PROMPTS[1], **ask))
        decode = cluster.decode[0]
        await until(lambda: len(decode.role.policy.request_ids) == 2, "both requests are at the decode worker")
        await gate.reached()
        await second.stop()
        await until(lambda: decode.streams.link(second.router.router_id) is None, "the worker has seen it go")
        gate.open()
        assert list((await goes_on).token_ids) == expected
        with pytest.raises(KvrelayError) as error:
            await goes_down
        assert error.value.code == "UNAVAILABLE"
        await cluster.settled()
        cluster.check_invariants()
        await kept.close()
        await lost.close()


async def test_a_router_learns_from_workers_what_others_have_had_read(model_dir: ModelDir) -> None:
    long = random_prompt(70, seed=1)
    greedy: dict[str, Any] = {"max_tokens": 2, "temperature": 0.0, "timeout_s": WAIT_S}
    async with LocalCluster(str(model_dir("llama")), prefill=2, engine=ENGINE, worker=WORKER, router=ROUTER) as cluster:
        async with AsyncClient(cluster.endpoint) as client:
            await client.generate(long, prefill_worker="prefill-1", decode_worker="decode-0", **greedy)
        second = await cluster.add_router()
        async with AsyncClient(f"127.0.0.1:{second.port}") as client:
            answer = await client.generate(long, **greedy)
        assert answer.timeline is not None
        assert answer.usage is not None
        assert (answer.timeline.prefill_worker, answer.usage.cached_tokens) == ("prefill-1", 64)


async def test_who_has_written_an_answer_reads_what_goes_on_from_it(model_dir: ModelDir) -> None:
    prompts = [random_prompt(length, seed=length) for length in (20, 21)]
    ask: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "temperature": 0.0, "timeout_s": WAIT_S}
    pools: dict[str, Any] = {"prefill": 0, "decode": 0, "mixed": 2}
    async with (
        LocalCluster(str(model_dir("llama")), **pools, engine=ENGINE, worker=WORKER, router=ROUTER) as cluster,
        AsyncClient(cluster.endpoint) as client,
    ):
        answers = await asyncio.gather(*(client.generate(prompt, **ask) for prompt in prompts))
        said = [*prompts[1], *answers[1].token_ids]
        assert answers[1].timeline is not None
        router = cluster.routers[0].router
        writer = router.policy.workers.prefill.accounts[answers[1].timeline.decode_worker]
        pages = cluster.mixed[0].page_hashes(said)
        assert len(pages) == 5
        await until(lambda: writer.prefixes.keys() >= {*pages}, "the router is told of the answer's pages")
        again = await client.generate([*said, 5, 6, 7], **ask)
        assert again.timeline is not None
        assert again.usage is not None
        assert (again.timeline.prefill_worker, again.usage.cached_tokens) == (writer.view.name, 80)
