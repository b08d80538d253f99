"""An engine of stages that are ranks each keeps the promise of one: the same tokens, in any batch and chunking, with a
step in each stage. Each process has its own layers' heads only, and what a lost one breaks is told by its name.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.engine import Engine
from engine.errors import EngineBroken
from engine.loading.cpu import CpuPlatform
from engine.loading.load import _default_kv_bytes
from engine.options import EngineOptions
from engine.paged_model import KvPages
from engine.pages.layout import KvLayout, LayerKv
from engine.pages.memory import KvMemory
from engine.pages.share import Share, check_whole
from engine.parallel.meetings import connect, nobody
from engine.parallel.rank import LoadedPart, load_part
from engine.parallel.shard import Position, Shard
from engine.types import Chunk, SampleSpec, Step
from engine.weights.stage import Stage
from tests.engine.parallel.test_stages import CHUNKS, chunk_of, options_of
from tests.engine.parallel.test_tensor_parallel import (
    GREEDY,
    SEEDED,
    Meeting,
    ThreadRank,
    tokens_of,
    wait_until_gone,
    whole_pages,
)
from tests.engine.test_engine import all_logits, page_tables, prompts, save
from tests.forked import forked_ranks
from tests.zoo import make_tiny_model

__all__ = ["forked_ranks"]

LAYERS = 3  # two of the first stage


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("llama"), "LlamaConfig", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def pair(directory: str) -> Iterator[tuple[Engine, Engine]]:
    """The same model in one process and in four."""
    four = Engine.load(options_of(directory, pipeline_parallel=2, tensor_parallel=2))
    yield Engine.load(options_of(directory)), four
    four.close()


def test_each_process_has_its_own_layers_heads(pair: tuple[Engine, Engine]) -> None:
    one, four = pair
    assert one.info == four.info
    assert one.layout == four.layout
    shares = [each.share for each in four.memory.shares]
    assert shares == [Share(rank, 2, layers) for layers in (range(2, 3), range(2)) for rank in range(2)]
    sizes = [each.num_bytes * 2 * LAYERS // one.memory.bytes.nbytes for each in four.memory.shares]
    assert sizes == [1, 1, 2, 2]


def test_the_tokens_are_those_of_one_process(pair: tuple[Engine, Engine]) -> None:
    one, four = pair
    for params in (GREEDY, SEEDED):
        assert tokens_of(four, params, chunk=16) == tokens_of(one, params, chunk=512)


def test_logits_are_the_same_bits_in_any_batch_and_chunking(pair: tuple[Engine, Engine]) -> None:
    four = pair[1]
    wanted = all_logits(four, prompts(), chunk=512, together=False)
    got = all_logits(four, prompts(), chunk=7, together=True)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_a_step_in_each_stage_and_the_last_begun_asked_for_first(pair: tuple[Engine, Engine]) -> None:
    one, four = pair
    tables = page_tables(one, [len(ids) for ids in CHUNKS])
    steps = [
        Step(chunks=[chunk_of(str(i), ids, tables[i], sample=SampleSpec(params=GREEDY, position=len(ids)))])
        for i, ids in enumerate(CHUNKS)
    ]
    begun = [four.begin(step) for step in steps]
    assert [pending.result() for pending in reversed(begun)] == [one.step(step) for step in reversed(steps)]


def test_a_layer_is_told_of_once_all_its_ranks_have_written_it(pair: tuple[Engine, Engine]) -> None:
    ids, seen = prompts((40,))[0], ([], [])  # type: tuple[list[int], tuple[list[torch.Tensor], list[torch.Tensor]]]
    for engine, layers in zip(pair, seen, strict=True):

        def copy_pages(layer: int, engine: Engine = engine, layers: list[torch.Tensor] = layers) -> None:
            assert layer == len(layers), "not in the order of the layers"
            layers.append(torch.cat(whole_pages(engine, layer, [4, 2, 6])))

        engine.model.poison(engine.memory)
        engine.step(Step(chunks=[chunk_of("a", ids, [4, 2, 6])], on_layer=copy_pages))
    assert len(seen[1]) == LAYERS
    for got, wanted in zip(seen[1], seen[0], strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4, equal_nan=True)
        assert got.isfinite().any()


def test_a_lost_rank_of_a_stage_breaks_them_all(pair: tuple[Engine, Engine]) -> None:
    four = pair[1]
    pids = four.model.ranks.pids  # type: ignore[union-attr]
    os.kill(pids[2], signal.SIGKILL)
    wait_until_gone(pids)
    with pytest.raises(EngineBroken, match=rf"^rank 1 of stage 1 \(process {pids[2]}\) was ended by signal 9$"):
        four.begin(Step(chunks=[Chunk(request_id="a", token_ids=[5, 6], start=0, block_table=[0])]))


def test_between_process_groups_the_tokens_are_the_same(directory: str) -> None:
    """gloo in NCCL's place."""
    one = Engine.load(options_of(directory))
    four = Engine.load(options_of(directory, pipeline_parallel=2, tensor_parallel=2, collectives="process_group"))
    try:
        assert tokens_of(four, GREEDY, chunk=16) == tokens_of(one, GREEDY, chunk=512)
        told: list[int] = []
        four.step(Step(chunks=[chunk_of("a", [5, 6, 7], [7])], on_layer=told.append))
        assert told == list(range(LAYERS))
    finally:
        four.close()


