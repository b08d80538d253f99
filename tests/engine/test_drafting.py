"""A draft model guesses what it would draw itself, reads what it has not read, and goes back where it was wrong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import transformers

from engine import drafting
from engine.engine import Engine
from engine.options import EngineOptions
from engine.types import Chunk, Draft, SampledToken, SampleSpec, SamplingParams, Step
from tests.zoo import MAX_POSITIONS, make_tiny_model

PAGE = 16
ANY = SamplingParams(temperature=0.8, seed=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("models") / "llama")


def engine_of(model: Path, draft: Path | str = "", **more: object) -> Engine:
    options = {"dtype": "float32", "num_pages": 80, "page_size": PAGE, "threads": 1, "parity_check": False, **more}
    return Engine.load(EngineOptions(model=str(model), speculative_model=str(draft), **options))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def own(model: Path) -> Engine:
    """Its draft model is the model itself: all its guesses are right."""
    return engine_of(model, model)


def spec(at: int, guesses: Sequence[int] = ()) -> SampleSpec:
    return SampleSpec(params=ANY, position=at)


def prompt(engine: Engine, tokens: list[int]) -> None:
    """Read it, and draw the token behind it."""
    chunk = Chunk(request_id="r", token_ids=list(tokens), start=0, block_table=range(80), sample=spec(len(tokens)))
    tokens.append(engine.step(Step(chunks=[chunk]))[0].token_id)


def step(engine: Engine, draft: Draft, num_wanted: int) -> list[int]:
    """All that were drawn, behind guesses that were wrong, too."""
    draft.num_wanted, length = num_wanted, len(draft.tokens)
    chunk = Chunk(
        request_id="r",
        token_ids=draft.tokens[-1:],
        start=length - 1,
        block_table=range(80),
        sample=spec(length),
        draft=draft if num_wanted else None,
    )
    return [token.token_id for token in engine.step(Step(chunks=[chunk]))]


def alone(engine: Engine, tokens: Sequence[int], count: int) -> list[int]:
    known = list(tokens)
    for _ in range(count):
        known += step(engine, Draft(tokens=known, spec=spec), 0)
    return known[len(tokens) :]


def test_a_model_that_guesses_for_itself_is_always_right(own: Engine) -> None:
    tokens = list(range(5, 30))
    prompt(own, tokens)
    wanted = alone(own, tokens, 9)
    draft = Draft(tokens=tokens, spec=spec)
    assert step(own, draft, 4) == wanted[:5]
    assert draft.guesses == wanted[:4]
    tokens += wanted[:5]
    assert step(own, draft, 3) == wanted[5:9]


def test_what_was_guessed_wrongly_is_read_again(own: Engine) -> None:
    tokens = list(range(5, 30))
    prompt(own, tokens)
    wanted = alone(own, tokens, 12)
    draft = Draft(tokens=tokens, spec=spec)
    step(own, draft, 4)
    tokens += [wanted[0], (wanted[1] + 1) % 500]  # as another model would have drawn
    others = alone(own, tokens, 4)
    assert step(own, draft, 3) == others


def test_a_long_prompt_is_read_in_parts_before_it_is_guessed_for(own: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "MOST_READ", 10)
    tokens = list(range(5, 30))
    prompt(own, tokens)
    wanted = alone(own, tokens, 8)
    draft = Draft(tokens=tokens, spec=spec)
    for i in range(2):
        assert step(own, draft, 2) == wanted[i : i + 1]
        assert draft.num_read == 11 * (i + 1)
        tokens.append(wanted[i])
    assert step(own, draft, 2) == wanted[2:5]


def test_a_draft_model_that_fails_costs_its_guesses_alone(
    own: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = list(range(5, 30))
    prompt(own, tokens)
    wanted = alone(own, tokens, 4)
    draft = Draft(tokens=tokens, spec=spec)
    assert own.draft_model is not None

    def fail(chunks: Sequence[Chunk]) -> list[SampledToken]:
        raise RuntimeError("no such kernel")

    with monkeypatch.context() as patched:
        patched.setattr(own.draft_model, "_run", fail)
        assert step(own, draft, 2) == wanted[:1]
    assert "the draft model could not guess" in caplog.text
    tokens += wanted[:1]
    assert step(own, draft, 2) == wanted[1:4]


def test_nothing_is_guessed_beyond_the_draft_model_s_length(own: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(own.draft_model, drafting.DraftModel)
    assert own.draft_model._max_len == MAX_POSITIONS
    monkeypatch.setattr(own.draft_model, "_max_len", 28)
    tokens = list(range(5, 30))
    prompt(own, tokens)
    assert len(step(own, Draft(tokens=tokens, spec=spec), 3)) == 1
    assert len(step(own, Draft(tokens=tokens, spec=spec), 2)) == 3


def test_pages_are_of_both(model: Path) -> None:
    kv_bytes = 1 << 20
    without, both = (engine_of(model, draft, num_pages=None, kv_bytes=kv_bytes) for draft in ("", model))
    assert both.layout.num_pages == without.layout.num_pages // 2


def test_a_draft_model_has_the_same_tokens(model: Path, tmp_path: Path) -> None:
    config = transformers.LlamaConfig.from_pretrained(model, vocab_size=300)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"^speculative_model is '.*', which has 300 tokens; '.*' has 512: give one"):
        engine_of(model, tmp_path)
