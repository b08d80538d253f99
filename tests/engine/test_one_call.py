"""All layers in one call give what they give one by one, and those who wait for a layer's KV hear of it in time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.engine import Engine
from engine.fused.one_call import LayersInOneCall
from engine.types import Chunk, Step
from engine.weights import panels
from tests.engine.test_engine import all_logits, load, prompts, save

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"attention_bias": True}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "mistral": ("MistralConfig", {"sliding_window": 20}),
}

pytestmark = pytest.mark.skipif(
    not panels.can_multiply(64, torch.bfloat16), reason="this CPU has no bfloat16 products of our own"
)


@pytest.fixture(params=MODELS)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Engine:
    config_class, changes = MODELS[request.param]
    return load(save(tmp_path, config_class, **changes), "bfloat16")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each pass that went this way."""
    rows: list[int] = []
    run = LayersInOneCall.__call__

    def counted(self: LayersInOneCall, total: torch.Tensor, rotation: object, state: object) -> torch.Tensor:
        rows.append(total.shape[1])
        return run(self, total, rotation, state)  # type: ignore[arg-type]

    monkeypatch.setattr(LayersInOneCall, "__call__", counted)
    return rows


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_it_gives_the_bits_of_layer_by_layer(
    engine: Engine, chunk: int, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = all_logits(engine, prompts(), chunk, together=True)
    assert calls
    del calls[:]
    monkeypatch.setattr(LayersInOneCall, "serves", lambda self, state: False)
    one_by_one = all_logits(engine, prompts(), chunk, together=True)
    assert not calls
    assert all(torch.equal(a, b) for a, b in zip(at_once, one_by_one, strict=True))


def test_each_layer_is_told_when_its_pages_are_written(engine: Engine, calls: list[int]) -> None:
    token_ids, written = prompts((20,))[0], []
    for layer in range(2):
        engine.memory.k(layer).zero_()

    def look(layer: int) -> None:
        written.append((layer, [bool(engine.memory.k(i)[[4, 2]].flatten(0, 1)[:20].any(-1).all()) for i in range(2)]))

    engine.step(Step(chunks=[Chunk(request_id="a", token_ids=token_ids, start=0, block_table=[4, 2])], on_layer=look))
    assert calls
    assert written == [(0, [True, False]), (1, [True, True])]


def test_an_error_of_who_is_told_comes_out_as_it_is(engine: Engine) -> None:
    told: list[int] = []

    def fail(layer: int) -> None:
        told.append(layer)
        raise ConnectionError("the pool has gone")

    chunk = Chunk(request_id="a", token_ids=[5, 6, 7], start=0, block_table=[3])
    with pytest.raises(ConnectionError, match="the pool has gone"):
        engine.step(Step(chunks=[chunk], on_layer=fail))
    assert told == [0], "the layers after it were computed for nobody"


def test_other_pages_may_follow(engine: Engine) -> None:
    """The arguments are kept for the pages they were made for."""
    wanted = all_logits(engine, prompts((40,)), 16, together=True)
    chunk = Chunk(request_id="a", token_ids=prompts((40,))[0], start=0, block_table=[0, 1, 2])
    with torch.inference_mode(), engine.model.scratch_pages(torch.bfloat16, 4) as scratch:
        elsewhere = engine.model.forward(scratch, [chunk])
        again = all_logits(engine, prompts((40,)), 16, together=True)
    assert torch.equal(elsewhere, wanted[0])
    assert torch.equal(again[0], wanted[0])
