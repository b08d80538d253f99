"""What runs left in the temporary folder is removed, and never what belongs to one that lives, or to others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from cluster.deploy.own_ray import local_ray
from cluster.deploy.own_ray.local_ray import PREFIX, LocalRay, _locked, _make_folder, _sweep

pytestmark = pytest.mark.unit

NO_PID_HERE = 2**22 + 1  # as another container's processes have none in this one's


def test_a_folder_of_one_that_lives_is_kept_whatever_its_process_is_called_here(tmp_path: Path) -> None:
    folder = tmp_path / f"{PREFIX}{NO_PID_HERE}-abc"
    folder.mkdir()
    descriptor = _locked(folder)
    assert descriptor is not None
    _sweep(str(tmp_path))
    assert folder.exists()
    os.close(descriptor)
    _sweep(str(tmp_path))
    assert not folder.exists()


def test_a_folder_is_its_makers_until_it_ends(tmp_path: Path) -> None:
    folder, descriptor = _make_folder(str(tmp_path))
    (folder / "token").touch()
    _sweep(str(tmp_path))
    assert (folder / "token").exists()
    assert _locked(folder) is None
    os.close(descriptor)
    _sweep(str(tmp_path))
    assert not folder.exists()


def test_others_folders_are_left(tmp_path: Path) -> None:
    (tmp_path / "else").mkdir()
    (tmp_path / f"{PREFIX}file").touch()
    _sweep(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["else", f"{PREFIX}file"]


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


@pytest.mark.parametrize(("wanted", "is_taken"), [("/a b", True), ("/ü", False), ("/" + "a" * 90, False)])
def test_what_ray_cannot_read_is_not_its_folder(monkeypatch: pytest.MonkeyPatch, wanted: str, is_taken: bool) -> None:
    monkeypatch.setattr(tempfile, "tempdir", wanted)
    assert local_ray._base() == (wanted if is_taken else "/tmp")


def test_where_no_temporary_file_can_be_written_it_tells_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose root is read-only, without a mount at /tmp."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/nowhere"])
    with pytest.raises(OSError, match=r"nowhere.*; set TMPDIR"):
        local_ray._base()


def test_a_keeper_that_ended_is_told_though_nobody_has_reaped_it() -> None:
    child = subprocess.Popen(["sleep", "60"])
    ray = LocalRay()
    ray._keepers["raylet"] = psutil.Process(child.pid)
    assert ray.why_lost() == ""
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie now
    assert ray.why_lost() == "Ray's raylet ended, and nobody is left who restarts what fails"
    child.wait()
    assert ray.why_lost()


def test_one_that_nobody_reaps_has_ended() -> None:
    child = subprocess.Popen(["sleep", "60"])
    process = psutil.Process(child.pid)
    assert local_ray._alive_after([process], 0.05) == [process]
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert local_ray._alive_after([process], 60.0) == []
    child.wait()


class Process:
    def __init__(self, is_gone: bool) -> None:
        self._is_gone = is_gone
        self.signals: list[int] = []

    def send_signal(self, signum: int) -> None:
        if self._is_gone:
            raise psutil.NoSuchProcess(7)
        self.signals.append(signum)


@pytest.mark.parametrize(("is_initialized", "is_answering"), [(True, False), (False, True)])
def test_what_ray_cannot_end_is_killed_at_once_and_one_that_dies_meanwhile_keeps_nobody(
    is_initialized: bool, is_answering: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not answer, or its start was interrupted."""
    waited: list[float] = []

    def alive_after(processes: Iterable[Any], timeout_s: float) -> list[Any]:
        waited.append(timeout_s)
        return list(processes)

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(shutdown=None, is_initialized=lambda: is_initialized))
    monkeypatch.setattr(local_ray, "_alive_after", alive_after)
    ray: Any = LocalRay()
    ray._folder = tmp_path / "folder"
    ray._folder.mkdir()
    gone, there = Process(is_gone=True), Process(is_gone=False)
    ray._seen = {1: gone, 2: there}
    assert ray.stop(is_answering=is_answering) != is_initialized
    assert waited[0] == 0
    assert there.signals == [signal.SIGKILL]
    assert not (tmp_path / "folder").exists()
