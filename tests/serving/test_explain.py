"""Where requests' time went, in a cluster of real workers: what they tell, and that it adds up in spite of losses."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from cluster.deploy.local import LocalCluster
from kvrelay.client.client import AsyncClient
from kvrelay.client.types import Completion, ExplainedRequest
from tests.serving.conftest import ModelDir
from tests.serving.harness import Gate, engine_with, random_prompt, router_with, until, worker_with

LENGTHS = (21, 40, 64, 75)
NEW_TOKENS = 80


def _cluster(directory: object) -> LocalCluster:
    worker = worker_with(transports=("shared_memory",), report_interval_s=0.05)
    router = router_with(dead_after_s=0.5)
    engine = engine_with(num_pages=192)
    return LocalCluster(str(directory), prefill=1, decode=2, engine=engine, worker=worker, router=router)


async def _ask(client: AsyncClient) -> list[Completion]:
    return await asyncio.gather(
        *(
            client.generate(
                random_prompt(length, seed=length),
                request_id=f"of-{length}",
                max_tokens=NEW_TOKENS,
                ignore_eos=True,
                timeout_s=60,
            )
            for length in LENGTHS
        )
    )


async def _told(client: AsyncClient, done: list[Completion]) -> list[ExplainedRequest]:
    """Each checked against what its client was told with its last token."""
    all_told = [told for answer in done for told in await client.explain(answer.request_id)]
    for answer, told in zip(done, all_told, strict=True):
        assert answer.timeline is not None
        assert all(one.end_s == two.begin_s for one, two in pairwise(told.spans))
        first = [span for span in told.spans if span.end_s <= told.ttft_s + 1e-9]
        assert sum(span.end_s - span.begin_s for span in first) == pytest.approx(answer.timeline.ttft_s, abs=1e-3)
        assert told.spans[0].begin_s == 0.0
        assert told.spans[-1].end_s == pytest.approx(answer.timeline.e2e_s, abs=1e-3)
        assert (told.moves, told.attempts) == (answer.timeline.moves, answer.timeline.attempts)
    return all_told


def _details(told: ExplainedRequest, name: str) -> list[str]:
    return [detail.worker for span in told.spans for detail in span.details if detail.name == name]


async def test_workers_tell_of_chunks_leases_layers_commits_and_first_steps(model_dir: ModelDir) -> None:
    async with _cluster(model_dir("llama")) as cluster, AsyncClient(cluster.endpoint) as client:
        done = await _ask(client)
        await cluster.settled()
        for told in await _told(client, done):
            for name in ("lease", "segment", "commit"):
                assert _details(told, name)[0] == "prefill-0"
            assert _details(told, "first_step") == [told.spans[-1].worker]
            chunks = [span.words for span in told.spans if span.name == "prefill"]
            assert chunks[0].startswith(f"{told.prompt_tokens} tokens in ")
            assert "exposed" in next((s.words for s in told.spans if s.name == "handoff"), "exposed")


async def test_a_moved_request_has_a_part_at_each_worker_and_a_lost_one_a_second_attempt(model_dir: ModelDir) -> None:
    async with _cluster(model_dir("llama")) as cluster, AsyncClient(cluster.endpoint) as client:
        gates = [Gate(worker.engine, at=20) for worker in cluster.decode]
        asking = asyncio.create_task(_ask(client))
        await until(lambda: all(worker.role.requests for worker in cluster.decode), "both decode some")
        first, second = cluster.decode
        first.is_draining = True
        gates[0].open()
        await until(lambda: not first.role.requests, "it is left by all")
        first.is_draining = False
        await second._server.stop(0)
        gates[1].open()
        all_told = await _told(client, await asking)
        moved = [told for told in all_told if told.moves]
        assert moved
        for told in moved:
            writers = [span.worker for span in told.spans if span.name == "decode"]
            assert writers[:2] == ["decode-0", "decode-1"]
            assert "move" in [detail.name for span in told.spans for detail in span.details]
        again = [told for told in all_told if told.attempts == 2]
        assert again
        for told in again:
            assert "decode-1 is lost" in next(span.words for span in told.spans if span.name == "retry")
            assert told.spans[-1].worker == "decode-0"
