from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from engine.cuda_version import why_too_old

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("newest", "torch_cuda", "runs"),
    [(13000, "13.0", ""), (13010, "12.8", ""), (12020, "12.8", ""), (12040, "13.0", "12.4"), (11080, "12.8", "11.8")],
)
def test_a_driver_too_old_for_torch_is_told_with_the_mend(
    newest: int, torch_cuda: str, runs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(version: Any) -> int:
        version._obj.value = newest
        return 0

    monkeypatch.setattr(ctypes, "CDLL", {"libcuda.so.1": SimpleNamespace(cuDriverGetVersion=answer)}.__getitem__)
    told = (
        f"the GPU's driver runs CUDA {runs} and older, and the torch that is installed is for {torch_cuda}; "
        "update the driver, or install kvrelay[gpu-cu12] (CUDA 12.8)"
    )
    assert why_too_old(torch_cuda) == (told if runs else "")


def test_no_driver_is_not_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert why_too_old("13.0") == ""
