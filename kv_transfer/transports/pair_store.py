"""PairStore is where the two ranks of a pair's process group meet: a torch Store over the pair's own connection.

It listens nowhere: what a rank sets is sent to the other, and what it wants is read from there. Frames are a key's and
a value's length, then both; the lengths are checked before anything is read for them.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed

from kv_transfer.transports.pair_socket import first_words, read_exactly, shut

LENGTHS = struct.Struct("<II")  # of the key and of the value, in bytes
MAX_KEY_BYTES = 4096
MAX_VALUE_BYTES = 1 << 20  # addresses and NCCL's ids have some hundreds

dist: Any = torch.distributed  # its names are not all in its type stubs


class PairStore(dist.Store):  # type: ignore[misc]
    """Torch calls these from its own threads. Whoever makes one keeps it as long as the process group: torch keeps
    only its own half. Raises RuntimeError, which torch hands on, for a peer that is late or gone."""

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        super().__init__()
        self._socket = sock
        self._timeout_s = timeout_s
        self._reading = threading.Lock()
        self._writing = threading.Lock()
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        data, name = value.encode() if isinstance(value, str) else bytes(value), key.encode()
        assert len(name) <= MAX_KEY_BYTES, "no key is so long"
        assert len(data) <= MAX_VALUE_BYTES, "a store carries no KV"
        self._values[key] = data
        try:
            with self._writing:
                self._socket.sendall(LENGTHS.pack(len(name), len(data)) + name + data)
        except OSError as error:
            raise RuntimeError(f"the pair's connection is lost: {error.strerror or error}") from error

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        deadline_s = time.monotonic() + timeout_s
        for key in keys:
            while key not in self._values:
                if not self._take(max(0.0, deadline_s - time.monotonic())):
                    raise RuntimeError(f"the other rank did not come within {timeout_s:g} s")

    def check(self, keys: Sequence[str]) -> bool:
        while self._take(0.0):
            pass
        return all(key in self._values for key in keys)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def has_extended_api(self) -> bool:
        return False

    def clone(self) -> PairStore:
        return self

    def abort(self) -> None:
        """From any thread: whoever waits here wakes."""
        shut(self._socket)

    def close(self) -> None:
        self._socket.close()

    def _take(self, timeout_s: float) -> bool:
        """Read one frame; False if none comes in time."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        with self._reading:
            if not _has_bytes(self._socket) and not poll.poll(timeout_s * 1000):
                return False
            try:
                key_bytes, value_bytes = LENGTHS.unpack(read_exactly(self._socket, LENGTHS.size))
                if key_bytes > MAX_KEY_BYTES or value_bytes > MAX_VALUE_BYTES:
                    raise RuntimeError(f"the other rank sends a value of {key_bytes} + {value_bytes} bytes")
                key = read_exactly(self._socket, key_bytes).decode()
                self._values[key] = read_exactly(self._socket, value_bytes)
            except OSError as error:
                raise RuntimeError(f"the pair's connection is lost: {first_words(error)}") from error
        return True


def _has_bytes(sock: socket.socket) -> bool:
    """TLS reads ahead of what is asked for."""
    pending = getattr(sock, "pending", None)
    return pending is not None and pending() > 0
