"""SqliteDatabase is the file in which the routers of a host say what each key used."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from cluster.usage.database import CREATE_IDENTITY, CREATE_INDEX, DatabaseError, UsageDatabase, create_usage

BUSY_S = 10.0  # that another router may write


class SqliteDatabase(UsageDatabase):
    mark = "?"

    def __init__(self, path: Path) -> None:
        """Raises OSError, DatabaseError."""
        self.name = str(path)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        with self._transaction() as db:
            _write_ahead(db)
            for statement in (create_usage("BLOB", " WITHOUT ROWID"), CREATE_INDEX, CREATE_IDENTITY):
                db.execute(statement)
            self.identity = self._identity(db)

    def close(self) -> None:
        return

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(self.name, timeout=BUSY_S)) as db, db:
                yield db
        except (sqlite3.Error, OverflowError) as error:
            raise DatabaseError(str(error)) from error


def _write_ahead(db: sqlite3.Connection) -> None:
    """Two who switch at once are both refused, and SQLite itself does not wait then."""
    until_s = time.monotonic() + BUSY_S
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > until_s:
                raise
            time.sleep(0.01)
        else:
            return
