"""A Round is one cell's fault under a running load, from the first stream to the last page: it starts the streams, lets
the cell act, and measures. What was promised is in bounds.py, what was wrong with the answers the oracle says.

    streams begin -> [the cell acts: fault] -> noticed -> next tokens -> streams end -> pages back -> [healed] -> ready
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvrelay.chaos.load import Fate, Stream, play
from kvrelay.chaos.oracle import pick
from kvrelay.chaos.templates import Template
from kvrelay.client.client import AsyncClient
from kvrelay.client.types import ClusterStatus, KvrelayError

POLL_S = 0.02
STATUS_TIMEOUT_S = 1.0
TOKENS_S = 3.0
UNCACHED = 0.7  # share of streams that find nothing in the prefix cache
TROUBLE = (  # counters of routers and workers
    *("retries", "workers_lost", "failed", "cancelled", "rejected", "resends", "checksum_mismatches"),
    *("handoffs_failed", "receipts_bad", "leases_expired", "chunks_failed", "preempted", "reassigned"),
)


@dataclass(slots=True)
class Measured:
    """What came of a round. Times are seconds from the fault; None: nothing to see."""

    faults: int = 0
    missed: bool = False  # the phase was not reached, so that the fault came at some other time
    noticed_s: float | None = None
    next_token_s: float = 0.0
    pages_s: float | None = None  # from the fault, or from the last stream's end if that came later
    ended: dict[str, int] = field(default_factory=dict)  # streams, by `done`, `left` or code
    problems: list[str] = field(default_factory=list)
    is_healed: bool = True  # serves again after it
    stopped_s: float = 0.0  # that the suite's own process stood still meanwhile: so did the machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Where rounds are played: a cluster, its clients, what it is known to answer, and what its bounds are made of."""

    cluster: Any  # a Target; a cell knows of which kind its shape's is
    players: Sequence[AsyncClient]
    watcher: AsyncClient
    templates: Sequence[Template]
    values: Mapping[str, float]

    async def status(self) -> ClusterStatus | None:
        """What the router says, if it does."""
        with contextlib.suppress(KvrelayError):
            return await self.watcher.status(timeout_s=STATUS_TIMEOUT_S)
        return None


class Round:
    def __init__(self, table: Table, rng: random.Random, timeout_s: float) -> None:
        self.cluster = table.cluster
        self.rng = rng
        self.streams: list[Stream] = []
        self.fault_s: list[float] = []  # on the monotonic clock
        self.missed = False
        self.noticed_at_s: float | None = None
        self.status = table.status
        self._table = table
        self._timeout_s = timeout_s
        self._tasks: list[asyncio.Task[None]] = []

    # For cells

    def start(self, count: int, *, long: bool = True, fate: Fate = "end", **changes: Any) -> list[Stream]:
        """So many streams more, with prompts from the oracle."""
        templates = pick(self._table.templates, self.rng, count, long=long)
        return [self.start_one(template, fate=fate, **changes) for template in templates]

    def start_alike(self, count: int, **changes: Any) -> list[Stream]:
        """Of one template, so that all end at nearly the same time."""
        template = pick(self._table.templates, self.rng, 1, long=True)[0]
        return [self.start_one(template, **changes) for _ in range(count)]

    def start_one(self, template: Template, *, fate: Fate = "end", **changes: Any) -> Stream:
        client = self._table.players[len(self.streams) % len(self._table.players)]
        salt = str(self.rng.random()) if self.rng.random() < UNCACHED else ""
        settings = {"timeout_s": self._timeout_s, "cache_salt": salt, **changes}
        stream = Stream(template=template, client=client, fate=fate, **settings)
        self.streams.append(stream)
        self._tasks.append(asyncio.get_running_loop().create_task(play(stream)))
        return stream

    def fault(self, at_s: float | None = None) -> None:
        """A fault was made, now or when the worker says."""
        self.fault_s.append(time.monotonic() if at_s is None else at_s)

    async def until_tokens(self, count: int) -> None:
        """Some stream has brought so many."""
        await self.until(lambda: any(len(stream.tokens) >= count for stream in self.streams), TOKENS_S)

    async def until(self, holds: Callable[[], bool], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not holds():
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(POLL_S / 4)
        return True

    async def until_status(self, holds: Callable[[ClusterStatus], bool], timeout_s: float) -> bool:
        """The router says so."""
        deadline = time.monotonic() + timeout_s
        while (status := await self.status()) is None or not holds(status):
            if time.monotonic() > deadline or self.is_over:
                return False
            await asyncio.sleep(POLL_S / 4)
        return True

    async def all_ended(self) -> None:
        await asyncio.gather(*self._tasks)

    @property
    def is_over(self) -> bool:
        return all(task.done() for task in self._tasks)

    async def clients_ready(self, timeout_s: float) -> None:
        """The clients' own connections stand again. Raises KvrelayError."""
        for client in self._table.players:
            await client.wait_ready(timeout_s)

    # Measuring

    async def watch(self) -> None:
        """Note when something was first seen of the fault: run beside the cell, until cancelled."""
        before, starts = trouble_of(await self.status()), self._starts()
        while True:
            await asyncio.sleep(POLL_S)
            status = await self.status()
            if not self.fault_s:
                before = trouble_of(status) or before
            elif self._starts() != starts or status is None or trouble_of(status) != before:
                self.noticed_at_s = time.monotonic()
                return

    def _starts(self) -> tuple[float, ...]:
        names = [name for role in ("prefill", "decode", "router") for name in self.cluster.names(role)]
        return tuple(self.cluster.ended_s(name) for name in names)

    async def pages_back(self, timeout_s: float) -> str:
        """Wait until no worker that the router sees holds a page, and the router no request; else who does."""
        deadline, began_s = time.monotonic() + timeout_s, time.monotonic()
        held = "the router does not answer"
        while time.monotonic() < deadline:
            status = await self.status()
            if status is not None and not (held := held_by(status, time.monotonic() - began_s)):
                return ""
            await asyncio.sleep(POLL_S)
        return held


def trouble_of(status: ClusterStatus | None) -> Any:
    """What changes when a fault is noticed."""
    if status is None:
        return None
    workers = tuple((w.name, w.state, w.losses, counts(w.counters)) for w in status.workers)
    return workers, counts(status.counters)


def counts(counters: Any) -> tuple[int, ...]:
    return tuple(counters.get(name, 0) for name in TROUBLE)


def held_by(status: ClusterStatus, newer_than_s: float) -> str:
    """Who holds what, among the workers that are ready and have reported since; empty if nobody holds anything."""
    if status.num_queued or status.num_in_flight:
        return f"the router has {status.num_queued} queued and {status.num_in_flight} in flight"
    for worker in status.workers:
        held = worker.total_pages - worker.available_pages
        if worker.state not in ("ready", "draining", "drained"):
            continue
        if held or worker.leased_pages:
            return f"{worker.name} holds {held} pages, {worker.leased_pages} of them leased"
        if worker.report_age_s > newer_than_s:
            return f"{worker.name} has not reported since"
    return ""
