"""Decode as CUDA graphs: replays give what the same step gives without a graph, whatever was replayed before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.engine import Engine
from engine.gpu.steps import GpuSteps
from engine.types import PENDING, Chunk, SampleSpec, SamplingParams, Step
from tests.engine.test_engine import greedy, page_tables, prompts
from tests.engine.test_rehearsal import counted_replays, overlapped
from tests.gpu.test_engine import load


@pytest.fixture(scope="module")
def engine(directories: dict[str, str]) -> Engine:
    return load(directories["llama"])


def test_graphs_were_captured_and_are_replayed(engine: Engine) -> None:
    assert isinstance(engine.steps, GpuSteps)
    assert engine.steps.graphs is not None, "the log says why decode runs without graphs"
    replays = counted_replays(engine)
    greedy(engine, prompts((20, 9, 30)), new_tokens=4, chunk=64)
    assert replays == [3, 3, 3]


def logits_of_replay(engine: Engine, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """A decode step's logits without a graph and with one, over the same pages."""
    tables = page_tables(engine, [n + 1 for n in lengths])
    prompts_ = prompts(tuple(lengths))
    whole = [Chunk(request_id=str(i), token_ids=ids, start=0, block_table=tables[i]) for i, ids in enumerate(prompts_)]
    engine.step(Step(chunks=whole))
    rows = [Chunk(request_id=str(i), token_ids=[7 + i], start=n, block_table=tables[i]) for i, n in enumerate(lengths)]
    with torch.inference_mode():
        plain = engine.model.forward(engine.pages, rows).clone()
        steps: Any = engine.steps
        replayed = steps.graphs.replay(rows, lambda ids: None).clone()
    return plain, replayed


@pytest.mark.parametrize("lengths", [[5], [130, 2], [200, 3, 17], [1, 2, 3, 4, 5, 6, 7], [90] * 8])
def test_a_replay_s_logits_are_those_without_a_graph(engine: Engine, lengths: list[int]) -> None:
    plain, replayed = logits_of_replay(engine, lengths)
    assert plain.shape == replayed.shape
    error = (plain.float() - replayed.float()).norm(dim=-1) / plain.float().norm(dim=-1)
    assert error.max() < 2e-2


def test_nothing_of_an_earlier_replay_shows(engine: Engine) -> None:
    _, alone = logits_of_replay(engine, [60, 12])
    logits_of_replay(engine, [240, 240, 240, 240])  # the same graph of four, with other tables
    logits_of_replay(engine, [1, 1])
    _, again = logits_of_replay(engine, [60, 12])
    assert torch.equal(alone, again)


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(temperature=0.9, seed=3, top_k=20)])
def test_a_step_begun_while_the_last_one_runs_gives_the_same_tokens(engine: Engine, params: SamplingParams) -> None:
    [prompt] = prompts((21,))
    [table] = page_tables(engine, [60])
    wanted: list[int] = []
    while len(wanted) < 30:
        ids = prompt if not wanted else [wanted[-1]]
        start = 0 if not wanted else len(prompt) + len(wanted) - 1
        spec = SampleSpec(params=params, position=len(prompt) + len(wanted))
        chunk = Chunk(request_id="a", token_ids=ids, start=start, block_table=table, sample=spec)
        wanted += [token.token_id for token in engine.step(Step(chunks=[chunk]))]
    assert [token.token_id for token in overlapped(engine, prompt, params, 30)] == wanted


def test_beginning_a_step_does_not_wait_for_the_device(engine: Engine) -> None:
    [prompt] = prompts((21,))
    [table] = page_tables(engine, [40])
    greedy_ = SamplingParams(temperature=0.0)

    def chunk(ids: list[int], start: int) -> Chunk:
        spec = SampleSpec(params=greedy_, position=start + len(ids))
        return Chunk(request_id="a", token_ids=ids, start=start, block_table=table, sample=spec)

    engine.step(Step(chunks=[chunk(prompt, 0)]))
    engine.begin(Step(chunks=[chunk([5], 21)])).result()  # pinned buffers are there from here on
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second of the GPU
    asleep = torch.cuda.Event()
    asleep.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        first = engine.begin(Step(chunks=[chunk([5], 21)]))
        assert not asleep.query(), "the host waited for the device"
        # The same graph again waits for its first plan's copy, which leaves the host when the first step starts.
        second = engine.begin(Step(chunks=[chunk([PENDING], 22)]))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert first.result()[0].token_id >= 0
    assert second.result()[0].token_id >= 0
