"""Accounting counts what each key uses at one router: at once into a ledger, from there into the database.

    delivered --count--> ledger (outlives a kill) --drain, each second, at start and at the end--> database

A ledger's rows may be drained again and again, so that nothing is counted twice, wherever a router is killed. While
the database cannot be written the ledger keeps all, and says so in the log; a router serves without it. One thread of
its own has the database, so that one that is slow keeps nothing else waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import operator
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from cluster.usage.database import DatabaseError, UsageDatabase, Used
from cluster.usage.layout import Counts
from cluster.usage.ledger import Ledger
from cluster.usage.options import UsageUrl
from cluster.usage.sqlite import SqliteDatabase
from worker.wire.private_files import make_private_folder
from worker.wire.secrets import without_passwords

log = logging.getLogger(__name__)
T = TypeVar("T")

DRAIN_S = 1.0
HOUR_S = 3600
NO_END = 1 << 62  # an hour that databases can hold, and no clock shows


class Accounting:
    def __init__(self, ledger: Ledger, database: UsageDatabase, clock: Callable[[], float] = time.time) -> None:
        """`clock`: seconds since 1970."""
        self._ledger = ledger
        self._database = database
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, "usage")
        self._drains = asyncio.Lock()
        self._draining: asyncio.Task[None] | None = None
        self._is_closed = False
        self._owed: dict[tuple[int, str], Counts] = {}  # by hour and key: what the ledger has no room for
        self._is_owing = False
        self._look()
        self._is_told = False  # that the database cannot be written

    @classmethod
    def open(cls, place: Path | UsageUrl, router: str) -> Accounting:
        """`router`: its name, unique among those that use this file, or have their ledgers there. Raises OSError, one
        sentence."""
        ledgers = place if isinstance(place, Path) else place.ledgers
        try:
            if not ledgers.parent.exists():
                make_private_folder(ledgers.parent)
            ledger = Ledger.open(ledgers.with_name(f"{ledgers.name}.{router}.ledger"))
            try:
                return cls(ledger, open_database(place))
            except BaseException:
                ledger.close()
                raise
        except (OSError, DatabaseError) as error:
            strerror = getattr(error, "strerror", None)  # of ours that are sentences there is none
            why = strerror.lower() if strerror else str(error)
            shown = str(place) if isinstance(place, Path) else without_passwords(place.url)
            raise OSError(f"usage_db {shown!r} cannot be used: {why}; give another, or off") from error

    @property
    def identity(self) -> str:
        """The database's: routers with the same one tell the same. Known once it was read."""
        return self._database.identity

    def start(self) -> None:
        """What an earlier process left in the ledger is drained first, or it is said that it cannot be."""
        self._draining = asyncio.create_task(self._keep_draining())

    async def stop(self) -> None:
        if self._draining is not None:
            self._draining.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._draining
        if not self._is_told:  # else it may not answer, and the ledger keeps all
            await self.drain()
        self._is_closed = True
        self._thread.submit(self._database.close)
        self._thread.shutdown(wait=False)
        self._ledger.close()

    def count(self, key: str, added: Counts) -> None:
        """Nothing once it has stopped: no call is let end later but one that has delivered all it will."""
        if not self._is_closed:
            self._count(key, self._look(), added)

    def count_tokens(self, key: str, added: int) -> None:
        """Generated ones, likewise: to the hour that it was when a request or the database was last dealt with."""
        if self._is_closed:
            return
        try:
            self._ledger.count_tokens(key, self._hour, added)
        except OSError:
            self._count(key, self._hour, Counts(generated_tokens=added))

    def _count(self, key: str, hour: int, added: Counts) -> None:
        """Kept here where the ledger must grow and its disk is full, until it can."""
        try:
            self._ledger.count(key, hour, added)
        except OSError as error:
            if not self._is_owing:
                log.warning("the ledger of what is used cannot grow, a restart loses what comes now: %s", error)
            self._is_owing = True
            owed = self._owed.get((hour, key), Counts())
            self._owed[hour, key] = Counts(*map(operator.add, owed, added))

    async def read(self, since_s: float, until_s: float, key: str | None) -> list[Used]:
        """What was used up to now, of every hour that has a part in this time; `until_s` 0: no end, for some of it may
        have been counted while a clock stood ahead. Raises DatabaseError, also where what was used here could not be
        added."""
        await self._drain()
        if self._owed:
            raise DatabaseError("the ledger of what is used here cannot grow, and what has no room is not added")
        until = -int(-until_s // HOUR_S) if until_s else NO_END
        return await self._ask(lambda: self._database.read(int(since_s // HOUR_S), until, key))

    async def drain(self, *, is_first: bool = False) -> None:
        with contextlib.suppress(DatabaseError):  # it is told
            await self._drain(is_first=is_first)

    async def _drain(self, *, is_first: bool = False) -> None:
        """One at a time: it goes on to its end in its thread, whoever stops waiting for it. The first looks whether
        the database is there, whatever is to be drained."""
        async with self._drains:
            owed, self._owed = self._owed, {}
            for (of_hour, key), counts in owed.items():
                self._count(key, of_hour, counts)
            self._is_owing = bool(self._owed)
            rows, hour = self._ledger.unsettled(), self._look()
            if not rows and not is_first:
                return
            try:
                await self._ask(lambda: self._database.store(rows))
            except DatabaseError as error:
                self._tell(f"cannot be written, the ledger keeps what is used: {error}", is_told=True)
                raise
            self._tell("is written again", is_told=False)
            self._ledger.settle(rows, hour)

    def _tell(self, what: str, *, is_told: bool) -> None:
        """Once, when it turns."""
        if is_told != self._is_told:
            log.warning("%s %s", self._database.name, what)
        self._is_told = is_told

    async def _keep_draining(self) -> None:
        await self.drain(is_first=True)
        while True:
            await asyncio.sleep(DRAIN_S)
            await self.drain()

    async def _ask(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def _look(self) -> int:
        """What hour it is."""
        self._hour = int(self._clock() // HOUR_S)
        return self._hour


def open_database(place: Path | UsageUrl) -> UsageDatabase:
    """Raises OSError, DatabaseError."""
    if isinstance(place, Path):
        return SqliteDatabase(place)
    try:
        from cluster.usage.postgres import PostgresDatabase
    except ImportError as error:  # or libpq is not there
        raise DatabaseError("psycopg is not installed; pip install 'kvrelay[postgres]'") from error
    return PostgresDatabase(place.url)
