"""Each decode graph keeps the library of products that replays it sooner: by stand-ins for captures and clocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from engine.errors import EngineBroken
from engine.gpu.products import LIBRARIES, preferred, with_faster_products


class Gpu:
    """Captures what is preferred at the time; a library in `failing` cannot be captured."""

    def __init__(self, seconds: dict[str, float], failing: dict[str, str] | None = None) -> None:
        self.seconds = seconds
        self.failing = failing or {}
        self.now = "default"
        self.calls: list[str] = []

    @contextmanager
    def prefer(self, library: str) -> Iterator[None]:
        before, self.now = self.now, library
        try:
            yield
        finally:
            self.now = before

    def run(self) -> torch.Tensor:
        self.calls.append(f"run {self.now}")
        return torch.zeros(4, 8)

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
        library = self.now
        if library in self.failing:
            raise RuntimeError(self.failing[library])
        self.calls.append(f"capture {library}")
        return lambda: library, torch.full((4, 8), float(LIBRARIES.index(library)))

    def captured(self) -> tuple[str, float]:
        replay, logits = with_faster_products(self.capture, lambda replay: self.seconds[str(replay())], self.prefer)(
            self.run
        )
        assert self.now == "default"
        return str(replay()), float(logits[0, 0])


@pytest.mark.parametrize(("cublas", "cublaslt", "kept"), [(2.0, 1.0, ("cublaslt", 1.0)), (1.0, 2.0, ("cublas", 0.0))])
def test_the_faster_one_is_kept_with_its_own_logits(cublas: float, cublaslt: float, kept: tuple[str, float]) -> None:
    gpu = Gpu({"cublas": cublas, "cublaslt": cublaslt})
    assert gpu.captured() == kept
    assert gpu.calls == ["run cublas", "capture cublas", "run cublaslt", "capture cublaslt"]


def test_one_that_cannot_be_captured_leaves_the_other() -> None:
    assert Gpu({"cublas": 2.0}, {"cublaslt": "CUDA out of memory"}).captured() == ("cublas", 0.0)
    with pytest.raises(RuntimeError, match="out of memory"):
        Gpu({}, dict.fromkeys(LIBRARIES, "CUDA out of memory")).captured()
    with pytest.raises(EngineBroken):
        Gpu({"cublas": 2.0}, {"cublaslt": "CUDA error: an illegal memory access was encountered"}).captured()


def test_torch_is_left_with_the_library_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str | None] = []

    def library(name: str | None = None) -> str:
        said.append(name)
        return "before"

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", library)
    with preferred("cublaslt"):
        assert said == [None, "cublaslt"]
    assert said[-1] == "before"
