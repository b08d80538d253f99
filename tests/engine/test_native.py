"""The kernels are built with the instructions that are fastest here, by a measurement, and with no trace of it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from engine.kernels import build, native

BF16 = "flags : fpu avx512f avx512_bf16"


class Builder(build.Builder):
    """Compiles nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.linked: list[tuple[str, ...]] = []

    def begin(self, flags: Sequence[str], sources: Sequence[Path]) -> list[Future[str]]:
        return []

    def link(self, flags: Sequence[str], sources: Sequence[Path], target: Path) -> None:
        assert sources == [build.PRODUCTS]
        self.linked.append(tuple(flags))


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Builder:
    """On a CPU that has AVX512-BF16."""
    monkeypatch.setattr(build, "cpu_flags", lambda: BF16)
    monkeypatch.setattr(ctypes, "CDLL", lambda path: path)
    monkeypatch.setattr(build, "_product", lambda library: library)
    return Builder(tmp_path)


@pytest.mark.parametrize(
    ("seconds", "wanted"),
    [((2.0, 1.0), build.WITHOUT_BF16), ((1.0, 2.0), ()), ((1.0, 0.95), ())],
    ids=["slower", "faster", "as-fast"],
)
def test_instructions_that_are_slower_than_what_they_replace_are_left_out(
    seconds: tuple[float, float], wanted: tuple[str, ...], builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_fastest_runs_s", lambda runs: [seconds[index] for index in range(len(runs))])
    assert build._fastest_flags(builder, []) == wanted
    assert builder.linked == [(), build.WITHOUT_BF16]


@pytest.mark.parametrize("flags", ["flags : fpu avx2", f"{BF16} amx_bf16", ""])
def test_nothing_is_measured_where_there_is_no_choice(
    flags: str, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "cpu_flags", lambda: flags)
    assert build._fastest_flags(builder, []) == ()
    assert builder.linked == []


def test_what_is_tried_lies_where_what_is_built_will(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be loaded from a folder of temporary files that is mounted noexec."""
    folders = list[Path]()

    def no_compiler(command: Sequence[str]) -> str:
        folders.append(Path(command[command.index("-o") + 1]).parent)
        raise build.NativeUnavailable("no compiler")

    monkeypatch.setattr(build, "_output", no_compiler)
    with pytest.raises(build.NativeUnavailable, match="no compiler"):
        build._build(["g++"], tmp_path / "kernels.so")
    assert {folder.parent for folder in folders} == {tmp_path}
    assert list(tmp_path.iterdir()) == []


def test_a_compiler_may_have_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As make and setuptools take $CXX; and what another one's arguments made is not taken for its own."""
    monkeypatch.setattr(build, "cache_folder", lambda: tmp_path)
    ran = list[Sequence[str]]()

    def note(command: Sequence[str]) -> str:
        ran.append(command)
        return "g++ 12"

    monkeypatch.setattr(build, "_output", note)
    paths = set[Path]()
    for asked in ("g++", "g++ -m64"):
        monkeypatch.setenv("CXX", asked)
        paths.add(build._path(build._compiler()))
    assert ran == [["g++", "--version"], ["g++", "-m64", "--version"]]
    assert len(paths) == 2


def test_what_is_timed_are_the_products_that_are_served() -> None:
    run = build._product(native.library())
    assert build._fastest_runs_s([run])[0] > 0
    made = torch.frombuffer(bytearray(run()), dtype=torch.bfloat16)
    assert made.eq(build.TRIAL[1]).all()  # ones times ones, over all inputs


def test_kernels_are_missing_until_they_are_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.library()._name == str(build.built())
    assert not build.is_missing()
    monkeypatch.setattr(build, "cache_folder", lambda: tmp_path)
    assert build.is_missing()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not build.is_missing()  # nothing that could be built
