"""Medusa's heads guess what they say of the row that drew a request's last token, as the model's own code has it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import silu
from transformers import AutoModelForCausalLM

from engine.engine import Engine
from engine.heads import MedusaHeads, has_heads
from engine.types import Chunk, Draft, SampleSpec, SamplingParams, Step
from tests.engine.test_drafting import engine_of
from tests.zoo import make_tiny_model

HEADS = 3
GREEDY = SamplingParams(temperature=0.0)
PROMPT = list(range(5, 30))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("models") / "llama")


def write(
    directory: Path, *, hidden: int = 64, vocab: int = 512, layers: int = 2, name: str = "medusa_lm_head"
) -> Path:
    torch.manual_seed(1)
    tensors = {}
    for head in range(HEADS):
        for block in range(layers):
            tensors[f"{head}.{block}.linear.weight"] = torch.randn(hidden, hidden) / 8
            tensors[f"{head}.{block}.linear.bias"] = torch.randn(hidden) / 8
        tensors[f"{head}.{layers}.weight"] = torch.randn(vocab, hidden)
    save_file(tensors, directory / f"{name}.safetensors")
    (directory / "config.json").write_text(json.dumps({"medusa_num_heads": HEADS, "medusa_num_layers": layers}))
    return directory


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("heads"))


@pytest.fixture(scope="module")
def engine(model: Path, heads: Path) -> Engine:
    return engine_of(model, heads)


def spec(at: int, guesses: Sequence[int] = ()) -> SampleSpec:
    return SampleSpec(params=GREEDY, position=at)


def run(engine: Engine, tokens: list[int], start: int, num_wanted: int = 0) -> tuple[list[int], list[int]]:
    """Draws and guesses of a step that runs all tokens from there on."""
    draft = Draft(tokens=tokens, spec=spec, num_wanted=num_wanted)
    chunk = Chunk(
        request_id="r",
        token_ids=tokens[start:],
        start=start,
        block_table=range(80),
        sample=spec(len(tokens)),
        draft=draft if num_wanted else None,
    )
    return [token.token_id for token in engine.step(Step(chunks=[chunk]))], draft.guesses


def said(model: Path, heads: Path, tokens: Sequence[int]) -> list[int]:
    """What the heads say behind the last of these, by their paper's code."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    weights, guesses = load_file(heads / "medusa_lm_head.safetensors"), []
    with torch.no_grad():
        row = base.model(torch.tensor([list(tokens)])).last_hidden_state[0, -1]
        for head in range(HEADS):
            hidden = row
            for block in range(2):
                linear = weights[f"{head}.{block}.linear.weight"] @ hidden + weights[f"{head}.{block}.linear.bias"]
                hidden = hidden + silu(linear)
            guesses.append(int((weights[f"{head}.2.weight"] @ hidden).argmax()))
    return guesses


def test_guesses_are_what_the_heads_say_of_the_row_before(engine: Engine, model: Path, heads: Path) -> None:
    tokens = list(PROMPT)
    for start in (0, len(PROMPT), len(PROMPT) + 1):
        drawn, guesses = run(engine, tokens, start, HEADS if start else 0)
        assert not start or guesses == said(model, heads, tokens[:-1])
        tokens.append(drawn[0])
    assert isinstance(engine.draft_model, MedusaHeads)
    assert engine.draft_model.spent_s > 0 < engine.draft_model.pass_s


def test_after_guesses_the_row_of_the_last_that_was_right_counts(engine: Engine, model: Path, heads: Path) -> None:
    """Whichever of the step's rows that is."""
    for num_right in range(HEADS + 1):
        tokens = [*PROMPT, *run(engine, PROMPT, 0)[0]]
        drawn, guesses = run(engine, tokens, len(tokens) - 1, HEADS)
        assert len(drawn) == HEADS + 1
        tokens += [*guesses[:num_right], 77]  # as if so many had been right
        assert run(engine, tokens, len(tokens) - 1, HEADS)[1] == said(model, heads, tokens[:-1])


def test_of_whom_nothing_is_known_nothing_is_guessed(engine: Engine) -> None:
    run(engine, PROMPT, 0)
    tokens = [*PROMPT, 9, 9, 9]
    drawn, guesses = run(engine, tokens, len(tokens) - 1, HEADS)
    assert (len(drawn), guesses) == (1, [])


def test_more_than_there_are_heads_is_not_guessed(engine: Engine) -> None:
    tokens = [*PROMPT, *run(engine, PROMPT, 0)[0]]
    assert len(run(engine, tokens, len(tokens) - 1, HEADS + 4)[1]) == HEADS


def test_a_directory_of_heads_is_told_from_a_model(heads: Path, model: Path, tmp_path: Path) -> None:
    assert has_heads(str(heads))
    assert not has_heads(str(model))
    assert not has_heads(str(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text("[")
    assert not has_heads(str(tmp_path))


def test_heads_that_do_not_fit_are_refused_in_a_sentence(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"heads cannot be read: 0.0.linear.weight is \[32, 32\], and the model wants"):
        engine_of(model, write(tmp_path, hidden=32))
    with pytest.raises(ValueError, match=r"heads cannot be read: 0.2.weight is \[300, 64\], and the model wants \[512"):
        engine_of(model, write(tmp_path, vocab=300))
    (tmp_path / "medusa_lm_head.safetensors").unlink()
    with pytest.raises(ValueError, match=r"which has heads and no medusa_lm_head\.safetensors or model\.safetensors"):
        engine_of(model, tmp_path)
    write(tmp_path, name="model")
    assert engine_of(model, tmp_path).draft_model is not None
