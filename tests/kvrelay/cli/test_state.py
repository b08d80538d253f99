"""`up` that cannot note what it starts ends with a sentence."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kvrelay.cli.cluster import daemon, state
from kvrelay.cli.console import CliError

pytestmark = pytest.mark.unit


def _full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(state, "write_private", _full)
    with pytest.raises(CliError, match="cannot be written: no space left on device; set XDG_STATE_HOME"):
        state.write(state.this_process("chat", "foreground"))


def test_so_is_a_log_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    state.make_directory()
    (state.log_path("chat").parent.parent).write_text("a file where a folder is wanted")
    with pytest.raises(CliError, match=r"cannot be written: .*; set XDG_STATE_HOME"):
        daemon.start_and_wait("chat", as_json=False)
