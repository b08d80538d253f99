"""A process's log outlives it, whole, whoever wrote to it, and no disk keeps the process from its work."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from worker.log_file import OLDER_FILES, why_no_log

pytestmark = pytest.mark.unit


def run(folder: Path | str, then: str, **changes: object) -> subprocess.CompletedProcess[str]:
    lines = [
        "import logging, os, sys, worker.log_file as log_file",
        *(f"log_file.{name} = {value!r}" for name, value in changes.items()),
        f"log_file.log_into({str(folder)!r}, 'decode-0')",
        then,
        "os._exit(7)",
    ]
    return subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=60)


def test_what_is_logged_and_the_last_words_of_a_crash_are_in_the_file(tmp_path: Path) -> None:
    run(tmp_path / "logs", "logging.info('serving')\nos.write(2, b'Fatal: out of memory\\n')\nprint('bye', flush=True)")
    text = (tmp_path / "logs" / "decode-0.log").read_text()
    assert [text.count(words) for words in ("serving", "Fatal: out of memory", "bye")] == [1, 1, 1]
    assert (tmp_path / "logs").stat().st_mode & 0o777 == 0o700


def test_the_next_process_goes_on_in_the_same_file(tmp_path: Path) -> None:
    for word in ("first", "second"):
        run(tmp_path, f"logging.info({word!r})")
    assert "first" in (tmp_path / "decode-0.log").read_text()
    assert "second" in (tmp_path / "decode-0.log").read_text()


def test_the_files_are_bounded_and_stderr_follows_the_newest(tmp_path: Path) -> None:
    run(tmp_path, "for _ in range(1000): logging.info('x' * 100)\nos.write(2, b'last')", MAX_BYTES=10_000)
    files = sorted(tmp_path.iterdir())
    assert len(files) == 1 + OLDER_FILES
    assert all(file.stat().st_size <= 10_000 + len("last") for file in files)
    assert (tmp_path / "decode-0.log").read_text().endswith("last")


def test_a_full_disk_costs_lines_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "decode-0.log").symlink_to("/dev/full")
    assert run(tmp_path, "for _ in range(100): logging.error('lost' * 100)", MAX_BYTES=1000).returncode == 7


def test_a_folder_that_cannot_be_made_leaves_the_log_on_stderr() -> None:
    ended = run("/proc/nowhere/logs", "logging.warning('still here')")
    assert "still here" in ended.stderr
    assert "cannot log into /proc/nowhere/logs" in ended.stdout


@pytest.mark.parametrize("failure", [errno.EROFS, errno.ENOSPC])
def test_where_nothing_can_be_logged_is_known_before_the_start(
    failure: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(**_: object) -> None:
        raise OSError(failure, os.strerror(failure))

    assert why_no_log(str(tmp_path / "logs")) == ""
    assert not list((tmp_path / "logs").iterdir())
    monkeypatch.setattr("tempfile.TemporaryFile", fails)
    told = f"nothing can be logged into {tmp_path}/logs: {os.strerror(failure).lower()}"
    assert why_no_log(str(tmp_path / "logs")) == told
