"""What the tests of ledgers and databases share."""

from __future__ import annotations

from cluster.usage.database import UsageDatabase
from cluster.usage.layout import Counts
from cluster.usage.ledger import Ledger


def totals(database: UsageDatabase, key: str | None = None) -> dict[tuple[int, str], Counts]:
    return {(used.hour, used.key): used.counts for used in database.read(0, 10**9, key)}


def drain(ledger: Ledger, database: UsageDatabase, hour: int) -> None:
    rows = ledger.unsettled()
    database.store(rows)
    ledger.settle(rows, hour)
