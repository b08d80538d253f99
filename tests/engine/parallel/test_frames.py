"""Frames between a worker's processes: what is sent arrives, and what is no frame is not read on."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from engine.parallel.frames import MAX_JSON_BYTES, BadFrame, Channel, Frame


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_a_frame_arrives_as_it_was_sent(ends: tuple[socket.socket, socket.socket]) -> None:
    sender, receiver = (Channel(end) for end in ends)
    read, write = os.pipe()
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "ids": np.arange(6, dtype=np.int64).reshape(2, 3)[:, ::2],
        "none": np.zeros((0, 4), np.int32),
        "tables": np.array([[7]], np.int32),
    }
    sender.send(Frame("step", {"page_size": 16, "name": "é"}, arrays, files=(write,)))
    sender.send(Frame("end"))

    frame = receiver.receive()
    assert frame is not None
    assert (frame.kind, frame.fields) == ("step", {"page_size": 16, "name": "é"})
    assert list(frame.arrays) == list(arrays)
    for name, array in arrays.items():
        assert frame.arrays[name].dtype == array.dtype
        assert np.array_equal(frame.arrays[name], array)
    [fd] = frame.files
    os.write(fd, b"x")
    assert os.read(read, 1) == b"x"
    assert receiver.receive() == Frame("end")
    for each in (fd, read, write):
        os.close(each)


@pytest.mark.parametrize("cut", [3, 8, 20, -1])
def test_a_stream_that_ends_is_an_end(ends: tuple[socket.socket, socket.socket], cut: int) -> None:
    sender, receiver = ends
    head = json.dumps({"kind": "step", "fields": {}, "arrays": [["a", "int32", [2]]]}).encode()
    sender.sendall((struct.pack("<II", len(head), 8) + head + bytes(8))[:cut])
    sender.close()
    assert Channel(receiver).receive() is None


def _head(**changes: object) -> bytes:
    return json.dumps({"kind": "step", "fields": {}, "arrays": [], **changes}).encode()


@pytest.mark.parametrize(
    ("head", "data", "reason"),
    [
        (b"\x00" * 9, b"", "head cannot be read"),
        (b"[]", b"", "head cannot be read"),
        (_head(arrays=[["a", "int32"]]), b"", "head cannot be read"),
        (_head(arrays=[["a", "object", [1]]]), bytes(8), "array a is of object"),
        (_head(arrays=[["a", "int32", [-1]]]), b"", r"array a is of int32 \[-1\]"),
        (_head(arrays=[["a", "int64", [2]]]), bytes(8), "array a is longer than the frame"),
        (_head(), bytes(8), "8 bytes more than its arrays"),
    ],
)
def test_what_is_no_frame_is_refused(
    ends: tuple[socket.socket, socket.socket], head: bytes, data: bytes, reason: str
) -> None:
    sender, receiver = ends
    sender.sendall(struct.pack("<II", len(head), len(data)) + head + data)
    with pytest.raises(BadFrame, match=reason):
        Channel(receiver).receive()


def test_a_length_that_no_frame_has_is_refused_before_anything_is_read_for_it(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    sender, receiver = ends
    sender.sendall(struct.pack("<II", MAX_JSON_BYTES + 1, 0))
    with pytest.raises(BadFrame, match=f"{MAX_JSON_BYTES + 1} \\+ 0 bytes"):
        Channel(receiver).receive()
