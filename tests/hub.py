"""A directory as it is among the files downloaded from the hub, which is out of reach."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants


def as_downloaded(directory: Path, name: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name."""
    folder = cache / f"models--{name.replace('/', '--')}"
    shutil.copytree(directory, folder / "snapshots" / "1")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("1")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return name
