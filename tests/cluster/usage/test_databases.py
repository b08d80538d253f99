"""What routers store is there once, in either kind of database: stored twice or late, by routers that are killed
before, within or after a drain, or that come at once."""

from __future__ import annotations

import operator
import random
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Barrier

import pytest

from cluster.usage import sqlite
from cluster.usage.accounting import open_database
from cluster.usage.database import DatabaseError, UsageDatabase, Used
from cluster.usage.layout import Counts, Row
from cluster.usage.ledger import Ledger
from cluster.usage.options import UsageUrl
from tests.cluster.usage.harness import drain, totals

Opened = Callable[[], UsageDatabase]
HOUR = 491_520
ROUTERS = 6


@pytest.fixture(params=[pytest.param("SQLite", marks=pytest.mark.unit), "PostgreSQL"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Opened:
    """The same one each time, as another router opens it."""
    if request.param == "SQLite":
        return lambda: open_database(tmp_path / "usage.db")
    url = UsageUrl(request.getfixturevalue("url"), tmp_path / "postgresql")
    return lambda: open_database(url)


def row(number: int = 0, hour: int = HOUR, version: int = 1, **counts: int) -> Row:
    return Row(number.to_bytes(16, "big"), hour, "anna", version, Counts(**counts))


def test_what_is_stored_again_or_comes_late_changes_nothing(opened: Opened) -> None:
    database, late = opened(), opened()
    first, second = row(requests=1), row(version=2, requests=5, decode_us=2**62)
    database.store([first])
    database.store([second])
    for each in (second, first):
        late.store([each])
    assert totals(database) == totals(late) == {(HOUR, "anna"): second.counts}


def test_sums_are_exact_beyond_what_a_float_holds(opened: Opened) -> None:
    database = opened()
    database.store([row(number, prompt_tokens=2**60 + number) for number in range(7)])
    assert totals(database)[HOUR, "anna"].prompt_tokens == 7 * 2**60 + 21


def test_what_cannot_be_stored_whole_is_not_stored(opened: Opened) -> None:
    database = opened()
    with pytest.raises(DatabaseError):
        database.store([row(1, requests=1), row(2, requests=2**63)])
    assert totals(database) == {}
    database.store([row(1, requests=1)])
    assert totals(database, "anna") == {(HOUR, "anna"): Counts(requests=1)}
    assert totals(database, "another") == {}


def test_hours_are_read_from_the_first_to_before_the_last(opened: Opened) -> None:
    database = opened()
    database.store([row(hour, hour) for hour in range(5)])
    assert database.read(1, 3, None) == [Used(hour, "anna", Counts()) for hour in (1, 2)]


def test_routers_that_come_at_once_to_an_empty_database_all_find_the_same(opened: Opened) -> None:
    together = Barrier(ROUTERS)

    def router(number: int) -> str:
        together.wait()
        database = opened()
        for version in range(1, 20):
            database.store([row(number, version=version, requests=version)])
        return database.identity

    with ThreadPoolExecutor(ROUTERS) as pool:
        identities = set(pool.map(router, range(ROUTERS)))
    assert len(identities) == 1
    assert identities != {""}
    assert totals(opened()) == {(HOUR, "anna"): Counts(requests=19 * ROUTERS)}


def test_routers_that_are_killed_at_any_step_count_once_what_they_counted(opened: Opened, tmp_path: Path) -> None:
    rng = random.Random(7)
    databases = [opened() for _ in range(2)]
    paths = [tmp_path / f"{i}.ledger" for i in range(2)]
    ledgers = [Ledger.open(path) for path in paths]
    truth: dict[tuple[int, str], Counts] = {}
    hour, late = 100, []
    for _ in range(1000):
        who = rng.randrange(2)
        step = rng.random()
        if step < 0.85:
            key, added = rng.choice(("anna", "bert", "")), Counts(*(rng.randrange(100) for _ in range(7)))
            if rng.random() < 0.5:
                added = Counts(generated_tokens=added.generated_tokens + 1)
                ledgers[who].count_tokens(key, hour, added.generated_tokens)
            else:
                ledgers[who].count(key, hour, added)
            truth[hour, key] = Counts(*map(operator.add, truth.get((hour, key), Counts()), added))
        elif step < 0.9:
            drain(ledgers[who], databases[who], hour)
        elif step < 0.97:  # killed in a drain: stored or not, and not settled; what it sent may come in late
            rows = ledgers[who].unsettled()
            if rng.random() < 0.5:
                databases[who].store(rows)
            late.append(rows)
            ledgers[who].close()
            ledgers[who] = Ledger.open(paths[who])
        elif late:
            databases[who].store(late.pop(rng.randrange(len(late))))
        hour += rng.choice((0,) * 30 + (1, -1))  # and clocks are set back
    for ledger, database in zip(ledgers, databases, strict=True):
        drain(ledger, database, hour)
    assert totals(databases[0]) == truth


@pytest.mark.unit
def test_a_file_that_another_writes_for_long_keeps_no_router_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "usage.db"
    open_database(path).store([row(requests=1)])
    monkeypatch.setattr(sqlite, "BUSY_S", 0.05)
    with closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN EXCLUSIVE")
        database = open_database(path)
        with pytest.raises(DatabaseError, match="locked"):
            database.store([row(version=2, requests=2)])
        assert totals(database) == {(HOUR, "anna"): Counts(requests=1)}
    database.store([row(version=2, requests=2)])
    assert totals(database) == {(HOUR, "anna"): Counts(requests=2)}


@pytest.mark.unit
def test_a_disk_that_is_full_keeps_no_router_from_beginning_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "usage.db"
    full = sqlite3.OperationalError("disk I/O error")
    full.sqlite_errorcode = sqlite3.SQLITE_IOERR_SHMSIZE

    def refuse(_: sqlite3.Connection) -> None:
        raise full

    with monkeypatch.context() as patched:
        patched.setattr(sqlite, "_write_ahead", refuse)
        with pytest.raises(DatabaseError, match="disk I/O error"):
            open_database(path)  # where it never was, it is told at once
    path.unlink()
    open_database(path).store([row(requests=1)])
    with monkeypatch.context() as patched:
        patched.setattr(sqlite, "_write_ahead", refuse)
        again = open_database(path)
        with pytest.raises(DatabaseError, match="disk I/O error"):
            again.store([row(1, requests=1)])
    again.store([row(1, requests=1)])
    assert again.identity
    assert totals(again)[HOUR, "anna"].requests == 2
