"""How a ledger's bytes say what was used, so that a process may be killed between any two of them. Pure: it opens no
file and reads no clock.

    slot   state byte | row id, hour, key | bank 1 | bank 2 | tokens          one for each hour and key

The state byte is 0 for a free slot, else the number of the bank that counts. A change is written whole into the other
bank, and the state byte last: a byte is written or it is not, so that a slot is always as before or as after. Most
changes are a few generated tokens more. They are added to those of the banks in a word of their own, which a processor
stores in one piece, and each is a version more.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple, Protocol

SLOT_BYTES = 256
MAX_KEY_BYTES = 64
_HEAD = struct.Struct("<16sqB64s")  # row id, hour, length of the key, key
_HEAD_AT = 8
_BANK = struct.Struct("<8Q")  # version, counts
_BANK_AT = (0, 104, 168)
_TOKENS = struct.Struct("=Q")
_TOKENS_AT = 232
_STATES = (b"\0", b"\1", b"\2")


class Counts(NamedTuple):
    """What was used. Seconds are whole microseconds here, so that sums are exact."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompts'
    generated_tokens: int = 0
    prefill_us: int = 0
    handoff_us: int = 0
    decode_us: int = 0


class Row(NamedTuple):
    """A slot's content, and a row of the database. Of two of the same id the higher version has all of the lower."""

    id: bytes  # 16 random ones
    hour: int  # since 1970, UTC
    key: str  # the name of a client's token; empty: it has none
    version: int
    counts: Counts


class Slot(NamedTuple):
    """`row`: without the tokens beside its banks, of which `bank` counts."""

    row: Row
    bank: int
    tokens: int


class Memory(Protocol):
    """Bytes that outlive the process: what is stored first is there first."""

    def __setitem__(self, at: slice, data: bytes, /) -> None: ...


def open_slot(memory: Memory, begin: int, row: Row) -> None:
    """Makes the free slot there the row's, whose first bank counts."""
    name = row.key.encode()
    head = _HEAD.pack(row.id, row.hour, len(name), name)
    memory[begin + _HEAD_AT : begin + _HEAD_AT + _HEAD.size] = head
    memory[begin + _TOKENS_AT : begin + _TOKENS_AT + _TOKENS.size] = _TOKENS.pack(0)
    count_in(memory, begin, 1, row.version, row.counts)


def count_in(memory: Memory, begin: int, bank: int, version: int, counts: Iterable[int]) -> None:
    """Makes the slot there this version of its row. `bank`: the one that does not count now."""
    at = begin + _BANK_AT[bank]
    memory[at : at + _BANK.size] = _BANK.pack(version, *counts)
    memory[begin : begin + 1] = _STATES[bank]


def tokens_word(begin: int) -> int:
    """The number of the word of such a slot that has the tokens."""
    return (begin + _TOKENS_AT) // _TOKENS.size


def free_slot(memory: Memory, begin: int) -> None:
    memory[begin : begin + 1] = _STATES[0]


def read_slot(slot: bytes) -> Slot | None:
    """None for a free one. Raises ValueError for what is none of ours."""
    bank = slot[0]
    if not bank:
        return None
    if bank not in (1, 2):
        raise ValueError(f"a slot has the state {bank}")
    row_id, hour, size, name = _HEAD.unpack_from(slot, _HEAD_AT)
    version, *counts = _BANK.unpack_from(slot, _BANK_AT[bank])
    row = Row(row_id, hour, name[:size].decode(), version, Counts(*counts))
    return Slot(row, bank, *_TOKENS.unpack_from(slot, _TOKENS_AT))
