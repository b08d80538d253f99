"""has_room: whether Ray could place one more worker now. It places none."""

from __future__ import annotations

from cluster.spec.resolve import WorkerPlan


def has_room(plan: WorkerPlan, *, loopback: bool) -> bool:
    """Whether some node of Ray has free what one more such worker wants. Raises what Ray raises."""
    from ray._private.state import available_resources_per_node

    wanted = {name: amount for name, amount in plan.bundle.items() if not (loopback and name == "CPU")}
    free = available_resources_per_node().values()
    return any(all(node.get(name, 0.0) >= amount for name, amount in wanted.items()) for node in free)
