"""run_step: one request that cannot be computed does not take the others with it."""

from __future__ import annotations

import pytest

from engine.execution import run_step
from engine.types import Chunk, SampledToken, SampleSpec, SamplingParams, Step

pytestmark = pytest.mark.unit


class Fussy:
    """Fails any step that has the request `bad` in it."""

    def __init__(self) -> None:
        self.steps: list[list[str]] = []

    def step(self, step: Step) -> list[SampledToken]:
        names = [chunk.request_id for chunk in step.chunks]
        self.steps.append(names)
        if "bad" in names:
            raise ValueError("no such row")
        return [SampledToken(request_id=c.request_id, token_id=c.start) for c in step.chunks if c.sample is not None]


def chunk(name: str, start: int, *, is_last: bool = True) -> Chunk:
    spec = SampleSpec(params=SamplingParams(), position=start + 1) if is_last else None
    return Chunk(request_id=name, token_ids=(1,), start=start, block_table=(0,), sample=spec)


def test_a_good_step_runs_once() -> None:
    engine = Fussy()
    tokens = run_step(engine, Step(chunks=[chunk("a", 3), chunk("b", 4, is_last=False)]))
    assert [(t.request_id, t.token_id, t.error) for t in tokens] == [("a", 3, "")]
    assert engine.steps == [["a", "b"]]


def test_only_the_bad_request_fails() -> None:
    engine = Fussy()
    tokens = run_step(engine, Step(chunks=[chunk("a", 3), chunk("bad", 4), chunk("c", 5)]))
    assert [(t.request_id, t.error) for t in tokens] == [("a", ""), ("bad", "ValueError: no such row"), ("c", "")]


def test_a_chunk_that_was_not_to_be_sampled_fails_by_name_too() -> None:
    [token] = run_step(Fussy(), Step(chunks=[chunk("bad", 0, is_last=False)]))
    assert (token.request_id, token.error) == ("bad", "ValueError: no such row")
