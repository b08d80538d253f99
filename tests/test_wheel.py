"""Installed, it works: the wheel in an environment of its own, run in an empty folder, away from the checkout."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.running import environment

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    *("cluster", "decode_worker", "engine", "kv_transfer", "kvrelay", "mixed_worker", "placement"),
    *("prefill_worker", "worker"),
)
DATA = ("configs", "proto")
COMMAND_TIMEOUT_S = 800.0  # where the simulator was not compiled yet
PLAN = ("--model", "llama-3.1-8b", "--hardware", "h100-sxm", "--num-gpus", "2", "--random-input-len", "200")
TARGETS = ("--random-output-len", "20", "--ttft", "1s", "--tpot", "50ms", "--no-colocated", "--out", "plan")
COMPILE = """
from placement.compiled import build
build.COMPILED = ("placement/latency/base.py",)
print(build.compiled_folder())
"""
FOUR_TOKENS = ("--max-tokens", "4", "--ignore-eos")  # whatever is sampled

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools leaves its own files in the folder where it builds."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in (*PACKAGES, *DATA, "tests"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(target), str(source))
    return next(target.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of the wheel and of what this one has beside it, which is not installed again."""
    environment = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    pip("--python", str(environment), "install", "--no-deps", "--no-index", str(wheel))
    for path in Path(sysconfig.get_path("purelib")).iterdir():  # side by side, as pip installs them
        if not path.name.startswith(("kvrelay", "__editable__")) and path.suffix != ".pth":
            (packages / path.name).symlink_to(path)
    return environment / "bin"


def test_the_wheel_holds_all_sources_and_what_names_refer_to(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    sources = {str(path.relative_to(ROOT)) for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
    assert sources - held == set()
    assert {Path(name).parts[0] for name in held if ".dist-info/" not in name} == set(PACKAGES)
    data = {f"placement/configs/{path.relative_to(ROOT / 'configs')}" for path in files(ROOT / "configs")}
    protos = {f"kvrelay/proto/{path.relative_to(ROOT / 'proto')}" for path in files(ROOT / "proto")}
    assert (data | protos) - held == set()
    assert {"kvrelay/py.typed", "kvrelay/plan/report.html", "engine/kernels/csrc/fused.cpp"} <= held


def test_every_command_works_where_nothing_but_the_wheel_is(installed: Path, tmp_path: Path) -> None:
    state, folder = tmp_path / "state", tmp_path / "empty"
    folder.mkdir()
    printed = "import kvrelay, placement; print(kvrelay.__file__, placement.__file__)"
    for module in run(state, folder, installed / "python", "-c", printed).split():
        assert Path(module).is_relative_to(installed.parent)
    kvrelay = installed / "kvrelay"
    assert kvrelay.read_text().startswith(f"#!{installed}")  # not the Python that ran pip
    run(state, folder, kvrelay, "make-model", "model")
    run(state, folder, kvrelay, "up", "--model", "model", "--prefill", "1", "--decode", "1", "--port", "0", "--detach")
    try:
        answer = json.loads(run(state, folder, kvrelay, "generate", "Once", *FOUR_TOKENS, "--json"))
        assert answer["usage"]["completion_tokens"] == 4
    finally:
        run(state, folder, kvrelay, "down")
    run(state, folder, kvrelay, "plan", *PLAN, *TARGETS)
    assert {"cluster.yaml", "plan.json", "report.html"} <= {path.name for path in (folder / "plan").iterdir()}


def test_the_simulator_can_be_compiled_from_there(installed: Path, tmp_path: Path) -> None:
    """One module of it: all take two minutes."""
    made = Path(run(tmp_path, tmp_path, installed / "python", "-c", COMPILE, XDG_CACHE_HOME=str(tmp_path)).strip())
    assert made.parent == tmp_path / "kvrelay"
    assert list(made.glob("placement/latency/base*.so"))


def files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *arguments], check=True, timeout=COMMAND_TIMEOUT_S)


def run(state: Path, folder: Path, *command: str | Path, **changes: str) -> str:
    """Its stdout. Nothing of this checkout or of a cluster of one's own is in its environment."""
    clean = {key: value for key, value in environment(state).items() if key != "PYTHONPATH"} | changes
    done = subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout
