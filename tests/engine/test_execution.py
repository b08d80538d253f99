"""run_step: one request that cannot be computed takes neither the others with it nor, alone, the engine; an engine that
can compute nothing is broken.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from engine import device as devices
from engine.errors import EngineBroken
from engine.execution import run_step
from engine.types import Chunk, SampledToken, SampleSpec, SamplingParams, Step

pytestmark = pytest.mark.unit


class Fussy:
    """Fails any step that has the request `bad` in it; the next `failures` probes, too."""

    def __init__(self, failures: int = 0, error: Exception | None = None) -> None:
        self.steps: list[list[str]] = []
        self.probes = 0
        self._failures = failures
        self._error = error or ValueError("no such row")

    def step(self, step: Step) -> list[SampledToken]:
        names = [chunk.request_id for chunk in step.chunks]
        self.steps.append(names)
        if "bad" in names:
            raise self._error
        return [
            SampledToken(request_id=c.request_id, token_id=c.start, error="not finite" if c.request_id == "nan" else "")
            for c in step.chunks
            if c.sample is not None
        ]

    def probe(self) -> SampledToken:
        self.probes += 1
        if self.probes <= self._failures:
            raise RuntimeError("out of memory")
        return SampledToken(request_id="", token_id=1)


def chunk(name: str, start: int, *, is_last: bool = True) -> Chunk:
    spec = SampleSpec(params=SamplingParams(), position=start + 1) if is_last else None
    return Chunk(request_id=name, token_ids=(1,), start=start, block_table=(0,), sample=spec)


def run(engine: Fussy, *chunks: Chunk) -> list[SampledToken]:
    return run_step(engine, Step(chunks=chunks), max_failed_steps=3)


def test_a_good_step_runs_once() -> None:
    engine = Fussy()
    tokens = run(engine, chunk("a", 3), chunk("b", 4, is_last=False))
    assert [(t.request_id, t.token_id, t.error) for t in tokens] == [("a", 3, "")]
    assert engine.steps == [["a", "b"]]


def test_of_a_chunk_that_is_run_by_itself_no_others_layers_are_told() -> None:
    """They were handed over again for each chunk of a step that failed, before they were computed."""
    told: list[str] = []
    engine = Fussy()
    run_one = engine.step

    def tell(step: Step) -> list[SampledToken]:
        if step.on_layer is not None:
            step.on_layer(0)
        return run_one(step)

    engine.step = tell  # type: ignore[method-assign]
    chunks = (chunk("a", 3), chunk("bad", 4), chunk("c", 5))
    whole = Step(
        chunks=chunks,
        on_layer=lambda layer: told.append("all"),
        on_layer_of=lambda request_id: lambda layer: told.append(request_id),
    )
    run_step(engine, whole, max_failed_steps=3)
    assert told == ["all", "a", "bad", "c"]


def test_only_the_bad_request_fails_and_the_others_prove_the_engine() -> None:
    engine = Fussy()
    tokens = run(engine, chunk("a", 3), chunk("bad", 4), chunk("c", 5))
    assert [(t.request_id, t.error) for t in tokens] == [("a", ""), ("bad", "ValueError: no such row"), ("c", "")]
    assert engine.probes == 0


def test_a_chunk_that_was_not_to_be_sampled_fails_by_name_too() -> None:
    [token] = run(Fussy(), chunk("bad", 0, is_last=False))
    assert (token.request_id, token.error) == ("bad", "ValueError: no such row")


@pytest.mark.parametrize("failures", [0, 1])
def test_a_lone_bad_request_breaks_no_engine_that_can_still_compute_however_often_it_comes(failures: int) -> None:
    engine = Fussy(failures)
    for _ in range(20):
        [token] = run(engine, chunk("bad", 0))
        assert token.error
    assert engine.probes == 20 + failures


@pytest.mark.parametrize("names", [("bad",), ("bad", "bad"), ("nan",), ("nan", "bad")])
def test_an_engine_that_computes_nothing_three_times_in_a_row_is_broken(names: tuple[str, ...]) -> None:
    with pytest.raises(EngineBroken, match=r"^3 steps in a row failed, the last one by RuntimeError: out of memory$"):
        run(Fussy(failures=2), *(chunk(name, 0) for name in names))


def test_rows_that_are_not_finite_are_not_to_blame_on_the_engine_while_another_is() -> None:
    engine = Fussy(failures=2)
    assert [t.error for t in run(engine, chunk("nan", 0), chunk("a", 1))] == ["not finite", ""]
    assert engine.probes == 0


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported",
        "CUDA error: device-side assert triggered",
        "CUDA error: unspecified launch failure",
        "CUDA error: uncorrectable ECC error encountered",
        "NCCL communicator was aborted on rank 0",
    ],
)
def test_one_error_that_cannot_heal_breaks_the_engine_at_once(text: str) -> None:
    engine = Fussy(error=RuntimeError(text))
    with pytest.raises(EngineBroken, match=r"^the device is lost to this process: RuntimeError: [^\n]*$"):
        run(engine, chunk("a", 0), chunk("bad", 1), chunk("c", 2))
    assert engine.steps == [["a", "bad", "c"]]


def of_cuda(code: int, text: str = "CUDA error") -> Exception:
    """As torch raises what a call of CUDA returns."""
    error = torch.AcceleratorError(text)
    error.error_code = code  # type: ignore[attr-defined]
    return error


ILLEGAL_ADDRESS, CONTAINED, UNKNOWN, NO_MEMORY, INVALID_VALUE, CAPTURE_UNSUPPORTED = 700, 226, 999, 2, 1, 900


@pytest.mark.parametrize("code", [ILLEGAL_ADDRESS, CONTAINED, UNKNOWN])
def test_an_error_of_cuda_breaks_the_engine_by_its_code_whatever_its_words(code: int) -> None:
    engine = Fussy(error=of_cuda(code))
    with pytest.raises(EngineBroken, match=r"^the device is lost to this process: AcceleratorError: CUDA error$"):
        run(engine, chunk("a", 0), chunk("bad", 1))
    assert engine.steps == [["a", "bad"]]


@pytest.mark.parametrize(("code", "is_broken"), [(ILLEGAL_ADDRESS, True), (NO_MEMORY, False), (None, False)])
def test_an_idle_engine_whose_gpu_another_thread_has_lost_is_broken(
    monkeypatch: pytest.MonkeyPatch, code: int | None, is_broken: bool
) -> None:
    class Stream:
        def query(self) -> bool:
            if code is not None:
                raise of_cuda(code)
            return False  # something runs

    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream())
    devices.check(torch.device("cpu"))
    with pytest.raises(EngineBroken) if is_broken else nullcontext():
        devices.check(torch.device("cuda", 0))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA out of memory. Tried 2 GiB"),
        torch.OutOfMemoryError("CUDA out of memory, beside an unknown error"),
        of_cuda(NO_MEMORY, "CUDA error: out of memory"),
        of_cuda(INVALID_VALUE),
        of_cuda(CAPTURE_UNSUPPORTED),
        MemoryError(),
        RuntimeError("CUDA error: invalid argument"),
    ],
)
def test_what_may_heal_fails_the_request_alone(error: Exception) -> None:
    [good, bad] = run(Fussy(error=error), chunk("a", 0), chunk("bad", 1))
    assert (good.error, bool(bad.error)) == ("", True)
