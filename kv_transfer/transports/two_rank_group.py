"""TwoRankGroup is a pair's own torch ProcessGroup, and the thread that waits for its operations.

The pair's ends never call the process group themselves: a wait on it may not end when it should, so a thread waits, and
the ends wait for that thread, which can be left behind. After any error the group is of no use: the pair must be opened
anew, under a new name. GlooGroup is in gloo.py, NcclGroup in gpu/nccl.py.
"""

from __future__ import annotations

import atexit
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any
from weakref import WeakSet

import torch

from kv_transfer.base import TransferError

PREFILL_RANK, DECODE_RANK = 0, 1

_groups: WeakSet[TwoRankGroup] = WeakSet()


@atexit.register
def _join_groups() -> None:
    """A thread that the interpreter's end finds inside gloo would end the process with std::terminate."""
    groups = list(_groups)
    for group in groups:
        group.abort("this process is ending")
    for group in groups:
        group.join()


class TwoRankGroup(ABC):
    def __init__(self, make: Callable[[], Any], peer: str, timeout_s: float) -> None:
        """`make` blocks until both ranks are there."""
        self._make = make
        self._peer = peer
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._pending: set[Future[None]] = set()
        self._error: TransferError | None = None
        self._works: SimpleQueue[Any] = SimpleQueue()  # None ends the thread
        self._process_group: Any = None
        self._thread = threading.Thread(target=self._run, name=f"kv-group-{peer}", daemon=True)
        _groups.add(self)

    def open(self) -> None:
        """Meet the other rank. Raises TransferError."""
        opened: Future[None] = self._promise()
        self._thread.start()
        self._works.put((self._meet, opened))
        opened.result()

    @abstractmethod
    def send(self, data: torch.Tensor) -> Future[None]:
        """Done when the buffer may be used again."""

    @abstractmethod
    def receive(self, data: torch.Tensor) -> Future[None]:
        """Done when the bytes stand in the buffer."""

    def abort(self, reason: str) -> None:
        """Fail what is pending and what comes. The thread may linger in the group; it owns its buffers."""
        with self._lock:
            if self._error is not None:
                return
            self._error = TransferError(reason)
            pending, self._pending = self._pending, set()
        self._works.put(None)
        for future in pending:
            future.set_exception(self._error)

    def join(self) -> None:
        """After abort: wait for what still waits in the group, which its timeout bounds."""
        if self._thread.is_alive():
            self._thread.join(self._timeout_s + 1.0)

    @abstractmethod
    def _run(self) -> None: ...

    def _meet(self) -> None:
        self._process_group = self._make()

    def _promise(self) -> Future[None]:
        future: Future[None] = Future()
        with self._lock:
            if self._error is not None:
                raise self._error
            self._pending.add(future)
        return future

    def _keep(self, done: Future[None]) -> bool:
        """Keep a promise; False when the group was aborted meanwhile, and the promise broken."""
        with self._lock:
            if self._error is not None:
                return False
            self._pending.remove(done)
        done.set_result(None)
        return True

    def _on_error(self, error: Exception) -> None:
        self.abort(f"{self._peer} moved nothing for {self._timeout_s:g} s or is gone: {first_line(error)}")


def first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200]
