"""Systems are what can be simulated: the live cluster, colocated workers, DistServe's rules. This module plays each,
and makes a slower or faster copy of one, so that a latency model's error can be carried through to the estimate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from placement.latency.base import DecodeLine, LatencyModel
from placement.papers.distserve import rules as distserve
from placement.papers.distserve.rules import DistServeCluster
from placement.simulator.cluster import SimCluster
from placement.simulator.colocated import ColocatedCluster, simulate_colocated
from placement.simulator.outcome import Outcome
from placement.simulator.simulate import simulate
from placement.workload.requests import Workload

System = SimCluster | ColocatedCluster | DistServeCluster


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledLatency:
    """A latency model whose every time is `factor` times as long."""

    model: LatencyModel
    factor: float

    @property
    def source(self) -> str:
        return f"{self.model.source}, times {self.factor:g}"

    @property
    def stages(self) -> int:
        return self.model.stages

    def prefill_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        return self.model.prefill_s(chunks) * self.factor

    def decode_line(self, batch_size: int, context_tokens: int) -> DecodeLine:
        line = self.model.decode_line(batch_size, context_tokens)
        return DecodeLine(line.step_s * self.factor, line.per_token_s * self.factor, line.until_tokens)

    def mixed_s(self, chunks: Sequence[tuple[int, int]], batch_size: int, context_tokens: int) -> float:
        return self.model.mixed_s(chunks, batch_size, context_tokens) * self.factor

    def transfer_s(self, num_tokens: int) -> float:
        return self.model.transfer_s(num_tokens) * self.factor


def play(system: System, workload: Workload) -> Outcome:
    if isinstance(system, SimCluster):
        return simulate(system, workload)
    if isinstance(system, ColocatedCluster):
        return simulate_colocated(system, workload)
    return distserve.simulate(system, workload)


def scaled(system: System, factor: float) -> System:
    """The same with every time `factor` times as long."""
    if factor == 1.0 or isinstance(system, DistServeCluster):  # published coefficients have no known error
        return system
    if isinstance(system, ColocatedCluster):
        return replace(system, latency=ScaledLatency(model=system.latency, factor=factor))
    workers = tuple(replace(w, latency=ScaledLatency(model=w.latency, factor=factor)) for w in system.workers)
    return replace(system, workers=workers)


def num_workers(system: System) -> Mapping[str, int]:
    """Workers of each pool."""
    if isinstance(system, SimCluster):
        return Counter(worker.role for worker in system.workers)
    if isinstance(system, ColocatedCluster):
        return {"colocated": system.num_workers}
    return {"prefill": system.num_prefill, "decode": system.num_decode}


def kv_tokens(system: System) -> Mapping[str, int]:
    """Tokens of KV that each pool holds, where memory is simulated."""
    if isinstance(system, SimCluster):
        held: Counter[str] = Counter()
        for worker in system.workers:
            held[worker.role] += worker.num_pages * worker.page_size
        return held
    if isinstance(system, ColocatedCluster):
        return {"colocated": system.num_workers * system.num_pages * system.page_size}
    return {}
