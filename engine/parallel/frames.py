"""Frames between the leader of a worker and its other processes: plain data and arrays of integers, no pickle.

    lengths (8 bytes) | JSON: kind, fields, arrays' names, dtypes and shapes | the arrays' bytes, one after another

One socket pair for each process, inherited at its start. Every length is checked before anything is read for it. A
frame may carry open files, such as that of the KV pages and the ends of a process's sockets.
"""

from __future__ import annotations

import json
import math
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

LENGTHS = struct.Struct("<II")  # of the JSON and of the arrays, in bytes
MAX_JSON_BYTES = 1 << 20
MAX_ARRAY_BYTES = 1 << 30
MAX_FILES = 253  # the kernel's, for one message
DTYPES = ("int32", "int64", "uint8")  # what is of another type goes as bytes


class BadFrame(Exception):
    """What came is no frame: the stream cannot be read further."""


@dataclass(frozen=True, slots=True)
class Frame:
    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    files: Sequence[int] = ()  # open here; whoever takes the frame closes them


class Channel:
    """One end. One thread sends and one receives; they may be two."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, frame: Frame) -> None:
        """Raises OSError when the other side is gone, or reads nothing until the socket's timeout."""
        arrays = {name: np.ascontiguousarray(array) for name, array in frame.arrays.items()}
        described = [[name, str(array.dtype), list(array.shape)] for name, array in arrays.items()]
        head = json.dumps({"kind": frame.kind, "fields": frame.fields, "arrays": described}).encode()
        data = b"".join(array.tobytes() for array in arrays.values())
        assert len(head) <= MAX_JSON_BYTES, "no frame says so much"
        assert len(data) <= MAX_ARRAY_BYTES, "no step is so large"
        lengths = LENGTHS.pack(len(head), len(data))
        if frame.files:
            sent = socket.send_fds(self._socket, [lengths], list(frame.files))
            lengths = lengths[sent:]
        self._socket.sendall(lengths + head + data)

    def receive(self) -> Frame | None:
        """The next frame; None when the other side is gone. Raises BadFrame."""
        files: list[int] = []
        try:
            lengths = self._lengths(files)
            if lengths is None:
                return None
            head_bytes, data_bytes = lengths
            head, data = self._exactly(head_bytes), self._exactly(data_bytes)
            if head is None or data is None:
                return None
            kind, fields, described = _parsed(bytes(head))
            frame = Frame(kind, fields, _cut(data, described), tuple(files))
            files = []
            return frame
        except ConnectionError:  # it died with a frame of ours unread
            return None
        finally:
            for fd in files:
                os.close(fd)

    def close(self) -> None:
        self._socket.close()

    def _lengths(self, files: list[int]) -> tuple[int, int] | None:
        read = b""
        while len(read) < LENGTHS.size:
            part, fds, _, _ = socket.recv_fds(self._socket, LENGTHS.size - len(read), MAX_FILES)
            files += fds
            if not part:
                return None
            read += part
        head_bytes, data_bytes = LENGTHS.unpack(read)
        if head_bytes > MAX_JSON_BYTES or data_bytes > MAX_ARRAY_BYTES:
            raise BadFrame(f"a frame of {head_bytes} + {data_bytes} bytes is no frame")
        return head_bytes, data_bytes

    def _exactly(self, num_bytes: int) -> bytearray | None:
        buffer = bytearray(num_bytes)
        view = memoryview(buffer)
        while view:
            got = self._socket.recv_into(view)
            if not got:
                return None
            view = view[got:]
        return buffer


def _parsed(head: bytes) -> tuple[str, dict[str, Any], list[tuple[str, str, list[int]]]]:
    try:
        data = json.loads(head)
        described = [(str(name), str(dtype), [int(n) for n in shape]) for name, dtype, shape in data["arrays"]]
        return str(data["kind"]), dict(data["fields"]), described
    except (ValueError, KeyError, TypeError) as error:
        raise BadFrame(f"a frame's head cannot be read: {type(error).__name__}: {error}") from error


def _cut(data: bytearray, described: Sequence[tuple[str, str, list[int]]]) -> dict[str, npt.NDArray[Any]]:
    arrays: dict[str, npt.NDArray[Any]] = {}
    at = 0
    for name, dtype, shape in described:
        if dtype not in DTYPES or any(n < 0 for n in shape):
            raise BadFrame(f"a frame's array {name} is of {dtype} {shape}")
        end = at + math.prod(shape) * np.dtype(dtype).itemsize
        if end > len(data):
            raise BadFrame(f"a frame's array {name} is longer than the frame")
        arrays[name] = np.frombuffer(data, dtype, count=math.prod(shape), offset=at).reshape(shape)
        at = end
    if at != len(data):
        raise BadFrame(f"a frame has {len(data) - at} bytes more than its arrays")
    return arrays
