"""A directory as it is among the files downloaded from the hub, which is out of reach."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants


def snapshot_of(name: str, cache: Path) -> Path:
    """Where the files of its main branch are to be."""
    folder = cache / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("1")
    return folder / "snapshots" / "1"


def as_downloaded(directory: Path, name: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name."""
    shutil.copytree(directory, snapshot_of(name, cache))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return name
