"""What a router has counted is in its ledger once, wherever it was killed: between any two bytes."""

from __future__ import annotations

import errno
import operator
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cluster.usage.accounting import Accounting
from cluster.usage.layout import MAX_KEY_BYTES, SLOT_BYTES, Counts, Row, Slot, count_in, open_slot, read_slot
from cluster.usage.ledger import FIRST_SLOTS, Ledger
from cluster.usage.sqlite import SqliteDatabase
from tests.cluster.usage.harness import drain, totals

pytestmark = pytest.mark.unit
KEY = "k" * MAX_KEY_BYTES
ROW = Row(bytes(range(16)), 491_520, KEY, 0, Counts())
BIG = Counts(*(0x0102030405060708 + i for i in range(7)))  # no byte of it is another's


Store = tuple[int, bytes]


class Stores(list[Store]):
    """What was stored where, in order."""

    def __setitem__(self, at: Any, data: Any) -> None:
        assert at.stop - at.start == len(data)
        self.append((at.start, data))


def plus(row: Row, added: Counts) -> Row:
    return row._replace(version=row.version + 1, counts=Counts(*map(operator.add, row.counts, added)))


def opening(row: Row) -> Stores:
    stores = Stores()
    open_slot(stores, 0, row)
    return stores


def counting(row: Row, bank: int) -> Stores:
    stores = Stores()
    count_in(stores, 0, bank, row.version, row.counts)
    return stores


def cut(slot: bytes, stores: Sequence[Store], num_bytes: int) -> bytes:
    """The slot when the process was killed after so many bytes."""
    torn = bytearray(slot)
    for at, data in stores:
        part = data[: max(0, num_bytes)]
        torn[at : at + len(part)] = part
        num_bytes -= len(data)
    return bytes(torn)


def states(slot: bytes, stores: Sequence[Store]) -> list[Slot | None]:
    return [read_slot(cut(slot, stores, n)) for n in range(sum(len(data) for _, data in stores) + 1)]


def test_a_change_that_was_cut_at_any_byte_is_not_there_and_one_that_was_not_is() -> None:
    for first in (bytes(SLOT_BYTES), bytes([0]) + bytes([255]) * (SLOT_BYTES - 1)):  # what another row left there
        *before, after = states(first, opening(ROW))
        assert before == [None] * len(before)
        assert after == Slot(ROW, 1, 0), "and what another row left there is gone"
        slot, row = cut(first, opening(ROW), 10_000), ROW
        for bank in (2, 1, 2):
            stores = counting(plus(row, BIG), bank)
            *before, after = states(slot, stores)
            assert before == [Slot(row, 3 - bank, 0)] * len(before)
            assert after == Slot(plus(row, BIG), bank, 0)
            slot, row = cut(slot, stores, 10_000), plus(row, BIG)


