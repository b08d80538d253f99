"""The kernels are built with the instructions that are fastest here, by a measurement, and with no trace of it."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from engine.kernels import native

BF16 = "flags : fpu avx512f avx512_bf16"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The flags that products were built with for a trial, on a CPU that has AVX512-BF16."""
    built: list[tuple[str, ...]] = []

    def compile_nothing(compiler: str, flags: tuple[str, ...], sources: list[Path], target: Path) -> None:
        built.append(flags)
        target.touch()

    monkeypatch.setattr(native, "_cpu_flags", lambda: BF16)
    monkeypatch.setattr(native, "_compile", compile_nothing)
    monkeypatch.setattr(ctypes, "CDLL", lambda path: path)
    monkeypatch.setattr(native, "_product", lambda library: library)
    return built


@pytest.mark.parametrize(
    ("seconds", "wanted"),
    [((2.0, 1.0), native.WITHOUT_BF16), ((1.0, 2.0), ()), ((1.0, 0.95), ())],
    ids=["slower", "faster", "as-fast"],
)
def test_instructions_that_are_slower_than_what_they_replace_are_left_out(
    seconds: tuple[float, float],
    wanted: tuple[str, ...],
    compiled: list[tuple[str, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "_fastest_runs_s", lambda runs: [seconds[index] for index in range(len(runs))])
    assert native._fastest_flags("g++", tmp_path / "kernels.so") == wanted
    assert compiled == [(), native.WITHOUT_BF16]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flags", ["flags : fpu avx2", f"{BF16} amx_bf16", ""])
def test_nothing_is_measured_where_there_is_no_choice(
    flags: str, compiled: list[tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_cpu_flags", lambda: flags)
    assert native._fastest_flags("g++", tmp_path / "kernels.so") == ()
    assert compiled == []


def test_what_is_timed_are_the_products_that_are_served() -> None:
    run = native._product(native.library())
    assert native._fastest_runs_s([run])[0] > 0
    assert run().eq(native.TRIAL[1]).all()  # ones times ones, over all inputs
