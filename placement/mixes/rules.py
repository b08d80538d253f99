"""Rules say by what policies a mix of machines serves: they make of it a System that can be simulated.

The live rules are the policies that serve: machines keep their role, and those of a baseline are mixed workers. Those
of published simulators, whose machines may lend themselves to the other phase under load, are had by name from
placement/papers/registry.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Protocol

from cluster.router.options import RouterOptions
from decode_worker.options import DecodeOptions
from mixed_worker.options import MixedOptions
from placement.build.from_offers import targets_told
from placement.build.worker import RolePolicy, sim_worker
from placement.catalogs.base import PlanError
from placement.latency.roofline import narrowed
from placement.mixes.designs import Mix
from placement.mixes.machines import MachineType
from placement.papers import registry
from placement.plan import Slo
from placement.simulator.cluster import SimCluster, SimWorker
from placement.simulator.systems import LiveSystem, System
from placement.workload.requests import Workload
from prefill_worker.options import PrefillOptions

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
    def baseline(self) -> Literal["mixed", "colocated"]:
        """The role of a baseline's machines."""

    def system(self, mix: Mix, workload: Workload) -> System:
        """The mix, to play the workload. Raises PlanError for machines that the rules do not know how to use."""


@dataclass(frozen=True, slots=True)
class LiveRules:
    """`slo`: what the router knows of what requests want; None: nothing."""

    slo: Slo | None = None
    name: str = "live"
    policies: str = "the live policies"
    simulator: str = "the live policies"
    is_lending: bool = False
    baseline: Literal["mixed", "colocated"] = "mixed"

    def system(self, mix: Mix, workload: Workload) -> System:
        return LiveSystem(live_cluster(mix, self.slo))


LIVE = LiveRules()


def rules_named(name: str, slo: Slo | None = None) -> MixRules:
    """`slo`: as LiveRules'. Raises PlanError."""
    if name == LIVE.name:
        return replace(LIVE, slo=slo)
    if name not in registry.RULES:
        raise PlanError(f"rules are {name!r}; give one of {', '.join((LIVE.name, *registry.RULES))}")
    rules: MixRules = registry.published(registry.RULES[name])()
    return rules


def rules_to_compare(rules: MixRules) -> MixRules:
    """With published rules the live ones, with these the first that is published."""
    return rules_named(next(iter(registry.RULES))) if rules.name == LIVE.name else LIVE


def live_cluster(mix: Mix, slo: Slo | None = None) -> SimCluster:
    """As it would run. `slo`: as LiveRules'."""
    first, second = mix.design.machines
    if mix.design.is_baseline:
        workers = _workers("mixed", first, mix.num_prompt)
    elif mix.design.is_pooled:
        workers = _workers("mixed", _over_link(first, second), mix.num_prompt, "first-")
        workers += _workers("mixed", _over_link(second, first), mix.num_token, "second-")
    else:
        workers = _workers("prefill", _over_link(first, second), mix.num_prompt)
        workers += _workers("decode", second, mix.num_token)
    router = replace(ROOMY, **targets_told(mix.candidate(LIVE.baseline), slo))
    return SimCluster(workers=workers, router=router, max_len=first.offer.max_len)


def _over_link(machine: MachineType, peer: MachineType) -> MachineType:
    return replace(machine, offer=replace(machine.offer, latency=narrowed(machine.latency, [peer.latency])))


def _workers(role: str, machine: MachineType, count: int, named: str = "") -> tuple[SimWorker, ...]:
    offer = machine.offer
    tokens, batch = offer.max_batch_tokens, offer.max_batch_size
    policies: dict[str, RolePolicy] = {
        "prefill": PrefillOptions(max_batch_tokens=tokens, pack_tokens=None),
        "decode": DecodeOptions(max_batch_size=batch),
        "mixed": MixedOptions(max_batch_tokens=tokens, pack_tokens=None, max_batch_size=batch, chunk_tokens=tokens),
    }
    return tuple(sim_worker(f"{named}{role}-{i}", role, offer, policies[role]) for i in range(count))
