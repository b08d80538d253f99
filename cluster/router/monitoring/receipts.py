"""Receipts counts what came of the handoffs of each pair of workers, by the receipts that the router is told of. It
decides nothing: what a pair's failures mean is for cluster/router/health/.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from operator import itemgetter

from kvrelay.v1.generate_pb2 import HandoffReceipt

MOST_PAIRS = 1024  # that are counted; of those that come later nothing is, until workers leave


@dataclass(slots=True)
class PairCounts:
    good: int = 0
    bad: int = 0
    bytes: int = 0
    transfer_s: float = 0.0
    exposed_s: float = 0.0
    resends: int = 0


class Receipts:
    def __init__(self) -> None:
        self._pairs: dict[str, dict[str, PairCounts]] = {}  # by who had it, and who took it
        self._num_pairs = 0

    def note(self, worker: str, peer: str, receipt: HandoffReceipt) -> None:
        if (counts := self._counts(worker, peer)) is None:
            return
        counts.good += 1
        counts.bytes += receipt.bytes
        counts.transfer_s += receipt.transfer_s
        counts.exposed_s += receipt.exposed_s
        counts.resends += receipt.resends

    def note_failure(self, worker: str, peer: str) -> None:
        if (counts := self._counts(worker, peer)) is not None:
            counts.bad += 1

    def keep(self, workers: Collection[str]) -> None:
        """Forget the pairs of others."""
        self._pairs = {
            worker: {peer: counts for peer, counts in peers.items() if peer in workers}
            for worker, peers in self._pairs.items()
            if worker in workers
        }
        self._num_pairs = sum(map(len, self._pairs.values()))

    def of(self, worker: str) -> list[tuple[str, PairCounts]]:
        return sorted(self._pairs.get(worker, {}).items(), key=itemgetter(0))

    def _counts(self, worker: str, peer: str) -> PairCounts | None:
        """None: they are no pair, or one too many."""
        if worker == peer or not peer:
            return None
        peers = self._pairs.setdefault(worker, {})
        counts = peers.get(peer)
        if counts is None and self._num_pairs < MOST_PAIRS:
            counts = peers[peer] = PairCounts()
            self._num_pairs += 1
        return counts
