"""FlashInfer's modules are had: from where they were built beforehand, or built together, whatever fails among them.

The library is a stand-in whose modules are made by cp; ninja is the real one.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from engine.attention.flashinfer import build as flashinfer_build
from engine.attention.flashinfer.build import ABOUT, Target, library, provide
from engine.device import AOT_SETTING

HERE = Target("0.6.14", "9.0a")
needs_ninja = pytest.mark.skipif(shutil.which("ninja") is None, reason="there is no ninja")


class Spec:
    """A module of two files: what the library gives of one."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.folder = folder / name
        self.ninja_path = self.folder / "build.ninja"
        self.jit_library_path = self.folder / f"{name}.so"

    def write_ninja(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "a.cu").write_text(self.name)
        compiler = "cp $in $out"
        if self.name.startswith("broken"):
            compiler = "echo In file included from a.cu; echo 'a.cu(7): error: expected a \";\"'; exit 2"
        lines = ["rule compile", f"  command = {compiler}", "rule link", "  command = cp $in $out"]
        lines += [f"build {self.folder}/a.o: compile {self.folder}/a.cu"]
        lines += [f"build {self.jit_library_path}: link {self.folder}/a.o", f"default {self.jit_library_path}", ""]
        self.ninja_path.write_text("\n".join(lines))


class Library:
    def __init__(self, root: Path) -> None:
        self.package = root / "package" / "aot"
        self.env = ModuleType("env")
        self.env.FLASHINFER_AOT_DIR = self.package  # type: ignore[attr-defined]
        self.env._get_aot_dir = lambda: self.package  # type: ignore[attr-defined]
        self.jit = ModuleType("jit")
        self.jit.gen = lambda name: Spec(root / "jit", name)  # type: ignore[attr-defined]

    @property
    def folder(self) -> Path:
        """Where the library looks."""
        return Path(self.env.FLASHINFER_AOT_DIR)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Library:
    made = Library(tmp_path)
    context = SimpleNamespace(TARGET_CUDA_ARCHS={(9, "0a")})
    for name, module in {
        "flashinfer.jit": made.jit,
        "flashinfer.jit.env": made.env,
        "flashinfer.jit.core": SimpleNamespace(current_compilation_context=context),
        "flashinfer.version": SimpleNamespace(__version__=HERE.flashinfer),
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("FLASHINFER_DISABLE_JIT", "FLASHINFER_EXTRA_CUDAFLAGS", "MAX_JOBS", AOT_SETTING):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(flashinfer_build, "nvcc", lambda: str(tmp_path / "cuda" / "bin" / "nvcc"))
    return made


def wanted(*names: str) -> list[tuple[str, tuple[Any, ...]]]:
    return [("gen", (name,)) for name in names]


def put(folder: Path, *names: str, about: Target | None = HERE) -> Path:
    """Libraries that were built beforehand."""
    for name in names:
        library(folder, name).parent.mkdir(parents=True)
        library(folder, name).write_text(f"{name}, beforehand")
    if about is not None:
        (folder / ABOUT).write_text(json.dumps(asdict(about)))
    return folder


@needs_ninja
def test_what_is_lacking_is_built_once_and_nothing_is_compiled_later(
    fake: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert provide(wanted("page", "decode")) == {}
    assert fake.folder != fake.package
    assert library(fake.folder, "decode").read_text() == "decode"
    assert os.environ["FLASHINFER_DISABLE_JIT"]
    assert provide(wanted("page", "prefill")) == {}, "a second model of this process"
    assert library(fake.folder, "prefill").exists()
    monkeypatch.setattr(flashinfer_build, "build", lambda *_: pytest.fail("built again"))
    assert provide(wanted("page", "decode", "prefill")) == {}


@needs_ninja
def test_a_module_that_fails_is_named_with_its_first_error_and_the_others_go_on(
    fake: Library, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    failed = provide(wanted("broken", "page", "broken_too", "decode"))
    assert failed == dict.fromkeys(wanted("broken", "broken_too"), 'a.cu(7): error: expected a ";"')
    assert [name for name in ("broken", "page", "broken_too", "decode") if library(fake.folder, name).exists()] == [
        "page",
        "decode",
    ]
    assert "FlashInfer's module broken cannot be built: a.cu(7): error" in caplog.text
    assert "2 of 4 built" in caplog.text


def test_what_was_built_beforehand_is_taken_where_it_is(
    fake: Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    put(fake.package, "decode", "page", about=None)
    monkeypatch.setenv(AOT_SETTING, str(put(tmp_path / "ahead", "page", "prefill")))
    monkeypatch.setattr(flashinfer_build, "nvcc", lambda: None)
    assert provide(wanted("page", "decode", "prefill")) == {}
    assert library(fake.folder, "page").resolve() == library(tmp_path / "ahead", "page")
    assert library(fake.folder, "decode").resolve() == library(fake.package, "decode")
    assert os.environ["FLASHINFER_DISABLE_JIT"]


@needs_ninja
def test_what_the_folder_built_beforehand_lacks_is_named_and_built(
    fake: Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ahead = put(tmp_path / "ahead", "page")
    monkeypatch.setenv(AOT_SETTING, str(ahead))
    assert provide(wanted("page", "decode", "prefill")) == {}
    assert f"{AOT_SETTING} is {ahead}, which lacks decode, prefill" in caplog.text
    assert library(fake.folder, "decode").read_text() == "decode"


def test_without_a_compiler_what_lacks_is_handed_back(fake: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    put(fake.package, "page", about=None)
    monkeypatch.setattr(flashinfer_build, "nvcc", lambda: None)
    [[module, why]] = provide(wanted("page", "decode")).items()
    assert module == ("gen", ("decode",))
    assert "no nvcc" in why


def test_who_forbids_compiling_is_obeyed(fake: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    assert "FLASHINFER_DISABLE_JIT is set" in provide(wanted("page"))["gen", ("page",)]


def test_a_module_that_the_library_does_not_describe_is_handed_back(fake: Library) -> None:
    put(fake.package, "page", about=None)
    refused = ("gen", ("a", "b"))
    failed = provide([*wanted("page"), refused])
    assert set(failed) == {refused}
    assert "takes 1 positional argument but 2 were given" in failed[refused]


@pytest.mark.parametrize(
    ("about", "says"),
    [
        (None, "where no about.json can be read"),
        (Target("0.6.13", "9.0a"), "built for FlashInfer 0.6.13 on 9.0a, and here is 0.6.14 on 9.0a; build it again"),
        (Target("0.6.14", "8.0"), "on 8.0, and here is 0.6.14 on 9.0a"),
    ],
)
def test_a_folder_for_something_else_is_refused(
    fake: Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, about: Target | None, says: str
) -> None:
    monkeypatch.setenv(AOT_SETTING, str(put(tmp_path / "ahead", "page", about=about)))
    with pytest.raises(ValueError, match=says):
        provide(wanted("page"))


def test_headers_that_a_bare_compiler_lacks_are_those_of_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake: Library
) -> None:
    headers = tmp_path / "nvidia" / "cu13" / "include"
    headers.mkdir(parents=True)
    (headers / "cublasLt.h").touch()
    found = SimpleNamespace(submodule_search_locations=[str(tmp_path / "nvidia")])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found)
    flags = flashinfer_build._with_cublas_headers("-lineinfo")
    assert flags == f"-lineinfo -isystem {headers}"
    assert flashinfer_build._with_cublas_headers(flags) == flags
    own = tmp_path / "cuda" / "include"
    own.mkdir(parents=True)
    (own / "cublasLt.h").touch()
    assert flashinfer_build._with_cublas_headers("") == ""
