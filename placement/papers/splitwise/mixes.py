"""SplitwiseRules: mixes of machines under the rules of Splitwise's simulator, whose machines lend themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from placement.catalogs.base import PlanError
from placement.latency.base import DecodeLine, LatencyModel
from placement.mixes.demand import mean_context
from placement.mixes.designs import Mix
from placement.mixes.machines import MachineType
from placement.papers.splitwise.latency import SplitwiseLatency
from placement.papers.splitwise.machine import SplitwiseTimes
from placement.papers.splitwise.rules import SplitwiseCluster
from placement.workload.requests import Workload

RATE_AT_TOKENS = 1024  # how long a prompt the link's rate is asked for


@dataclass(frozen=True, slots=True)
class SplitwiseRules:
    """Implements placement.mixes.rules.MixRules."""

    name: str = "splitwise"
    policies: str = "Splitwise's rules"
    simulator: str = "Splitwise's simulator"
    is_lending: bool = True
    baseline: Literal["mixed", "colocated"] = "colocated"

    def system(self, mix: Mix, workload: Workload) -> SplitwiseCluster:
        prompt, token = machine_times(mix.design.machines, mean_context(workload))
        return SplitwiseCluster(prompt=prompt, num_prompt=mix.num_prompt, token=token, num_token=mix.num_token)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatTimes:
    """Any machine under these rules, which know no context: each decoding request attends to `context_tokens`,
    the workload's mean. KV is counted in tokens, one "byte" each."""

    latency: LatencyModel
    kv_capacity_bytes: int
    context_tokens: int
    link_bytes_per_s: float
    kv_bytes_per_token: int = 1

    def decode_line(self, batch_size: int, context_tokens: int) -> DecodeLine:
        return DecodeLine(self.latency.decode_line(batch_size, batch_size * self.context_tokens).step_s, 0.0)

    def mixed_s(self, chunks: Sequence[tuple[int, int]], batch_size: int, context_tokens: int) -> float:
        return self.latency.mixed_s(chunks, batch_size, batch_size * self.context_tokens)


def machine_times(machines: Sequence[MachineType], context_tokens: int) -> list[SplitwiseTimes]:
    """One view for each machine, all counting KV alike. Raises PlanError for pipeline stages."""
    own = [machine.latency for machine in machines if isinstance(machine.latency, SplitwiseLatency)]
    if len(own) == len(machines):
        return list(own)
    return [_flat(machine, context_tokens) for machine in machines]


def _flat(machine: MachineType, context_tokens: int) -> FlatTimes:
    if machine.latency.stages > 1:
        raise PlanError(
            f"{machine.name} has {machine.latency.stages} pipeline stages; Splitwise's rules know none, give PP 1 or "
            f"the live rules"
        )
    took_s = machine.latency.transfer_s(RATE_AT_TOKENS)
    return FlatTimes(
        latency=machine.latency,
        kv_capacity_bytes=machine.offer.kv_tokens,
        context_tokens=context_tokens,
        link_bytes_per_s=RATE_AT_TOKENS / took_s if took_s > 0 else float("inf"),
    )
