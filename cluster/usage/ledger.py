"""Ledger counts what clients of one router use, in a file that is mapped into memory: what was counted outlives the
process, however that ends, but not the machine. layout.py says what the bytes mean; one process holds the file at a
time.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import operator
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from cluster.usage.layout import (
    SLOT_BYTES,
    Counts,
    Row,
    Slot,
    count_in,
    free_slot,
    open_slot,
    read_slot,
    tokens_word,
)

log = logging.getLogger(__name__)

FIRST_SLOTS = 1024


@dataclass(slots=True)
class _Slot:
    """Of an hour and key: what it is found by."""

    begin: int  # in the file
    id: bytes
    bank: int  # that counts
    version: int
    counts: tuple[int, ...]
    tokens: int  # beside the banks

    def row(self, hour: int, key: str) -> Row:
        counts = Counts(*self.counts)
        counts = counts._replace(generated_tokens=counts.generated_tokens + self.tokens)
        return Row(self.id, hour, key, self.version + self.tokens, counts)


class Ledger:
    def __init__(self, opened: int, memory: mmap.mmap) -> None:
        """Of a file that is locked. Raises ValueError for one that is no ledger."""
        self._opened = opened
        self._memory = memory
        self._words = memoryview(memory).cast("Q")
        self._slots: dict[tuple[int, str], _Slot] = {}  # by hour and key
        self._free: list[int] = []  # where they begin
        self._unsettled: set[tuple[int, str]] = set()
        self._learn(0)

    @classmethod
    def open(cls, path: Path) -> Self:
        """One that cannot be read is set aside, so that its router counts on. Raises OSError when it cannot be had, or
        another process has it."""
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(opened, 0, max(os.fstat(opened).st_size, FIRST_SLOTS * SLOT_BYTES))
            return cls(opened, mmap.mmap(opened, 0))
        except OSError:
            os.close(opened)
            raise
        except ValueError as error:
            os.close(opened)
            aside = path.with_name(f"{path.name}.unreadable-{time.time():.0f}")
            path.rename(aside)
            lost = "what it had not yet told the database is not counted"
            log.error("%s cannot be read (%s), is %s now, and is begun anew: %s", path, error, aside.name, lost)
            return cls.open(path)

    def count(self, key: str, hour: int, added: Counts) -> None:
        """Raises OSError where the file must grow and cannot."""
        where = hour, key
        slot = self._slots.get(where) or self._open_slot(hour, key)
        slot.version += 1
        slot.counts = tuple(map(operator.add, slot.counts, added))
        slot.bank = 3 - slot.bank
        count_in(self._memory, slot.begin, slot.bank, slot.version, slot.counts)
        self._unsettled.add(where)

    def count_tokens(self, key: str, hour: int, added: int) -> None:
        """Generated ones, and nothing else: what is counted with each message of an answer. Raises OSError likewise."""
        where = hour, key
        slot = self._slots.get(where) or self._open_slot(hour, key)
        slot.tokens += added
        self._words[tokens_word(slot.begin)] = slot.tokens
        self._unsettled.add(where)

    def unsettled(self) -> list[Row]:
        """What the database has not, or not in this version."""
        return [self._slots[where].row(*where) for where in self._unsettled]

    def settle(self, rows: Sequence[Row], hour: int) -> None:
        """The database has these. Those of other hours than this one are let go, but where more was counted since."""
        for row in rows:
            slot = self._slots[row.hour, row.key]
            if slot.version + slot.tokens == row.version:
                self._unsettled.discard((row.hour, row.key))
        for where in [where for where in self._slots if where[0] != hour and where not in self._unsettled]:
            slot = self._slots.pop(where)
            free_slot(self._memory, slot.begin)
            self._free.append(slot.begin)

    def close(self) -> None:
        self._words.release()
        self._memory.close()
        os.close(self._opened)

    def _open_slot(self, hour: int, key: str) -> _Slot:
        if not self._free:
            self._grow()
        begin, row = self._free.pop(), Row(secrets.token_bytes(16), hour, key, 0, Counts())
        open_slot(self._memory, begin, row)
        return self._hold(begin, Slot(row, 1, 0))

    def _hold(self, begin: int, slot: Slot) -> _Slot:
        row = slot.row
        held = self._slots[row.hour, row.key] = _Slot(begin, row.id, slot.bank, row.version, row.counts, slot.tokens)
        return held

    def _grow(self) -> None:
        """Its blocks are had before it is mapped: a full disk would end the process where it writes to them."""
        size = len(self._memory)
        os.posix_fallocate(self._opened, size, size)
        self._words.release()
        try:
            self._memory.resize(2 * size)
        finally:
            self._words = memoryview(self._memory).cast("Q")
        self._learn(size)

    def _learn(self, since: int) -> None:
        for begin in reversed(range(since, len(self._memory), SLOT_BYTES)):
            known = read_slot(self._memory[begin : begin + SLOT_BYTES])
            if known is None:
                self._free.append(begin)
                continue
            self._hold(begin, known)
            self._unsettled.add((known.row.hour, known.row.key))
