"""What the transports ask of a GPU: a stream of their own that copies pages, and memory and events of another process.

Small, so that a test can put a fake in their place and see every call; cuda.py has the real ones.
"""

from __future__ import annotations

from typing import Any, Protocol

from engine.pages.memory import KvMemory
from engine.pages.page_table import Int64s, PartTable


class CopyQueue(Protocol):
    """Work in order, beside the engine's. Calls return at once but `digest` and `finish`. One thread's at a time."""

    def wait_for(self, event: object | None) -> None:
        """What follows starts after the event (None: at once)."""

    def copy(self, src: PartTable, dst: PartTable, src_pages: Int64s, dst_pages: Int64s) -> None: ...

    def digest(self, parts: PartTable, pages: Int64s) -> int:
        """64 bits of all bytes of `pages`, in the order of the parts. Waits for it. Raises TransferError."""

    def record(self, event: object) -> None:
        """The event has happened when all that stands before it is done."""

    def mark(self) -> Any:
        """An event, with a `query`, that has happened when all that stands before it is done."""

    def finish(self, timeout_s: float) -> None:
        """Wait until all is done. Raises TransferError after timeout_s, counted from the last `wait_for`'s event."""

    def current(self) -> Any:
        """A context in which torch's own operations go into this queue."""


class Gpu(Protocol):
    uuid: str

    @property
    def free_bytes(self) -> int:
        """Of its memory, whoever else is on it."""

    def queue(self) -> CopyQueue:
        """One that nobody else has."""

    def export(self, memory: KvMemory) -> tuple[bytes, int]:
        """A handle of the allocation that holds the memory, and where in it the memory begins."""

    def open(self, handle: bytes) -> int:
        """Address, here, of another process's allocation."""

    def close(self, address: int) -> None: ...

    def new_event(self) -> tuple[object, bytes]:
        """An event that another process can wait for, and its handle."""

    def open_event(self, handle: bytes) -> object: ...
