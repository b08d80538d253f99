"""A copy of the sources to change, and what a process says that runs in it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.deploy.running import environment

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (
    *("cluster", "configs", "decode_worker", "docs", "engine", "kv_transfer", "kvrelay", "placement"),
    *("mixed_worker", "prefill_worker", "worker"),
)
TIMEOUT_S = 240.0


def copied(target: Path) -> Path:
    for name in SOURCES:
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    return target


def inserted(path: Path, before: str, text: str) -> None:
    """`text` right after the one line `before`."""
    source = path.read_text()
    assert source.count(before) == 1, f"{path.name} has {before!r} {source.count(before)} times"
    path.write_text(source.replace(before, before + text))


def run(tree: Path, *command: str) -> str:
    """stdout of `python COMMAND` in the tree."""
    call = [sys.executable, *command]
    shown = {"PYTHONPATH": str(tree), "COLUMNS": "160", "NO_COLOR": "1", "TERM": "dumb"}
    done = subprocess.run(
        call,
        cwd=tree,
        env=environment(tree / "state") | shown,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout
