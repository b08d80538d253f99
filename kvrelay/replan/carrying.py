"""Carrier has the workers of a cluster come to what was decided, as an operator would, and remembers what came of it.

moves --set_role, scale: one after another, each until it is so--> changes; what does not come about is taken back
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import mean

from kvrelay.client.client import Client
from kvrelay.client.types import ClusterStatus, KvrelayError, WorkerState
from kvrelay.replan.journal import Change
from placement.replan.arrangements import Move, Scale
from placement.replan.policy import Prices
from worker.options import pool_of

CHANGE_TIMEOUT_S = 120.0  # then it is called off
LEAST_WAIT_S = 5.0  # that new requests may be left waiting for a change, or it is not made
START_TIMEOUT_S = 900.0  # likewise; CHANGE_TIMEOUT_S where there is no place for it
PAUSE_S = 1800.0  # for which what has failed is not tried again, nor what was taken back
POLL_S = 0.2
SERVING = ("ready", "suspect")


class Lost(Exception):
    """The worker, while it changed: whoever comes back has the role of the spec."""


class Carrier:
    """`changed_s`: when it has last had anything changed."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.changed_s = -math.inf
        self._undo: tuple[Scale, int] | None = None  # what takes the last change back, and the pool's workers after it
        self._barred: dict[Move, float] = {}  # until when
        self._changes_s: list[float] = []  # that each has taken
        self._starts_s: list[float] = []

    @property
    def barred(self) -> list[Move]:
        return [move for move, until_s in self._barred.items() if time.monotonic() < until_s]

    def undo_at(self, workers: Iterable[str]) -> Move | None:
        """What takes the last change back, if a worker left by it and its pool is as it was left."""
        if self._undo is None:
            return None
        back, left = self._undo
        return back if sum(pool_of(name) == back.pool for name in workers) == left else None

    def prices(self) -> Prices:
        """What changes took, and starts, as far as any was seen."""
        usual = Prices()
        return Prices(
            change_s=mean(self._changes_s) if self._changes_s else usual.change_s,
            start_s=mean(self._starts_s) if self._starts_s else usual.start_s,
        )

    def carry_out(self, moves: Sequence[Move], changes: list[Change]) -> None:
        """What came of each is noted in its place. One that failed is not tried again for a while."""
        if not moves:
            return
        planned, changes[:] = list(changes), [replace(change, failure="not begun") for change in changes]
        self._undo = None
        for index, (move, change) in enumerate(zip(moves, planned, strict=True)):
            self.changed_s = time.monotonic()
            try:
                changes[index] = self._scale(change) if isinstance(move, Scale) else self._set_role(change)
            except KvrelayError as error:
                changes[index] = replace(change, failure=error.message)
            self.changed_s = time.monotonic()
            if changes[index].failure:
                self._barred[move] = self.changed_s + PAUSE_S
                return

    def _set_role(self, change: Change) -> Change:
        client, status = self._client, self._client.status()
        before = next((each for each in status.workers if each.name == change.worker), None)
        timeout_s = CHANGE_TIMEOUT_S
        if change.force:  # new requests wait for it, and so long at most
            timeout_s = min(timeout_s, float(status.limits.get("unavailable_grace_s", "inf")) / 2)
            if timeout_s < LEAST_WAIT_S:
                return replace(change, failure=f"new requests would wait, and may for {2 * timeout_s:g} s only")
        client.set_role(change.worker, change.role, change.chunk_tokens, force=change.force)

        def is_so() -> bool:
            now = client.status()
            if not (is_done := _has_role(now, change)) and before is not None and _has_been_lost(before, now):
                raise Lost
            return is_done

        try:
            done = _until(change, is_so, lambda: client.drain(change.worker, undo=True), timeout_s)
        except Lost:
            return replace(change, failure=f"{change.worker} was lost meanwhile; it comes back as the spec has it")
        if done.failure:
            return replace(done, failure=f"it was not so after {timeout_s:g} s, and stays as it is")
        if before is None or before.role != change.role:
            self._changes_s.append(done.seconds)
        return done

    def _scale(self, change: Change) -> Change:
        client, pool = self._client, change.pool
        before = sum(pool_of(each.name) == pool for each in client.status().workers)
        grows = change.replicas > before
        pending = list(client.scale(pool, change.replicas))

        def is_so() -> bool:
            pending[:] = client.scale(pool, look=True)
            serving = [w for w in client.status().workers if pool_of(w.name) == pool and w.state in SERVING]
            return not pending and len(serving) == change.replicas  # the router knows, too

        def take_back() -> None:
            """By name: of a pool with gaps in its numbers another one would leave."""
            for each in pending:
                client.drain(each.name, remove=grows, undo=not grows, force=grows)

        done = _until(change, is_so, take_back, START_TIMEOUT_S, lambda: all(e.stage == "waiting" for e in pending))
        if done.failure:
            stands = ", ".join(
                f"{each.name} {each.stage}{f' ({each.reason})' if each.reason else ''}" for each in pending
            )
            return replace(done, failure=f"given up: {stands}")
        if grows:
            self._starts_s.append(done.seconds)
        else:
            back = Scale(pool=pool, replicas=before)
            self._undo = back, change.replicas
            self._barred[Scale(pool=pool, replicas=change.replicas)] = time.monotonic() + PAUSE_S
        return done


def _until(
    change: Change,
    is_so: Callable[[], bool],
    take_back: Callable[[], object],
    timeout_s: float,
    is_stuck: Callable[[], bool] = lambda: False,
) -> Change:
    """A router that does not answer may, later. `is_stuck`: given up sooner."""
    began_s, is_done = time.monotonic(), False
    try:
        while not is_done:
            with contextlib.suppress(KvrelayError):
                is_done = is_so()
            took_s = time.monotonic() - began_s
            if not is_done and took_s >= (min(timeout_s, CHANGE_TIMEOUT_S) if is_stuck() else timeout_s):
                return replace(change, failure="timed out")
            time.sleep(0 if is_done else POLL_S)
    finally:
        if not is_done:  # also where we are interrupted: nobody would take it back
            with contextlib.suppress(KvrelayError):
                take_back()
    return replace(change, seconds=round(time.monotonic() - began_s, 2))


def _has_been_lost(before: WorkerState, status: ClusterStatus) -> bool:
    """Since then: to a router that was started again since it has not."""
    return any(each.name == before.name and each.losses > before.losses for each in status.workers)


def _has_role(status: ClusterStatus, change: Change) -> bool:
    """And the chunks that it is to have."""
    chunks = "" if change.chunk_tokens is None else str(change.chunk_tokens)
    return any(
        (each.name, each.role) == (change.worker, change.role)
        and each.state in SERVING
        and chunks in ("", each.limits.get("chunk_tokens"))
        for each in status.workers
    )
