"""PostgresDatabase is the PostgreSQL server where routers of any number of hosts say what each key used.

Nothing is asked of the server before the first call, and every call ends within CONNECT_S for each of its addresses
and ANSWER_S. One connection is kept; after an error the next call makes another. No error shows a password.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from cluster.usage.database import CREATE_IDENTITY, CREATE_INDEX, DatabaseError, UsageDatabase, create_usage
from worker.wire.secrets import without_passwords

CONNECT_S = 5
ANSWER_S = 10.0
LOCK = 0x6B7672656C6179  # of those that make the tables: IF NOT EXISTS fails where two do so at once


class PostgresDatabase(UsageDatabase):
    mark = "%s"

    def __init__(self, url: str) -> None:
        """Raises DatabaseError for one that libpq cannot read."""
        self.name = without_passwords(url)
        self.identity = ""
        self._db: psycopg.Connection | None = None
        own: dict[str, Any] = {"connect_timeout": CONNECT_S, "fallback_application_name": "kvrelay"}
        try:
            self._settings = own | conninfo_to_dict(url)
        except psycopg.ProgrammingError:  # says why by what stands there
            why = "libpq cannot read it; what is special in a user or password must be percent-encoded (%40 is @)"
            raise DatabaseError(why) from None

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    @contextmanager
    def _transaction(self) -> Iterator[psycopg.Connection]:
        try:
            if self._db is None:
                # pools of connections, such as pgbouncer's, give each transaction another: nothing is prepared
                self._db = psycopg.connect(**self._settings, autocommit=True, prepare_threshold=None)
                with _cut_after(ANSWER_S, self._db), self._db.transaction():
                    _make_tables(self._db)
                    self.identity = self._identity(self._db)
            with _cut_after(ANSWER_S, self._db), self._db.transaction():
                yield self._db
        except psycopg.Error as error:
            self.close()
            raise DatabaseError(" ".join(str(error).split())) from None


def _make_tables(db: psycopg.Connection) -> None:
    found = db.execute("SELECT to_regclass('usage'), to_regclass('identity')").fetchone()
    if found is None or None in found:
        db.execute("SELECT pg_advisory_xact_lock(%s)", (LOCK,))
        for statement in (create_usage("BYTEA"), CREATE_INDEX, CREATE_IDENTITY):
            db.execute(statement)


@contextmanager
def _cut_after(seconds: float, db: psycopg.Connection) -> Iterator[None]:
    """A server that says nothing any more would keep the thread; its socket is shut then, so that the call fails."""
    with socket.socket(fileno=os.dup(db.fileno())) as ours:
        timer = threading.Timer(seconds, _shut, (ours,))
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()


def _shut(ours: socket.socket) -> None:
    with suppress(OSError):
        ours.shutdown(socket.SHUT_RDWR)
