"""A file that is written anew has what was written, or what it had."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from placement.whole_file import write_whole

pytestmark = pytest.mark.unit


@contextmanager
def room_for(most_bytes: int) -> Iterator[None]:
    """In each file, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_where_there_is_no_room_the_file_is_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_whole(path, "known")
    with pytest.raises(OSError, match="File too large"), room_for(100):
        write_whole(path, "x" * 10_000)
    assert path.read_text() == "known"
    assert os.listdir(tmp_path) == ["profile.json"]


def test_of_a_link_the_file_that_it_is_to_is_written(tmp_path: Path) -> None:
    link, path = tmp_path / "newest.json", tmp_path / "profile.json"
    link.symlink_to(path)
    write_whole(link, "known")
    assert (link.is_symlink(), path.read_text()) == (True, "known")


def test_a_pipe_stays_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, "known")
        assert os.read(reader, 100) == b"known"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
