"""What `up` takes away when it ends is its own, however early it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.deploy import local_ray
from cluster.deploy.local_ray import LocalRay

pytestmark = pytest.mark.unit


def test_a_ray_that_was_never_started_takes_nothing_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").write_text("of the folder from where `up` was called")
    monkeypatch.chdir(tmp_path)
    LocalRay().stop()
    assert (tmp_path / "mine").exists()


def test_nor_does_one_that_found_no_room_for_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").write_text("of the folder from where `up` was called")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local_ray, "_base", lambda: str(tmp_path / "missing"))
    ray = LocalRay()
    with pytest.raises(OSError, match="missing"):
        ray.start("kvrelay", {})
    ray.stop()
    assert (tmp_path / "mine").exists()
    assert tmp_path.exists()
