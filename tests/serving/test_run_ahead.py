"""On a GPU the next decode step is begun while the last one runs. Here what a GPU would run runs on the CPU
(tests/engine/rehearsal.py): the tokens are those of one step after the other, whatever ends, leaves or fails meanwhile.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import pytest

from cluster.deploy import local
from cluster.deploy.local import LocalCluster
from engine.engine import Engine
from engine.gpu.steps import GpuSteps
from engine.options import EngineOptions
from engine.types import Step
from kvrelay.client.client import AsyncClient
from kvrelay.client.types import Completion, GenerateOptions
from tests.engine.rehearsal import rehearse
from tests.serving.conftest import ModelDir
from tests.serving.harness import ROUTER, counters, engine_with, random_prompt, worker_with

NEW_TOKENS = 24
PREFILL_PAGES = 128
PROMPT_LENS = (3, 16, 21, 35, 40, 47)
ALL: tuple[GenerateOptions, ...] = (
    GenerateOptions(temperature=0.0),
    GenerateOptions(temperature=0.9, top_p=0.95),
    GenerateOptions(temperature=1.2, min_tokens=9),
)
PENALISED = GenerateOptions(temperature=0.9, repetition_penalty=1.3, frequency_penalty=0.4)

Watch = Callable[[Engine], None]


class Clusters:
    """Makes clusters whose decode workers run rehearsed engines, one step ahead or not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: str) -> None:
        self._monkeypatch = monkeypatch
        self._directory = directory
        self.counters: dict[str, int] = {}

    async def run(
        self,
        options: tuple[GenerateOptions, ...],
        *,
        ahead: bool,
        pages: int = 96,
        chunk_tokens: int = 512,
        watch: Watch = lambda engine: None,
        watched_pages: int | None = None,
    ) -> list[tuple[int, ...]]:
        """The tokens of one request of each length, all at once. `watch` sees the decode worker's engine, or the one
        with `watched_pages`."""
        with self._monkeypatch.context() as patch:
            if not ahead:
                patch.setattr(GpuSteps, "can_overlap", False)

            def load(asked: EngineOptions) -> Engine:
                engine = rehearse(asked.model, num_pages=asked.num_pages, max_model_len=512, parity_check=False)
                if asked.num_pages == (watched_pages or pages):
                    watch(engine)
                return engine

            patch.setattr(local, "Engine", type("Loader", (), {"load": staticmethod(load)}))
            cluster = LocalCluster(
                self._directory,
                engine=engine_with(num_pages=PREFILL_PAGES),
                decode_engine=engine_with(num_pages=pages),
                worker=worker_with(max_batch_tokens=chunk_tokens, pack_tokens=chunk_tokens),
                router=ROUTER,
            )
            async with cluster, AsyncClient(cluster.endpoint) as client:
                answers = await asyncio.gather(*(self._ask(client, options, i) for i in range(len(PROMPT_LENS))))
                await cluster.settled()
                cluster.check_invariants()
                self.counters = dict(counters(cluster))
        return [answer.token_ids for answer in answers]

    async def _ask(self, client: AsyncClient, options: tuple[Any, ...], index: int) -> Completion:
        return await client.generate(
            random_prompt(PROMPT_LENS[index], seed=index),
            seed=100 + index,
            max_tokens=NEW_TOKENS - index,
            timeout_s=60,
            **options[index % len(options)],
        )


@pytest.fixture
def clusters(monkeypatch: pytest.MonkeyPatch, model_dir: ModelDir) -> Clusters:
    return Clusters(monkeypatch, str(model_dir("llama")))


class StepWatch:
    """Watches an engine's steps: how many were begun and not finished when another began."""

    def __init__(self) -> None:
        self.num_pending = 0
        self.most = 0
        self.begun = 0
        self.is_alone = False  # a step that is run again
        self.fail_begin: set[int] = set()
        self.fail_result: set[int] = set()

    def watch(self, engine: Engine) -> None:
        begin, step_alone = engine.begin, engine.step

        def alone(step: Step) -> Any:
            self.is_alone = True
            try:
                return step_alone(step)
            finally:
                self.is_alone = False

        def watched(step: Step) -> Any:
            if self.is_alone:
                return begin(step)
            self.begun += 1
            number = self.begun
            if number in self.fail_begin:
                raise RuntimeError(f"step {number} cannot be begun because a test asked for it")
            pending = begin(step)
            self.num_pending += 1
            self.most = max(self.most, self.num_pending)
            return _Watched(self, pending, number)

        engine.begin = watched  # type: ignore[method-assign]
        engine.step = alone  # type: ignore[method-assign]


class _Watched:
    def __init__(self, steps: StepWatch, inner: Any, number: int) -> None:
        self._steps, self._inner, self._number = steps, inner, number

    def result(self) -> Any:
        self._steps.num_pending -= 1
        if self._number in self._steps.fail_result:
            raise RuntimeError(f"step {self._number} failed because a test asked for it")
        return self._inner.result()


async def test_the_tokens_are_those_of_one_step_after_the_other(clusters: Clusters) -> None:
    wanted, steps = await clusters.run(ALL, ahead=False), StepWatch()
    assert await clusters.run(ALL, ahead=True, watch=steps.watch) == wanted
    assert steps.most == 2, "the next step was begun while the last one ran"
    assert len(set(wanted)) == len(wanted)


async def test_who_leaves_for_want_of_pages_comes_back_with_the_same_tokens(clusters: Clusters) -> None:
    wanted = await clusters.run(ALL, ahead=False)
    assert await clusters.run(ALL, ahead=True, pages=14) == wanted
    assert clusters.counters["preemptions"] > 0


async def test_penalties_see_every_token_before_they_judge(clusters: Clusters) -> None:
    mixed, steps = (PENALISED, ALL[0]), StepWatch()
    wanted = await clusters.run(mixed, ahead=False)
    assert await clusters.run(mixed, ahead=True, watch=steps.watch) == wanted


@pytest.mark.parametrize("how", ["fail_begin", "fail_result"])
async def test_a_step_that_fails_is_run_again_and_running_ahead_goes_on(clusters: Clusters, how: str) -> None:
    wanted, steps = await clusters.run(ALL, ahead=False), StepWatch()
    setattr(steps, how, {4, 5, 11})
    assert await clusters.run(ALL, ahead=True, watch=steps.watch) == wanted
    assert steps.begun > 12
    assert steps.most == 2


@pytest.mark.parametrize("failing", [set(), {2, 3, 6}], ids=["all good", "some fail"])
async def test_prefill_begins_the_next_chunks_too(clusters: Clusters, failing: set[int]) -> None:
    """Its layers leave as they are computed; those of a step that is run again leave again, and what is right stays."""
    wanted, steps = await clusters.run(ALL, ahead=False, chunk_tokens=20), StepWatch()
    steps.fail_result = failing
    ahead = clusters.run(ALL, ahead=True, chunk_tokens=20, watch=steps.watch, watched_pages=PREFILL_PAGES)
    assert await ahead == wanted
    assert steps.most == 2
    assert clusters.counters["receipts_good"] >= len(PROMPT_LENS)


async def test_the_heaviest_pages_are_chosen_by_all_chunks_of_the_prompt(
    clusters: Clusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PROMPT_LENS", (150, 140))
    heavy = (GenerateOptions(temperature=0.0, kv_window_tokens=20, kv_sink_tokens=1, kv_heavy_tokens=32),)
    wanted = await clusters.run(heavy, ahead=False, chunk_tokens=40)
    assert await clusters.run(heavy, ahead=True, chunk_tokens=40) == wanted
