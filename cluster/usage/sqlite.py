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
OF_DISK = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN)


class DiskError(DatabaseError):
    """No room for it, say: what may pass."""


class SqliteDatabase(UsageDatabase):
    mark = "?"

    def __init__(self, path: Path) -> None:
        """Raises OSError, DatabaseError; but not where a disk has no room for what was opened before: a router that
        begins again serves on, as one does that runs."""
        self.name, self.identity = str(path), ""
        is_known = path.exists() and path.stat().st_size > 0
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        try:
            with self._transaction():
                pass
        except DiskError:
            if not is_known:
                raise

    def close(self) -> None:
        return

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(self.name, timeout=BUSY_S)) as db, db:
                if not self.identity:
                    self._make_tables(db)
                yield db
        except (sqlite3.Error, OverflowError) as error:
            is_of_disk = getattr(error, "sqlite_errorcode", 0) & 0xFF in OF_DISK  # its kind; above it the case
            raise (DiskError if is_of_disk else DatabaseError)(str(error)) from error

    def _make_tables(self, db: sqlite3.Connection) -> None:
        _write_ahead(db)
        for statement in (create_usage("BLOB", " WITHOUT ROWID"), CREATE_INDEX, CREATE_IDENTITY):
            db.execute(statement)
        self.identity = self._identity(db)


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
