"""Where built things go when the usual place cannot be had, and that a worker serves without any."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine import build_cache
from engine.build_cache import built_once, cache_folder, locked

pytestmark = pytest.mark.unit


def test_a_user_without_a_home_has_a_folder_beside_the_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert cache_folder() == tmp_path / f"kvrelay-{os.getuid()}"


def test_kernels_that_a_full_disk_does_not_take_are_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.kernels import build, native

    def full() -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(build, "cache_folder", full)
    with pytest.raises(build.NativeUnavailable, match=r"no place for the built kernels: .* No space"):
        native.library.__wrapped__()


def test_kernels_that_cannot_be_loaded_are_told_with_the_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.kernels import build, native

    made = tmp_path / "kernels.so"
    made.touch()
    monkeypatch.setattr(native, "built", lambda: made)
    with pytest.raises(
        build.NativeUnavailable, match=r"kernels\.so: file too short; remove that file, or set XDG_CACHE"
    ):
        native.library.__wrapped__()


@pytest.mark.parametrize("name", ["", "placement/base.so"], ids=["file", "folder"])
def test_what_appears_is_on_the_disk_by_then(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or it may be cut off, or empty, once the machine has lost its power."""
    settled = list[int]()

    def note(fd: int) -> None:
        assert not (tmp_path / "made").exists()
        settled.append(os.fstat(fd).st_ino)

    def build(unfinished: Path) -> None:
        (unfinished / name).parent.mkdir(parents=True, exist_ok=True)
        (unfinished / name).write_text("machine code")

    monkeypatch.setattr(os, "fsync", note)
    made = built_once(tmp_path / "made", build)
    assert settled == [(made / name).stat().st_ino]


def test_whoever_holds_the_lock_and_hangs_is_waited_for_no_longer_than_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build_cache, "PATIENCE_S", 0.2)
    made = tmp_path / "kernels.so"
    hangs = f"""
from engine.build_cache import *
with locked(Path({str(made)!r})):
    print(flush=True)
    os.kill(os.getpid(), 19)
"""
    with subprocess.Popen([sys.executable, "-c", hangs], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert built_once(made, Path.touch) == made
        told = f"process {holder.pid} has held {made}.lock for 0.2 s; it is waited for no longer: end it"
        assert told in caplog.text
        holder.kill()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kernels.so", "kernels.so.lock"]
    with locked(made, 0):
        assert (tmp_path / "kernels.so.lock").read_text() == f"{os.getpid()}\n"
