"""Rules say by what policies a mix of machines serves: they make of it a System that can be simulated.

The live rules are the policies that serve: machines keep their role, and a baseline is colocated workers with chunked
prefill. Those of published simulators, whose machines may lend themselves to the other phase under load, are had by
name from placement/papers/registry.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from cluster.router.options import RouterOptions
from decode_worker.policy import DecodeOptions
from placement.build.worker import RolePolicy, sim_worker
from placement.catalogs.base import PlanError
from placement.mixes.designs import Mix
from placement.mixes.machines import MachineType
from placement.papers import registry
from placement.simulator.cluster import SimCluster, SimWorker
from placement.simulator.colocated.cluster import ColocatedCluster
from placement.simulator.systems import LiveSystem, System
from placement.workload.requests import Workload
from prefill_worker.policy import PrefillOptions

ROOMY = RouterOptions(max_queued_requests=1 << 30, max_queued_tokens=1 << 40)  # a queue that is too long misses the SLO


class MixRules(Protocol):
    @property
    def name(self) -> str:
        """By which it is asked for, and known in the registry."""

    @property
    def policies(self) -> str:
        """As they are called in a sentence: by these ..."""

    @property
    def simulator(self) -> str:
        """What plays them, for the plan's sources."""

    @property
    def is_lending(self) -> bool:
        """Whether machines lend themselves to the other phase under load."""

    @property
    def baseline_sharing(self) -> Literal["", "chunked"]:
        """How a baseline's machines share a step, where it has a name."""

    def system(self, mix: Mix, workload: Workload) -> System:
        """The mix, to play the workload. Raises PlanError for machines that the rules do not know how to use."""


@dataclass(frozen=True, slots=True)
class LiveRules:
    name: str = "live"
    policies: str = "the live policies"
    simulator: str = "the live policies"
    is_lending: bool = False
    baseline_sharing: Literal["", "chunked"] = "chunked"

    def system(self, mix: Mix, workload: Workload) -> System:
        return _colocated(mix) if mix.design.is_baseline else LiveSystem(_live_cluster(mix))


LIVE = LiveRules()


def rules_named(name: str) -> MixRules:
    """Raises PlanError."""
    if name == LIVE.name:
        return LIVE
    if name not in registry.RULES:
        raise PlanError(f"rules are {name!r}; give one of {', '.join((LIVE.name, *registry.RULES))}")
    rules: MixRules = registry.published(registry.RULES[name])()
    return rules


def rules_to_compare(rules: MixRules) -> MixRules:
    """With published rules the live ones, with these the first that is published."""
    return rules_named(next(iter(registry.RULES))) if rules.name == LIVE.name else LIVE


def _live_cluster(mix: Mix) -> SimCluster:
    first, second = mix.design.machines
    workers = _workers("prefill", first, mix.num_prompt) + _workers("decode", second, mix.num_token)
    return SimCluster(workers=workers, router=ROOMY)


def _workers(role: str, machine: MachineType, count: int) -> tuple[SimWorker, ...]:
    offer = machine.offer
    policy: RolePolicy = DecodeOptions(max_batch_size=offer.max_batch_size)
    if role == "prefill":
        policy = PrefillOptions(max_batch_tokens=offer.max_batch_tokens, pack_tokens=None)
    return tuple(sim_worker(f"{role}-{i}", role, offer, policy) for i in range(count))


def _colocated(mix: Mix) -> ColocatedCluster:
    offer = mix.design.prompt.offer
    if offer.latency.stages > 1:
        raise PlanError(f"{mix.design.name} has pipeline stages; colocated machines are simulated with PP 1 only")
    return ColocatedCluster(
        latency=offer.latency,
        num_workers=mix.num_prompt,
        num_pages=offer.num_pages,
        page_size=offer.page_size,
        max_batch_tokens=offer.max_batch_tokens,
        max_batch_size=offer.max_batch_size,
        step_overhead_s=offer.step_overhead_s,
    )
