"""The replanner beside a real cluster: what it sees is what came, and what it decides comes about while streams run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cluster.deploy.local import LocalCluster
from kvrelay.client.client import AsyncClient, Client
from kvrelay.client.types import Completion
from kvrelay.replan import replanner as replanners
from kvrelay.replan.journal import Entry, Journal
from kvrelay.replan.options import Asked
from kvrelay.replan.replanner import Replanner
from placement.plan import Slo
from placement.replan import play as plays
from placement.replan.arrangements import SetRole
from placement.replan.policy import Decision, Played, Terms
from tests.serving.conftest import ModelDir
from tests.serving.harness import (
    engine_with,
    random_prompt,
    router_with,
    state_of,
    transformers_tokens,
    until,
    worker_with,
)

PROMPTS = [random_prompt(20 + index, seed=index) for index in range(6)]
NEW_TOKENS = 12
CHANGES = (("decode-1", "mixed", 8), ("prefill-0", "decode", None), ("decode-1", "mixed", 24))


@pytest.fixture(scope="module")
def expected(model_dir: ModelDir) -> list[list[int]]:
    return transformers_tokens(model_dir("llama"), PROMPTS, NEW_TOKENS)


async def test_what_it_decides_comes_about_and_no_stream_notices(
    model_dir: ModelDir, expected: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Played, list[Played]]] = []

    def decide(present: Played, others: list[Played], _: Terms) -> Decision:
        seen.append((present, others))
        moves = tuple(SetRole(worker=worker, role=role, chunk_tokens=chunks) for worker, role, chunks in CHANGES)
        return Decision(moves=moves, reason="a test wants it")

    monkeypatch.setattr(plays, "decide", decide)
    monkeypatch.setattr(replanners, "LEAST_REQUESTS", 18)
    cluster = LocalCluster(
        str(model_dir("llama")),
        prefill=1,
        decode=2,
        engine=engine_with(),
        worker=worker_with(report_interval_s=0.05),
        router=router_with(),
    )
    async with cluster, AsyncClient(cluster.endpoint) as client:
        answers = [await _ask(client) for _ in range(3)]
        while not all(worker.step_costs for worker in (await client.status()).workers):
            answers.append(await _ask(client))
        stop = asyncio.Event()

        async def go_on_asking() -> None:
            while not stop.is_set():
                answers.append(await _ask(client))

        asking = asyncio.create_task(go_on_asking())
        asked = Asked(slo=Slo(ttft_s=1e-6, tpot_s=1e-6), acts=True, most_changes=2, window_s=600.0)

        def look() -> Entry:
            with Client(cluster.endpoint) as mine:
                return Replanner([mine], asked, Journal(tmp_path / "kvrelay" / "decisions" / "x.jsonl")).look()

        entry = await asyncio.to_thread(look)
        stop.set()
        await asking
        wanted = {"decode-0": ("decode", "ready"), "decode-1": ("mixed", "ready"), "prefill-0": ("decode", "ready")}
        await until(lambda: {name: state_of(cluster, name) for name in wanted} == wanted, "it has come about")
        await cluster.settled()
        cluster.check_invariants()
    assert [(each.worker, each.role, each.chunk_tokens) for each in entry.changes] == list(CHANGES)
    assert [each.failure for each in entry.changes] == [""] * len(CHANGES)
    assert (entry.requests >= 18, entry.measured) == (True, 0.0)
    (present, others), *_ = seen
    assert present.arrangement.roles == {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}
    assert {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "prefill"} in [
        other.arrangement.roles for other in others
    ]
    for answer in answers:
        assert [list(each.token_ids) for each in answer] == expected
        assert [each.timeline.attempts for each in answer if each.timeline] == [1] * len(PROMPTS)


async def _ask(client: AsyncClient) -> list[Completion]:
    return await asyncio.gather(
        *(
            client.generate(prompt, max_tokens=NEW_TOKENS, ignore_eos=True, temperature=0.0, timeout_s=60)
            for prompt in PROMPTS
        )
    )
