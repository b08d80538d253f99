"""Says of which designs a budget holds no machine for each pool: by arithmetic, before any is simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from placement.catalogs.base import PlanError
from placement.mixes.designs import Design, Resource

SAID: dict[Resource, str] = {
    "gpus": "num_gpus is {0:.10g}",
    "usd_per_hour": "budget is {0:.10g} USD an hour",
    "power": "budget_power is {0:.10g}",
}
ROUNDING = 1e-9  # of a budget


def too_dear(design: Design, budgets: Mapping[Resource, float]) -> str:
    """Why the budgets hold no machine for each of its pools; nothing where they do."""
    for resource, most in budgets.items():
        if not _holds(most, least := _least(design, resource)):
            return f"{SAID[resource].format(most)}, and a machine for each pool takes {least:.10g}"
    return ""


def raise_if_all_too_dear(designs: Sequence[Design], budgets: Mapping[Resource, float]) -> None:
    """Raises PlanError where one of the budgets holds none of them."""
    for resource, most in budgets.items():
        if any(_holds(most, _least(design, resource)) for design in designs):
            continue
        cost = {machine.name: float(getattr(machine, resource)) for each in designs for machine in each.machines}
        cheapest = min(cost, key=lambda name: cost[name])
        enough = [
            f"{min(_least(design, resource) for design in alike):.10g} for {what}"
            for what, is_baseline in (("one pool", True), ("two pools", False))
            if (alike := [design for design in designs if design.is_baseline == is_baseline])
        ]
        raise PlanError(
            f"{SAID[resource].format(most)}, and a machine of {cheapest} takes {cost[cheapest]:.10g}; give "
            f"{' or '.join(enough)}, or machines of fewer GPUs (tensor_parallel)"
        )


def too_few(design: Design, gpus_of: Mapping[str, int]) -> str:
    """Why there are not enough GPUs of each kind for a machine in each of its pools; nothing where there are."""
    for kind, most in gpus_of.items():
        if (least := design.least(design.gpus_of(kind))) > most:
            return f"there are {most} of {kind}, and a machine for each pool takes {least:.10g}"
    return ""


def _least(design: Design, resource: Resource) -> float:
    return design.least(design.unit_costs(resource))


def _holds(most: float, least: float) -> bool:
    return least <= most * (1 + ROUNDING)
