"""Wire is what a process group's two ends wait on: a two-rank group, and a thread that waits for its operations.

The ends never call the group themselves: a wait on it may not end when it should, so a thread of the wire's own waits,
and the ends wait for that thread, which can be left behind. After any error the group is of no use: the pair must be
opened anew, under a new name. GlooWire is here, NcclWire in nccl.py.
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

SENDER, RECEIVER = 0, 1

_wires: WeakSet[Wire] = WeakSet()


@atexit.register
def _join_wires() -> None:
    """A thread that the interpreter's end finds inside gloo would end the process with std::terminate."""
    wires = list(_wires)
    for wire in wires:
        wire.abort("this process is ending")
    for wire in wires:
        wire.join()


class Wire(ABC):
    def __init__(self, make_group: Callable[[], Any], peer: str, timeout_s: float) -> None:
        """`make_group` blocks until both ranks are there."""
        self._make_group = make_group
        self._peer = peer
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._pending: set[Future[None]] = set()
        self._error: TransferError | None = None
        self._works: SimpleQueue[Any] = SimpleQueue()  # None ends the thread
        self._group: Any = None
        self._thread = threading.Thread(target=self._run, name=f"kv-wire-{peer}", daemon=True)
        _wires.add(self)

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
        self._group = self._make_group()

    def _promise(self) -> Future[None]:
        future: Future[None] = Future()
        with self._lock:
            if self._error is not None:
                raise self._error
            self._pending.add(future)
        return future

    def _keep(self, done: Future[None]) -> bool:
        """Keep a promise; False when the wire was aborted meanwhile, and the promise broken."""
        with self._lock:
            if self._error is not None:
                return False
            self._pending.remove(done)
        done.set_result(None)
        return True

    def _on_error(self, error: Exception) -> None:
        self.abort(f"{self._peer} moved nothing for {self._timeout_s:g} s or is gone: {first_line(error)}")


class GlooWire(Wire):
    """`abort` does not wake a blocked wait of gloo's; only its timeout ends it."""

    def send(self, data: torch.Tensor) -> Future[None]:
        """Posted in the wire's thread: gloo writes to the socket in the call, and the caller has pages to gather."""
        done = self._promise()
        self._works.put((lambda: self._group.send([data], RECEIVER, _tag(data)), done))
        return done

    def receive(self, data: torch.Tensor) -> Future[None]:
        """Posted at once, so that the bytes may come before anybody waits for them."""
        done = self._promise()
        try:
            work = self._group.recv([data], SENDER, _tag(data))
        except (RuntimeError, ValueError) as error:
            self.abort(f"cannot reach {self._peer}: {first_line(error)}")
            raise TransferError(f"cannot reach {self._peer}: {first_line(error)}") from error
        self._works.put((lambda: (work, data)[0], done))  # gloo knows the buffer's address only: it must live as long
        return done

    def _run(self) -> None:
        try:
            while (entry := self._works.get()) is not None:
                post, done = entry
                work = post()
                if work is not None:
                    work.wait()
                if not self._keep(done):
                    return
        except (RuntimeError, ValueError) as error:
            self._on_error(error)
        finally:
            self._group = None


def _tag(data: torch.Tensor) -> int:
    """The size, within the 31 bits of a tag."""
    return data.numel() % (1 << 31)


def first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200]