def passed_by_ranks(parts: list[LoadedPart], hidden_TN: torch.Tensor, chunks: list[Chunk]) -> list[torch.Tensor]:
    """What each rank of a stage makes of the rows, all at once."""
    meeting = Meeting(len(parts))

    def run(rank: int) -> torch.Tensor:
        model, cut = parts[rank].model, parts[rank].cut
        connect(cut.cuts, ThreadRank(meeting, rank), nobody)
        cut.part.entry.hidden = hidden_TN[None]
        share = Share(rank, len(parts), cut.part.layers)
        with torch.inference_mode():
            pages = KvPages(KvMemory(model.layout(model.probe.kv_dtype, 8), share=share))
            return model.run(pages, model.packed(chunks), None)

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(run, range(len(parts))))


@pytest.mark.parametrize("name", ["qwen3_moe", "olmo2", "gemma2", "deepseek_v3"])
def test_other_kinds_of_models_cut_both_ways_say_what_they_say_whole(name: str, tmp_path: Path) -> None:
    options = options_of(str(make_tiny_model(name, tmp_path / name)), parity_check=False)
    chunks = [chunk_of("a", CHUNKS[2], [1, 2, 3])]
    with torch.inference_mode():
        whole = load_part(options, Position(Stage(1, 1), Shard(0, 1)), CpuPlatform()).model
        with whole.scratch_pages(whole.probe.kv_dtype, 8) as pages:
            wanted = whole.run(pages, whole.packed(chunks), None)
        stages = [
            [load_part(options, Position(Stage(number, 2), Shard(rank, 2)), CpuPlatform()) for rank in range(2)]
            for number in (1, 2)
        ]
    hidden = passed_by_ranks(stages[0], torch.empty(0), chunks)
    torch.testing.assert_close(hidden[0], hidden[1], rtol=0, atol=0)
    got = passed_by_ranks(stages[1], hidden[0], chunks)[0]
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.unit
@pytest.mark.parametrize(("free", "pages"), [((9600, 9600), 50), ((3200, 9600), 33), ((9600, 2000), 10)])
def test_pages_are_as_many_as_the_gpu_with_the_least_room_holds(free: tuple[int, int], pages: int) -> None:
    """Of two stages: the first has twice as many layers as the leader's."""
    layout = KvLayout(1, "float32", (LayerKv(3, 4, 4),) * 3, 1)
    leads, reads = Share(layers=range(2, 3)), Share(layers=range(2))
    assert (leads.of(layout).page_bytes(), reads.of(layout).page_bytes()) == (96, 192)
    ranks = SimpleNamespace(shares=(leads, reads), least_pages=lambda layout, peak: free[1] // 192)
    model: Any = SimpleNamespace(ranks=ranks, is_on_gpu=True, page_bytes=KvLayout.page_bytes)
    platform: Any = SimpleNamespace(default_kv_bytes=lambda options, peak, page_bytes: free[0])
    kv_bytes = _default_kv_bytes(model, layout, EngineOptions(model=""), platform, 0, layout.page_bytes())
    assert kv_bytes == pages * layout.page_bytes()


@pytest.mark.unit
@pytest.mark.parametrize(("stages", "ranks"), [(1, 1), (1, 4), (3, 1), (2, 2), (3, 4)])
def test_positions_are_all_of_the_grid_and_shares_all_of_the_pages(stages: int, ranks: int) -> None:
    options = EngineOptions(model="", pipeline_parallel=stages, tensor_parallel=ranks)
    positions = [Position.of(number, options) for number in range(options.num_processes)]
    assert [position.number for position in positions] == list(range(options.num_processes))
    assert len({str(position) for position in positions}) == len(positions)
    assert positions[0].stage.is_last
    layout = KvLayout(16, "float32", (LayerKv(2, 8, 8),) * 7, 4)
    check_whole(layout, [position.share(7) for position in positions])
