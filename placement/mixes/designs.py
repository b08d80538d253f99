"""Design says which machines read prompts and which make tokens; Mix, how many of each. Values and their arithmetic.

Names are Splitwise's: HA has H machines for prompts and A machines for tokens, HHcap token machines under a power cap;
Baseline-H100 has one kind that does both. Baseline-H100+A100, which Splitwise has not, has two that each do both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Literal

from placement.catalogs.base import PlanError
from placement.mixes.machines import MachineType
from placement.plan import Candidate, PoolPlan, PoolRole

Resource = Literal["usd_per_hour", "power", "gpus"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """`token` None: a baseline whose machines do both. `is_pooled`: those of both kinds do. Designs of one name are
    equal: a search knows one."""

    name: str
    prompt: MachineType = field(compare=False)
    token: MachineType | None = field(compare=False)
    is_pooled: bool = field(default=False, compare=False)

    @property
    def is_baseline(self) -> bool:
        return self.token is None

    @property
    def is_split(self) -> bool:
        """Each machine does one phase."""
        return not self.is_baseline and not self.is_pooled

    @property
    def machines(self) -> tuple[MachineType, MachineType]:
        return self.prompt, self.token or self.prompt

    def unit_costs(self, resource: Resource) -> tuple[float, float]:
        """What one prompt machine and one token machine take of it."""
        first, second = (float(getattr(machine, resource)) for machine in self.machines)
        return first, second

    def gpus_of(self, kind: str) -> tuple[float, float]:
        """The same of GPUs of one kind."""
        first, second = (float(machine.gpus * (machine.kind == kind)) for machine in self.machines)
        return first, second

    def least(self, unit_costs: tuple[float, float]) -> float:
        """What a machine for each pool takes."""
        return unit_costs[0] if self.is_baseline else sum(unit_costs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """`num_token` 0 for a baseline."""

    design: Design
    num_prompt: int
    num_token: int

    def total(self, resource: Resource) -> float:
        first, second = self.design.unit_costs(resource)
        return first * self.num_prompt + second * self.num_token

    def candidate(self, baseline: Literal["mixed", "colocated"] = "colocated") -> Candidate:
        """`baseline`: the role of machines that do both."""
        first, second = self.design.machines
        pools: tuple[PoolPlan, ...]
        if self.design.is_baseline:
            pools = (_pool(baseline, first, self.num_prompt),)
        else:
            roles: tuple[PoolRole, PoolRole] = (baseline, baseline) if self.design.is_pooled else ("prefill", "decode")
            pools = (_pool(roles[0], first, self.num_prompt), _pool(roles[1], second, self.num_token))
        return Candidate(pools=pools, design=self.design.name)

    def __str__(self) -> str:
        counts = f"{self.num_prompt}" if self.design.is_baseline else f"{self.num_prompt},{self.num_token}"
        return f"{self.design.name} ({counts})"


def _pool(role: PoolRole, machine: MachineType, count: int) -> PoolPlan:
    offer = machine.offer
    return PoolPlan(
        role=role,
        degrees=offer.degrees,
        replicas=count,
        hardware=machine.name,
        num_pages=offer.num_pages,
        page_size=offer.page_size,
        max_batch_tokens=offer.max_batch_tokens,
        max_batch_size=offer.max_batch_size,
        power_cap=machine.power_cap,
        chunk_tokens=offer.max_batch_tokens if role == "mixed" else 0,
    )


def all_designs(
    machines: Sequence[MachineType], names: Sequence[str] | None = None, *, are_pooled: bool = False
) -> list[Design]:
    """Baselines of every machine, and every pair of them; a capped machine makes tokens only, where a cap costs least.
    `are_pooled`: pairs of which both do both, too. `names`: these alone, in this order. Raises PlanError."""
    check(machines)
    full = [machine for machine in machines if not machine.is_capped]
    designs = [Design(name=f"Baseline-{machine.title}", prompt=machine, token=None) for machine in full]
    designs += [
        Design(name=first.short + second.short, prompt=first, token=second) for first in full for second in machines
    ]
    if are_pooled:
        designs += [
            Design(name=f"Baseline-{first.title}+{second.title}", prompt=first, token=second, is_pooled=True)
            for first, second in combinations(full, 2)
        ]
    if names is None:
        return designs
    by_name = {design.name: design for design in designs}
    for name in names:
        if name not in by_name:
            raise PlanError(f"design {name} is not known; these machines make {', '.join(by_name)}")
    return [by_name[name] for name in names]


def check(machines: Sequence[MachineType]) -> None:
    """Raises PlanError where machines cannot be mixed, or not told apart."""
    if all(machine.is_capped for machine in machines):
        raise PlanError("machines has none at full power, which prompts need; give at least one")
    for key, what in (("model", "a cluster serves one"), ("power_unit", "give power in one unit")):
        values = sorted({getattr(machine, key) for machine in machines})
        if len(values) > 1:
            raise PlanError(f"machines differ in {key} ({'; '.join(values)}); {what}")
    pages = sorted({machine.offer.page_size for machine in machines})
    if len(pages) > 1:
        raise PlanError(f"machines differ in page_size ({pages}); KV is handed over in pages, give them one size")
    for key in ("short", "title"):
        names = [getattr(machine, key) for machine in machines]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise PlanError(f"two machines have the {key} name {twice}; give each its own")
    for machine in machines:
        for key in ("usd_per_hour", "power"):
            value = getattr(machine, key)
            if not 0 <= value < float("inf"):
                raise PlanError(f"{key} of {machine.name} is {value:g}; give a number, 0 or more")
