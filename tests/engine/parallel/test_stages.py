"""An engine in pipeline stages keeps the promise of one: the same bits in any batch and chunking, with several steps
under way. Each stage has its own layers only; what a lost one breaks is told, and none is left behind.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from engine.engine import Engine
from engine.errors import EngineBroken, UnsupportedModel
from engine.execution import run_step
from engine.fused.layers import Decoder
from engine.loading.cpu import CpuPlatform
from engine.options import EngineOptions
from engine.parallel.cutting import cut_model
from engine.parallel.passing import LayersTold
from engine.parallel.rank import LoadedPart, load_part
from engine.parallel.shard import Position, Shard
from engine.types import Chunk, SampleSpec, Step
from engine.weights.config import served_config
from engine.weights.loader import load_model, probe_model
from engine.weights.stage import Stage
from tests.engine.parallel.test_tensor_parallel import GREEDY, SEEDED, tokens_of, wait_until_gone, whole_pages
from tests.engine.test_engine import all_logits, page_tables, prompts, save
from tests.forked import forked_ranks
from tests.zoo import make_tiny_model

__all__ = ["forked_ranks"]

LAYERS = 4
SIZE = 3  # stages of 2, 1 and 1 layers
CHUNKS = ([5, 6, 7, 8, 9], [3, 4, 5], list(range(20, 60)))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("llama"), "LlamaConfig", num_hidden_layers=LAYERS)


def options_of(model: str, dtype: Any = "float32", **options: Any) -> EngineOptions:
    fixed: dict[str, Any] = {"num_pages": 64, "threads": 1, "max_model_len": 256}
    return EngineOptions(model=model, dtype=dtype, **{**fixed, **options})


def chunk_of(name: str, ids: list[int], table: list[int], sample: SampleSpec | None = None) -> Chunk:
    return Chunk(request_id=name, token_ids=ids, start=0, block_table=table, sample=sample)


@pytest.fixture(scope="module")
def pair(directory: str) -> Iterator[tuple[Engine, Engine]]:
    """The same model in one process and in three."""
    three = Engine.load(options_of(directory, pipeline_parallel=SIZE))
    yield Engine.load(options_of(directory)), three
    three.close()


def test_stages_give_the_bits_of_one_process_in_any_batch_and_chunking(pair: tuple[Engine, Engine]) -> None:
    one, three = pair
    assert one.info == three.info
    assert one.layout == three.layout
    assert three.num_stages == SIZE
    wanted = all_logits(one, prompts(), chunk=512, together=False)
    got = all_logits(three, prompts(), chunk=7, together=True)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    for params in (GREEDY, SEEDED):
        assert tokens_of(three, params, chunk=16) == tokens_of(one, params, chunk=512)


def test_as_many_steps_as_stages_are_under_way_at_once(pair: tuple[Engine, Engine]) -> None:
    one, three = pair
    tables = page_tables(one, [len(ids) for ids in CHUNKS])
    steps = [
        Step(chunks=[chunk_of(str(i), ids, tables[i], sample=SampleSpec(params=GREEDY, position=len(ids)))])
        for i, ids in enumerate(CHUNKS)
    ]
    begun = [three.begin(step) for step in steps]
    assert [pending.result() for pending in begun] == [one.step(step) for step in steps]


def test_a_layer_is_told_of_once_it_stands_in_its_stage_s_pages(pair: tuple[Engine, Engine]) -> None:
    ids, seen = prompts((40,))[0], {0: list[torch.Tensor](), 1: list[torch.Tensor]()}
    for number, engine in enumerate(pair):

        def copy_pages(layer: int, engine: Engine = engine, seen: list[torch.Tensor] = seen[number]) -> None:
            assert layer == len(seen), "not in the order of the layers"
            seen.append(torch.cat(whole_pages(engine, layer, [4, 2, 6])))

        nothing = np.zeros(3 * engine.layout.page_bytes(), np.uint8)
        engine.memory.rows.scatter(range(LAYERS), [4, 2, 6], nothing)
        engine.step(Step(chunks=[chunk_of("a", ids, [4, 2, 6])], on_layer=copy_pages))
    assert len(seen[1]) == LAYERS
    assert all(torch.equal(got, wanted) for got, wanted in zip(seen[1], seen[0], strict=True))


def test_a_lost_stage_breaks_them_all(pair: tuple[Engine, Engine]) -> None:
    three = pair[1]
    pids = three.model.ranks.pids  # type: ignore[union-attr]
    pending = three.begin(Step(chunks=[chunk_of("a", [5, 6], [0])]))
    os.kill(pids[0], signal.SIGKILL)
    wait_until_gone(pids)
    told = rf"^stage 1 \(process {pids[0]}\) was ended by signal 9$"
    with pytest.raises(EngineBroken, match=told):
        run_step(three, Step(chunks=[chunk_of("a", [5, 6], [0])] * 2), max_failed_steps=3)
    with pytest.raises(EngineBroken, match=told):
        three.check()
    del pending


def test_what_is_told_of_layers_comes_in_their_order_and_once() -> None:
    seen: list[int] = []
    told = LayersTold(seen.append)
    for layer in (0, 2, 1, 1, 4):
        told.up_to(layer)
    assert seen == [0, 1, 2, 3, 4]


# Without processes


def passed_on(stages: list[LoadedPart], chunks: list[Chunk]) -> torch.Tensor:
    """The logits of all rows, from stage to stage."""
    last = stages[-1].model
    meta = last.packed(chunks)
    with torch.inference_mode(), ExitStack() as stack:
        pages = stack.enter_context(last.scratch_pages(last.probe.kv_dtype, 8))
        passed = torch.empty(0)
        for stage in stages:
            stage.cut.part.entry.hidden = passed[None]
            passed = stage.model.run(pages, meta, None)
    return passed


def stages_of(options: EngineOptions, *sizes: int) -> list[LoadedPart]:
    """All stages of each."""
    alone, platform = Shard(0, 1), CpuPlatform()
    with torch.inference_mode():
        return [
            load_part(options, Position(Stage(number, size), alone), platform)
            for size in sizes
            for number in range(1, size + 1)
        ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fused_stages_give_the_bits_of_the_fused_model(directory: str, dtype: str) -> None:
    options = options_of(directory, dtype)
    chunks = [chunk_of("a", CHUNKS[2], [1, 2, 3]), chunk_of("b", CHUNKS[1], [5])]
    whole, *stages = stages_of(options, 1, 3)
    assert torch.equal(passed_on(stages, chunks), passed_on([whole], chunks))
    for stage in stages:
        decoder: Any = stage.model.module.base_model.forward
        assert isinstance(decoder, Decoder)
        assert len(decoder.layers) == len(stage.cut.part.layers)


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "deepseek_v3", "bloom", "gptj", "bert_decoder"])
def test_other_kinds_of_models_in_stages_say_what_they_say_whole(name: str, tmp_path: Path) -> None:
    options = options_of(str(make_tiny_model(name, tmp_path / name)))
    whole, *stages = stages_of(options, 1, 2)
    chunks = [chunk_of("a", CHUNKS[2], [1, 2, 3])]
    assert torch.equal(passed_on(stages, chunks), passed_on([whole], chunks))


def test_a_stage_copies_its_own_weights_only(tmp_path: Path) -> None:
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "vocab_size": 8192}
    options = options_of(save(tmp_path, "LlamaConfig", **shape, dtype="bfloat16"), "bfloat16")
    small = options_of(save(tmp_path / "small", "LlamaConfig", num_hidden_layers=8))
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # what tests before have left counts in none of its own
        layers, grown = list(pool.map(third_of_eight, [small, options]))[-1]  # the first loads libraries, too
    saved = (tmp_path / "model.safetensors").stat().st_size
    assert layers == range(2, 3)
    assert saved > 70 << 20
    assert grown < saved // 3, f"{grown >> 20} MiB more for a layer of eight, of {saved >> 20} MiB in all"


def third_of_eight(options: EngineOptions) -> tuple[range, int]:
    """Load that stage: its layers, and the bytes that this process has grown by."""

    def private_bytes() -> int:
        memory = psutil.Process().memory_info()
        return int(memory.rss - memory.shared)

    before = private_bytes()
    with torch.inference_mode():
        loaded = load_part(options, Position(Stage(3, 8), Shard(0, 1)), CpuPlatform())
    return loaded.cut.part.layers, private_bytes() - before


# What is refused


def cut(directory: str, stage: Stage, spoil: Any = None) -> None:
    served = served_config(options_of(directory))
    model = load_model(directory, served.config, served.dtype, torch.device("cpu"))
    with torch.inference_mode():
        probe = probe_model(model, served.max_len)
        if spoil is not None:
            spoil(model)
        cut_model(model, probe, Position(stage, Shard(0, 1)), torch.device("cpu"))


def test_more_stages_than_layers(directory: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        cut(directory, Stage(1, 5))
    assert str(caught.value) == "pipeline_parallel is 5, and LlamaForCausalLM has 4 layers; give as many or fewer"


def test_a_model_whose_layers_hand_on_more_than_hidden_states(directory: str) -> None:
    def spoil(model: Any) -> None:
        model.model.layers[2].register_forward_pre_hook(lambda _, args: (args[0] * 1.0, *args[1:]))

    with pytest.raises(UnsupportedModel) as caught:
        cut(directory, Stage(1, 2), spoil)
    assert str(caught.value) == (
        "LlamaForCausalLM hands more than hidden states from layer to layer, or not each layer's to the next; "
        "give pipeline_parallel 1, and not 2"
    )


def test_a_model_whose_layers_hand_on_several_hidden_states(tmp_path: Path) -> None:
    """Gemma 3n's [altup inputs, 1, T, N], which no stage sends."""
    with pytest.raises(UnsupportedModel, match=r"^Gemma3nForCausalLM hands more than hidden states from layer"):
        cut(str(make_tiny_model("gemma3n_text", tmp_path / "gemma3n")), Stage(1, 2))


def test_a_model_that_keeps_a_state_beside_kv(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedModel, match=r"^Lfm2ForCausalLM keeps a state beside KV, which is not cut in stages; "
    ):
        cut(str(make_tiny_model("lfm2", tmp_path / "lfm2")), Stage(1, 2))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pipeline_parallel": 0}, "pipeline_parallel is 0; give 1 or more"),
        ({"speculative_model": "small"}, "pipeline_parallel is 2 with speculative_model 'small'; give one of the two"),
        ({"kv_dtype": "fp8_e4m3"}, "pipeline_parallel is 2 with kv_dtype 'fp8_e4m3'; give one of the two"),
        ({"quantization": "int8"}, "quantization is 'int8' with pipeline_parallel 2; give one of the two"),
    ],
)
def test_options_that_do_not_go_with_it(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError) as caught:
        Engine.load(options_of("anything", **{"pipeline_parallel": 2, **changes}))
    assert str(caught.value) == reason
