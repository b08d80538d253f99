"""Where built things go when the usual place cannot be had, and that a worker serves without any."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from engine.build_cache import cache_folder

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
