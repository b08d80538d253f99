"""The program that builds FlashInfer's modules ahead: what it installs, how it is linked, what it builds and says."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.gpu import prebuild
from engine.attention.flashinfer import build as flashinfer_build
from engine.attention.flashinfer.build import ABOUT, Target, checked, library

HERE = Target("0.6.14", "9.0a")
CONSTRAINTS = (prebuild.ROOT / "constraints-gpu.txt").read_text()


def test_what_is_installed_is_what_the_constraints_pin() -> None:
    wanted = dict(line.split("==") for line in prebuild.requirements(CONSTRAINTS))
    assert wanted["flashinfer-python"] in CONSTRAINTS
    assert wanted["nvidia-cuda-nvcc"] == "13.0.*"
    assert wanted["nvidia-cuda-runtime"].startswith("13.0.")
    assert set(wanted) == {*prebuild.COMPILER, *prebuild.HEADERS, *prebuild.LIBRARY}


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_what_is_linked_against_pip_s_wheels_wants_the_driver_s_library(tmp_path: Path) -> None:
    home = tmp_path / "cu13"
    (home / "lib").mkdir(parents=True)
    subprocess.run(["cc", "-shared", "-x", "c", os.devnull, "-o", home / "lib" / "libcudart.so.13"], check=True)
    prebuild.make_linkable(home)
    compiler = prebuild.environment(tmp_path, tmp_path, "9.0a")["CXX"].split()
    folders = [f"-L{home / 'lib64'}", f"-L{home / 'lib64' / 'stubs'}"]
    linked = tmp_path / "a.so"
    command = [*compiler, "-shared", "-x", "c++", os.devnull, "-Wl,--as-needed", *folders, "-Wl,--no-as-needed"]
    subprocess.run([*command, "-lcudart", "-lcuda", "-o", linked], check=True)
    assert b"libcuda.so.1" in linked.read_bytes()


def test_the_process_that_builds_is_told_what_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    told = prebuild.environment(tmp_path / "site", tmp_path, "10.0a")
    assert told["FLASHINFER_CUDA_ARCH_LIST"] == "10.0a"
    assert told["CUDA_HOME"] == str(tmp_path / "site" / "nvidia" / "cu13")
    assert told["PATH"].startswith(str(tmp_path / "site" / "bin"))
    assert "FLASHINFER_DISABLE_JIT" not in told


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the compiler is asked for; `fa3` fails."""
    names: list[str] = []

    def build(specs: Sequence[Any], folder: Path, jobs: int | None) -> dict[str, str]:
        names.extend(spec.name for spec in specs)
        for spec in specs:
            if spec.name != "fa3":
                library(folder, spec.name).parent.mkdir()
                library(folder, spec.name).write_bytes(b"x" * (1 << 20))
        return {spec.name: "a.cu(3): error: none" for spec in specs if spec.name == "fa3"}

    def specs_of(modules: Any) -> tuple[dict[Any, Any], dict[Any, str]]:
        return {module: SimpleNamespace(name=module[0]) for module in modules}, {}

    monkeypatch.setattr(flashinfer_build, "build", build)
    monkeypatch.setattr(flashinfer_build, "specs_of", specs_of)
    monkeypatch.setattr(flashinfer_build.Target, "here", lambda: HERE)
    monkeypatch.setattr(prebuild, "needed", lambda *_: [(name, ()) for name in ("page", "fa2", "fa3")])
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    return names


def test_each_module_is_named_with_its_size_or_its_failing(
    built: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert prebuild.build(prebuild.parse(["--model", "8b", "--out", str(out)])) == 1
    said = capsys.readouterr().out
    assert "page: 1.0 MiB" in said
    assert "fa3: a.cu(3): error: none" in said
    assert f"2 of 3 modules in {out}: 2.0 MiB" in said
    assert checked(out, HERE) == out
    assert json.loads((out / ABOUT).read_text()) == {"flashinfer": "0.6.14", "arch": "9.0a"}


def test_what_is_there_is_left_and_words_choose(built: list[str], tmp_path: Path) -> None:
    arguments = ["--model", "8b", "--out", str(tmp_path), "--modules", "page", "fa2"]
    assert prebuild.build(prebuild.parse(arguments)) == 0
    assert built == ["page", "fa2"]
    assert prebuild.build(prebuild.parse(arguments)) == 0
    assert built == ["page", "fa2"]
    with pytest.raises(SystemExit, match="--modules is xqa; give words of page, fa2, fa3"):
        prebuild.build(prebuild.parse([*arguments[:-2], "xqa"]))


def test_the_8b_model_needs_eight_modules_and_the_tests_theirs() -> None:
    arguments = prebuild.parse(["--model", "8b", "--out", "out"])
    assert len(prebuild.needed("8b", arguments, (9, 0))) == 8
    assert len(prebuild.needed("tests", arguments, (9, 0))) > 8
