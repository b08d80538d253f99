"""System is what can be simulated: workers, and the rules by which they serve. LiveSystem is the cluster that serves.

Published simulators (placement/papers) are systems of their own. A slower or faster copy carries a latency model's
error through to an estimate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from placement.latency.scaled import scaled_latency
from placement.simulator.cluster import SimCluster, SimWorker
from placement.simulator.outcome import Outcome
from placement.simulator.simulate import simulate
from placement.workload.requests import Workload


class System(Protocol):
    def play(self, workload: Workload) -> Outcome:
        """Every request of the workload. Same arguments, same outcome."""

    def scaled(self, factor: float) -> System:
        """The same with every time `factor` times as long; itself where its times have no known error."""

    @property
    def workers_by_pool(self) -> Mapping[str, int]: ...

    @property
    def kv_tokens_by_pool(self) -> Mapping[str, int]:
        """Tokens of KV that each pool holds, where memory is simulated."""


@dataclass(frozen=True, slots=True)
class LiveSystem:
    """The cluster under the live policies."""

    cluster: SimCluster

    def play(self, workload: Workload) -> Outcome:
        return simulate(self.cluster, workload)

    def scaled(self, factor: float) -> LiveSystem:
        return LiveSystem(replace(self.cluster, workers=tuple(_scaled(w, factor) for w in self.cluster.workers)))

    @property
    def workers_by_pool(self) -> Mapping[str, int]:
        return Counter(worker.role for worker in self.cluster.workers)

    @property
    def kv_tokens_by_pool(self) -> Mapping[str, int]:
        held: Counter[str] = Counter()
        for worker in self.cluster.workers:
            held[worker.role] += worker.num_pages * worker.page_size
        return held


def _scaled(worker: SimWorker, factor: float) -> SimWorker:
    speculation = worker.speculation and worker.speculation.scaled(factor)
    return replace(worker, latency=scaled_latency(worker.latency, factor), speculation=speculation)
