"""Outcome is what a simulation found: when each request got its first and last token, and where its time went.

Columns in the order of the workload; a request that was not served has nan. It decides nothing and keeps no events.
TTFT is arrival to first token; TPOT = (E2E - TTFT) / (output tokens - 1), 0 for a single token; goodput counts requests
that meet *all* of their targets.

A request whose client left has met no target, and missed none unless it was late for its first token by then: whether
it would have been in time, nobody knows. Of those, attainment counts the late ones only (`is_judged`): else a system so
slow that its clients leave would look as good as one that serves them. `kvrelay bench` has no client that leaves; what
it gives up itself by --timeout it counts as missed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from placement.workload.requests import NO_FLOATS, Floats, Ints, Workload

Bools = np.ndarray[tuple[int], np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """`phases`: seconds spent in each, where the simulation tells them apart; they sum to e2e_s. `counters`: totals of
    the run (preemptions, rejected, recomputed_tokens, ...). `busy_s`: seconds that all workers of a pool computed (a
    prefill worker's first stage), added up, and that handoffs held the links, where they are counted."""

    workload: Workload
    first_token_s: Floats
    finish_s: Floats
    phases: Mapping[str, Floats] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)
    busy_s: Mapping[str, float] = field(default_factory=dict)
    tokens_per_tpot: int = -1  # what TPOT divides by is output_len + this: -1, or 0 for the published simulators
    cancelled_s: Floats = field(default_factory=lambda: NO_FLOATS)  # its client left; nan: it stayed; empty: all did

    def __len__(self) -> int:
        return len(self.workload)

    @property
    def served(self) -> int:
        return int(np.isfinite(self.finish_s).sum())

    @property
    def ttft_s(self) -> Floats:
        return self.first_token_s - self.workload.arrival_s

    @property
    def e2e_s(self) -> Floats:
        return self.finish_s - self.workload.arrival_s

    @property
    def ended_s(self) -> Floats:
        """When each was finished, or its client had left; nan: neither."""
        if not len(self.cancelled_s):
            return self.finish_s
        return np.where(np.isnan(self.finish_s), self.cancelled_s, self.finish_s)

    @property
    def tpot_s(self) -> Floats:
        gaps: Ints = self.workload.output_len + self.tokens_per_tpot
        return np.where(gaps > 0, (self.finish_s - self.first_token_s) / np.maximum(gaps, 1), 0.0)

    def attained(self, ttft_s: float | Floats = np.inf, tpot_s: float | Floats = np.inf) -> Bools:
        """Which requests met both targets; one that was not served met none."""
        with np.errstate(invalid="ignore"):
            met: Bools = (self.ttft_s <= ttft_s) & (self.tpot_s <= tpot_s)
        return met

    def is_judged(self, ttft_s: float | Floats = np.inf) -> Bools:
        """Which requests count: those whose clients stayed, or left when the first token was late; all where none did,
        so that something can be said."""
        if not len(self.cancelled_s):
            return np.ones(len(self), dtype=np.bool_)
        until_s = np.where(np.isnan(self.first_token_s), self.cancelled_s, self.first_token_s)
        judged: Bools = np.isnan(self.cancelled_s) | (until_s - self.workload.arrival_s > ttft_s)
        return judged if judged.any() else ~judged

    def attainment(self, ttft_s: float | Floats = np.inf, tpot_s: float | Floats = np.inf) -> float:
        """Share of the requests that count which met both targets."""
        return float(self.attained(ttft_s, tpot_s)[self.is_judged(ttft_s)].mean())


def percentiles(values: Floats, at: tuple[float, ...] = (50, 90, 99)) -> list[float]:
    """Interpolated linearly; requests that were not served (nan) count as infinitely late."""
    late = np.where(np.isnan(values), np.inf, values)
    ordered = np.sort(late)
    at_shares = []
    for share in at:
        rank = share / 100 * (len(ordered) - 1)
        low = int(rank)
        below, above = ordered[low], ordered[min(low + 1, len(ordered) - 1)]
        at_shares.append(float(below if rank == low or below == above else below + (rank - low) * (above - below)))
    return at_shares
