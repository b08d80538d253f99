"""The actors of one cluster: what each asks of Ray, how they are created, and how they are ended.

All at once, each named, detached and always restarted: nothing here waits for anything, and an actor whose resources
are not there yet starts when they come.
"""

from __future__ import annotations

import contextlib
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from cluster.deploy.changes.running_spec import RunningSpec
from cluster.deploy.ray import find_actor, named_actors
from cluster.spec.model import ClusterSpec
from cluster.spec.resolve import WorkerPlan, workers_of
from worker.membership import Membership

CONTROLLER = "controller"
PLACEMENT_GROUP = "workers"
STOP_TIMEOUT_S = 300.0  # beyond drain_s: the controller bounds what it waits for itself; this is for one that hangs


def needs_of(spec: ClusterSpec) -> dict[str, float]:
    """What all actors of a resolved spec ask of Ray together."""
    total: Counter[str] = Counter()
    for plan in workers_of(spec):
        total.update(plan.bundle)
    for _ in range(spec.router.replicas):
        total.update(spec.router.resources)
    return dict(total)


def launch_controller(running: RunningSpec, log_dir: str, *, loopback: bool) -> Any:
    """Create the controller, before all else: its name is the cluster's, and it ends the others."""
    import ray

    from cluster.deploy.controller import Controller

    options = _always(CONTROLLER) | {"num_cpus": 0, "max_concurrency": 1000} | here()
    actor = ray.remote(Controller).options(**options)
    launch = partial(launch_worker, running.resolved, log_dir, loopback=loopback)
    return actor.remote(running, log_dir=log_dir, launch=launch)


def launch_members(spec: ClusterSpec, log_dir: str, *, loopback: bool) -> None:
    """Create every worker and router of a resolved spec. What they are made with is kept in Ray's GCS: no secret."""
    import ray

    plans, membership, group = in_places(spec), _membership(spec, log_dir), None
    cluster_id = f"{spec.name}-{secrets.token_hex(4)}"
    for i in range(spec.router.replicas):  # first: they do not wait for what workers import (forks/server.py)
        _launch_router(spec, i, membership, cluster_id)
    if bundles := [plan.bundle for plan in plans if plan.bundle]:
        group = ray.util.placement_group(bundles, strategy="PACK", name=PLACEMENT_GROUP, lifetime="detached")
    places = _places(plans)
    for plan in plans:
        _launch_worker(plan, places.get(plan.name), group, loopback, membership)


def launch_worker(started: ClusterSpec, log_dir: str, plan: WorkerPlan, *, loopback: bool) -> None:
    """Create any worker: where the spec that was `started` has reserved the place that it wants, else wherever Ray has
    room. A Ray of our own has no more cores than that spec wants, so that none are counted there for one more.

    Raises ValueError when there is an actor of the name, and what Ray raises.
    """
    import ray

    plans = in_places(started)
    has_place = any(plan.name == each.name and plan.bundle == each.bundle for each in plans)
    place = _places(plans).get(plan.name) if has_place else None
    if loopback and place is None:
        plan = replace(plan, num_cpus=0)
    group = None if place is None else ray.util.get_placement_group(PLACEMENT_GROUP)
    _launch_worker(plan, place, group, loopback, _membership(started, log_dir))


def in_places(spec: ClusterSpec) -> list[WorkerPlan]:
    """In the order in which Ray fills GPUs, that workers share: the first of each pool, the second of each, so that
    several models are beside each other and not each beside itself."""
    plans = workers_of(spec)
    return sorted(plans, key=lambda plan: int(plan.name.rpartition("-")[2])) if spec.models else plans


def _places(plans: Sequence[WorkerPlan]) -> dict[str, int]:
    """By worker, its bundle's number in the placement group; those without a bundle have none."""
    return {name: index for index, name in enumerate(plan.name for plan in plans if plan.bundle)}


def _membership(spec: ClusterSpec, log_dir: str) -> Membership:
    return Membership(controller=CONTROLLER, liveness_timeout_s=spec.liveness_timeout_s, log_dir=log_dir)


def _always(name: str) -> dict[str, Any]:
    """Named, outliving its maker, always restarted; a call that a crash broke is not made again."""
    return {"name": name, "lifetime": "detached", "max_restarts": -1, "max_task_retries": 0}


def _launch_worker(plan: WorkerPlan, place: int | None, group: Any, loopback: bool, membership: Membership) -> None:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    options = _always(plan.name) | {
        "num_cpus": plan.num_cpus,
        "num_gpus": plan.num_gpus,
        "resources": dict(plan.resources),
        "max_concurrency": 4,
    }
    if place is not None:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place)
    actor = ray.remote(_actor_class(plan.options.role)).options(**options)
    actor.remote(plan.options, dict(plan.engine), plan.cpus, loopback, membership)


def _actor_class(role: str) -> type[Any]:
    """Under the role's name, by which `ps` and Ray's dashboard tell workers apart."""
    from worker.actor import WorkerActor

    return type(f"{role.capitalize()}Actor", (WorkerActor,), {})


def _launch_router(spec: ClusterSpec, index: int, membership: Membership, cluster_id: str) -> None:
    import ray

    from cluster.deploy.router_actor import RouterActor

    options = _always(f"router-{index}") | {"num_cpus": 0, "max_concurrency": 4}
    if spec.router.resources:
        options["resources"] = dict(spec.router.resources)
    else:  # so that the endpoint is where one looks for it
        options |= here()
    ray.remote(RouterActor).options(**options).remote(spec, index, membership, cluster_id)


def here() -> dict[str, Any]:
    """Options of an actor where `up` runs, Ray's head as a rule: hosts that are lost, or cut off from it, take nothing
    else with them. With the one byte Ray goes by it: what asks for nothing it puts on any node, and a head may have no
    CPU to ask for."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node_id = ray.get_runtime_context().get_node_id()
    return {"memory": 1, "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=True)}


def end_actors(controller: Any | None, timeout_s: float = STOP_TIMEOUT_S) -> None:
    """End the actors of a cluster, the controller last, whether or not it is there and answers."""
    import ray
    from ray.exceptions import RayError

    if controller is not None:
        with contextlib.suppress(RayError):  # its own end would be reported so too; what is left is killed below
            ray.get(controller.stop.remote(), timeout=timeout_s)
    for name in named_actors():
        handle = find_actor(name) if name != CONTROLLER else None
        if handle is not None:
            ray.kill(handle, no_restart=True)
    if controller is not None:
        ray.kill(controller, no_restart=True)
    with contextlib.suppress(ValueError):  # none was wanted
        ray.util.remove_placement_group(ray.util.get_placement_group(PLACEMENT_GROUP))