def test_tokens_alone_and_with_others_sum_over_restarts(tmp_path: Path) -> None:
    ledger, told = Ledger.open(tmp_path / "l"), 0
    for i in range(1, 40):
        ledger.count_tokens("anna", 7, i)
        if i % 3 == 0:
            ledger.count("anna", 7, Counts(requests=1, generated_tokens=1000))
        (row,) = ledger.unsettled()
        assert row.counts == Counts(requests=i // 3, generated_tokens=sum(range(i + 1)) + i // 3 * 1000)
        assert row.version > told, "a database takes the later for the later"
        told = row.version
        if i % 5 == 0:
            ledger.settle([row], 7)
            assert not ledger.unsettled()
        if i % 7 == 0:
            ledger.settle([row._replace(version=row.version - 1)], 7)  # more was counted since
            ledger.close()
            ledger = Ledger.open(tmp_path / "l")
            assert ledger.unsettled() == [row]


def test_one_that_was_drained_long_ago_is_let_go_and_its_place_taken_again(tmp_path: Path) -> None:
    ledger, told = Ledger.open(tmp_path / "l"), set()
    for hour in range(3 * FIRST_SLOTS):
        ledger.count("anna", hour, Counts(requests=1))
        rows = ledger.unsettled()
        told |= {(row.id, row.hour) for row in rows}
        ledger.settle(rows, hour)
    assert (tmp_path / "l").stat().st_size == FIRST_SLOTS * SLOT_BYTES
    assert sorted(hour for _, hour in told) == [*range(3 * FIRST_SLOTS)]


def test_it_grows_while_the_database_cannot_be_had_and_loses_nothing_then(tmp_path: Path) -> None:
    ledger, database = Ledger.open(tmp_path / "l"), SqliteDatabase(tmp_path / "usage.db")
    for i in range(2 * FIRST_SLOTS + 5):
        ledger.count(f"key-{i}", 7, Counts(generated_tokens=i))
    ledger.close()
    ledger = Ledger.open(tmp_path / "l")
    assert (tmp_path / "l").stat().st_size == 4 * FIRST_SLOTS * SLOT_BYTES
    drain(ledger, database, 7)
    assert totals(database) == {(7, f"key-{i}"): Counts(generated_tokens=i) for i in range(2 * FIRST_SLOTS + 5)}


def test_a_ledger_has_one_process(tmp_path: Path) -> None:
    held = Ledger.open(tmp_path / "l")
    with pytest.raises(BlockingIOError):
        Ledger.open(tmp_path / "l")
    held.close()


def test_one_that_cannot_be_read_is_set_aside_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    garbage = b"something else " * 100
    (tmp_path / "l").write_bytes(garbage)
    ledger = Ledger.open(tmp_path / "l")
    ledger.count("anna", 7, Counts(requests=1))
    ledger.close()
    assert [row.counts for row in Ledger.open(tmp_path / "l").unsettled()] == [Counts(requests=1)]
    (aside,) = tmp_path.glob("l.unreadable-*")
    assert aside.read_bytes().startswith(garbage)
    assert f"cannot be read (a slot has the state 104), is {aside.name} now" in caplog.text


COUNT = """
import sys
from pathlib import Path
from cluster.usage.layout import Counts
from cluster.usage.ledger import Ledger

ledger = Ledger.open(Path(sys.argv[1]))
for i in range(10**9):
    if i % 2:
        ledger.count_tokens(f"key-{i % 3}", i // 1000, 2)
    else:
        ledger.count(f"key-{i % 3}", i // 1000, Counts(requests=1, generated_tokens=2))
    print(i + 1, flush=True)
"""


def test_a_process_that_is_killed_leaves_all_that_it_had_counted(tmp_path: Path) -> None:
    command = [sys.executable, "-c", COUNT, str(tmp_path / "l")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3], text=True) as child:
        assert child.stdout is not None
        said = [next(child.stdout) for _ in range(2500)]
        child.kill()
        said += list(child.stdout)
    last = max(int(line) for line in said if line.endswith("\n"))
    rows = Ledger.open(tmp_path / "l").unsettled()
    counted, rest = divmod(sum(row.counts.generated_tokens for row in rows), 2)
    assert last <= counted <= last + 1
    assert not rest
    assert sum(row.counts.requests for row in rows) == -(-counted // 2)


async def test_what_a_full_ledger_has_no_room_for_is_counted_once_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests are served on: a router's disk may be full for days."""

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    keys = [f"key-{i}" for i in range(FIRST_SLOTS + 3)]
    ledger, database = Ledger.open(tmp_path / "l"), SqliteDatabase(tmp_path / "usage.db")
    accounting = Accounting(ledger, database, clock=lambda: 7 * 3600.0)
    with monkeypatch.context() as patched:
        patched.setattr("os.posix_fallocate", full)
        for key in keys:
            accounting.count(key, Counts(requests=1))
            accounting.count_tokens(key, 5)
        patched.setattr(database, "store", full)
        assert [record.message for record in caplog.records] == [
            "the ledger of what is used cannot grow, a restart loses what comes now: [Errno 28] No space left on device"
        ]
    await accounting.drain()
    found = {used.key: used.counts for used in await accounting.read(0, 0, None)}
    await accounting.stop()
    assert found == dict.fromkeys(keys, Counts(requests=1, generated_tokens=5))


async def test_what_was_counted_while_the_clock_stood_ahead_is_told(tmp_path: Path) -> None:
    now_s = 9 * 3600.0
    accounting = Accounting(Ledger.open(tmp_path / "l"), SqliteDatabase(tmp_path / "usage.db"), clock=lambda: now_s)
    accounting.count("anna", Counts(requests=1))
    now_s = 7 * 3600.0  # it is set right
    accounting.count("anna", Counts(requests=1))
    told = await accounting.read(6 * 3600.0, 0, None)
    ended = await accounting.read(6 * 3600.0, 8 * 3600.0, None)
    await accounting.stop()
    assert [(used.hour, used.counts.requests) for used in told] == [(7, 1), (9, 1)]
    assert [used.hour for used in ended] == [7]
