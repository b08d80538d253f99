"""UsageDatabase is where routers say what each key used, hour by hour: an SQLite file of a host (sqlite.py), or a
PostgreSQL server of many (postgres.py). Both have the same tables, made by the SQL that stands here.

What is stored is not what came since, but all that a ledger's row has by now, with its version: to store it again, or
to come late with an older version, changes nothing. So any number of routers, of any number of clusters, may share one.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple

from cluster.usage.layout import Counts, Row

_COUNTS = Counts._fields
_STORE = f"""
INSERT INTO usage VALUES ({", ".join(["{mark}"] * (4 + len(_COUNTS)))})
ON CONFLICT (row) DO UPDATE SET {", ".join(f"{name} = excluded.{name}" for name in ("version", *_COUNTS))}
WHERE excluded.version > usage.version
"""
_READ = f"""
SELECT hour, key, {", ".join(f"SUM({name})" for name in _COUNTS)} FROM usage
WHERE hour >= {{mark}} AND hour < {{mark}} AND (CAST({{mark}} AS TEXT) IS NULL OR key = {{mark}})
GROUP BY hour, key ORDER BY hour, key
"""
CREATE_INDEX = "CREATE INDEX IF NOT EXISTS usage_by_hour ON usage (hour, key)"
CREATE_IDENTITY = "CREATE TABLE IF NOT EXISTS identity (one INTEGER PRIMARY KEY CHECK (one = 1), id TEXT NOT NULL)"


class DatabaseError(Exception):
    """It cannot be reached, read or written now: a sentence without a password."""


class Used(NamedTuple):
    """In one hour by one key."""

    hour: int
    key: str
    counts: Counts


class UsageDatabase(ABC):
    """Called in one thread at a time; each call ends within a bound."""

    name: str  # as it may be shown
    identity: str  # the database's own, whoever opens it; empty until it was reached
    mark: ClassVar[str]  # what stands for a value in its SQL

    def store(self, rows: Sequence[Row]) -> None:
        """All of them or none. Raises DatabaseError, also where there are none and it cannot be reached. In one order,
        so that two who store the same never wait for each other."""
        values = [(row.id, row.hour, row.key, row.version, *row.counts) for row in sorted(rows)]
        with self._transaction() as db:
            db.cursor().executemany(_STORE.format(mark=self.mark), values)

    def read(self, since: int, until: int, key: str | None) -> list[Used]:
        """Of the hours from `since` to before `until`; `key` None: everybody's. Raises DatabaseError."""
        with self._transaction() as db:
            found = db.execute(_READ.format(mark=self.mark), (since, until, key, key)).fetchall()
        return [Used(hour, name, Counts(*map(int, counts))) for hour, name, *counts in found]

    def _identity(self, db: Any) -> str:
        """Nothing is written where it has one, so that nobody waits for whoever writes."""
        while (row := db.execute("SELECT id FROM identity").fetchone()) is None:
            made = f"INSERT INTO identity VALUES (1, {self.mark}) ON CONFLICT DO NOTHING"
            db.execute(made, (secrets.token_hex(16),))
        return str(row[0])

    @abstractmethod
    def _transaction(self) -> AbstractContextManager[Any]:
        """A connection, of the Python database API; what is done in it is done or not. Raises DatabaseError."""

    @abstractmethod
    def close(self) -> None: ...


def create_usage(blob: str, ending: str = "") -> str:
    counts = ", ".join(f"{name} BIGINT NOT NULL" for name in _COUNTS)
    columns = f"row {blob} PRIMARY KEY, hour BIGINT NOT NULL, key TEXT NOT NULL, version BIGINT NOT NULL, {counts}"
    return f"CREATE TABLE IF NOT EXISTS usage ({columns}){ending}"
