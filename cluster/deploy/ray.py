"""Deployment puts a resolved spec onto Ray and takes it off again. The command's `up` and `down` stand on it.

    start or join Ray -> launch: placement group, controller, routers, workers, all at once -> follow until ready
    stop: routers drain, workers end, actors and placement group are removed, and a Ray of our own is ended

Everything is a named, detached actor in a namespace of the cluster's own, so that `down`, or another `up`, finds it.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from cluster.deploy import gpus
from cluster.deploy.local_ray import LOOPBACK, LocalRay
from cluster.deploy.roster import roles_of
from cluster.spec.model import ClusterSpec
from cluster.spec.resolve import Machine, WorkerPlan, resolve, workers_of

log = logging.getLogger(__name__)

CONTROLLER = "controller"
STOP_TIMEOUT_S = 300.0  # the controller bounds what it waits for itself; this is for one that hangs
CONTROLLER_RETRY_S = 0.2
CONNECT_TIMEOUT_S = 5.0
POLL_S = 5.0  # a watcher waits for a change at most so long, so that a signal or a dead controller is noticed


class DeployError(Exception):
    """The cluster could not be started or found: one sentence. `is_a_crash`: the logs may say more."""

    def __init__(self, message: str, *, is_a_crash: bool = False) -> None:
        super().__init__(message)
        self.is_a_crash = is_a_crash


def namespace_of(name: str) -> str:
    return f"kvrelay-{name}"


class Deployment:
    """One cluster on one Ray. `address` None: a Ray of our own; else auto or HOST:PORT of one that runs."""

    def __init__(self, spec: ClusterSpec, *, address: str | None, secret: str) -> None:
        self._written = spec
        self._address = address
        self._secret = secret
        self._local = LocalRay() if address is None else None
        self._controller: Any = None
        self._version = -1
        self._wants: dict[str, str] = {}
        self.spec = spec

    def start(self) -> None:
        """Start or join Ray and launch every actor; returns before they are ready. Raises DeployError, SpecError."""
        if self._local is not None:
            machine = this_machine()
            self.spec = resolve(self._written, machine, node_host=LOOPBACK)
            if machine.gpus and machine.why_no_cuda:
                log.warning("workers run on the CPU although a GPU is here: %s", machine.why_no_cuda)
            try:
                self._local.start(namespace_of(self.spec.name), needs_of(self.spec))
            except (RuntimeError, OSError, ValueError) as error:
                raise DeployError(f"Ray cannot be started: {' '.join(str(error).split())}") from error
        else:
            assert self._address is not None
            join_ray(self._address, self.spec.name)
            self.spec = resolve(self._written, None, node_host=_node_host())
            if _find(CONTROLLER) is not None:
                raise DeployError(
                    f"a cluster named {self.spec.name} runs in this Ray already; end it with "
                    f"`kvrelay down {self.spec.name} --address {self._address}`, or give another name"
                )
        self._wants = wants_of(self.spec)
        self._controller = launch_controller(self.spec)  # from here on `stop` ends what is there
        launch_members(self.spec, self._secret, loopback=self._local is not None)

    def next_snapshot(self, timeout_s: float = POLL_S) -> dict[str, Any]:
        """How all stand (Roster.snapshot): at once the first time, then when something has changed or after a while.

        A controller that Ray is restarting is waited for. Raises DeployError when it is gone for good.
        """
        from ray.exceptions import ActorDiedError, ActorUnavailableError

        while True:
            change = self._controller.wait_change.remote(self._version, timeout_s)
            try:
                snapshot: dict[str, Any] = change.future().result()  # unlike ray.get a signal interrupts this at once
                break
            except ActorUnavailableError:
                self._version = -1  # the next one counts anew
                time.sleep(CONTROLLER_RETRY_S)
            except ActorDiedError:
                raise DeployError("the controller is gone: somebody has ended it, or Ray, from outside") from None
        self._version = snapshot["version"]
        for member in snapshot["members"]:
            if member["stage"] == "waiting":
                member["reason"] = self._wants.get(member["name"], "")
        if self._local is not None:
            self._local.remember()
        return snapshot

    def stop(self, *, keep_logs: bool = False) -> None:
        """End what `start` began, however far it came."""
        import ray

        if ray.is_initialized() and self._controller is not None:
            end_actors(self._controller)
        if self._local is not None:
            self._local.stop(keep_logs=keep_logs)
        else:
            ray.shutdown()

    def leave(self) -> None:
        """Let go of a joined Ray; the actors stay."""
        import ray

        ray.shutdown()

    @property
    def logs(self) -> str:
        return self._local.temp_dir if self._local is not None else "Ray's session directory on each node"


# Ray -------------------------------------------------------------------------------------------------------------


def this_machine() -> Machine:
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    found = gpus.count_gpus()
    return Machine(
        cores=tuple(sorted(os.sched_getaffinity(0))),
        memory_bytes=pages * page_bytes,
        gpus=found,
        why_no_cuda=gpus.why_no_cuda(found, gpus.torch_cuda_version()),
    )


def join_ray(address: str, name: str) -> None:
    """Raises DeployError when there is no Ray there."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    logging.getLogger("ray").setLevel(logging.CRITICAL)
    _knock(address)
    try:
        ray.init(
            address=address,
            namespace=namespace_of(name),
            log_to_driver=False,
            configure_logging=False,
            logging_level=logging.CRITICAL,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise DeployError(
            f"no Ray answers at --address {address}: {reason}; start one with `ray start --head`"
        ) from None


def _knock(address: str) -> None:
    """Ray itself tries for minutes, and talks meanwhile, where nothing listens. Raises DeployError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        return  # auto, and whatever else Ray may know
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        why = (getattr(error, "strerror", None) or str(error)).lower()
        raise DeployError(f"no Ray answers at --address {address}: {why}; start one with `ray start --head`") from None


@contextlib.contextmanager
def quiet_stdout() -> Iterator[None]:
    """Ray's driver prints what its raylet has to say on sys.stdout, from a thread: keep it out of our output."""
    real = sys.stdout
    sys.stdout = io.StringIO()
    try:
        yield
    finally:
        sys.stdout = real


def _node_host() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _find(name: str) -> Any | None:
    import ray

    try:
        return ray.get_actor(name)
    except ValueError:
        return None


# Actors ----------------------------------------------------------------------------------------------------------


def bundle_of(plan: WorkerPlan) -> dict[str, float]:
    """What Ray sets aside for a worker, by Ray's names."""
    wanted = {"CPU": plan.num_cpus, "GPU": plan.num_gpus, **plan.resources}
    return {name: amount for name, amount in wanted.items() if amount > 0}


def needs_of(spec: ClusterSpec) -> dict[str, float]:
    """What all actors of a resolved spec ask of Ray together."""
    total: Counter[str] = Counter()
    for plan in workers_of(spec):
        total.update(bundle_of(plan))
    for _ in range(spec.router.replicas):
        total.update(spec.router.resources)
    return dict(total)


def wants_of(spec: ClusterSpec) -> dict[str, str]:
    """What each worker waits for before it is started, for people."""
    wants = {}
    for plan in workers_of(spec):
        amounts = ", ".join(f"{name} {amount:g}" for name, amount in bundle_of(plan).items())
        wants[plan.name] = f"wants {amounts} of Ray" if amounts else ""
    return wants


def launch_controller(spec: ClusterSpec) -> Any:
    """Create the controller of a resolved spec, before all else: its name is the cluster's, and it ends the others."""
    import ray

    from cluster.deploy.controller import Controller

    plans = workers_of(spec)
    has_group = any(bundle_of(plan) for plan in plans)
    roles = roles_of(((plan.name, plan.options.role) for plan in plans), spec.router.replicas)
    actor = ray.remote(Controller).options(**_always(CONTROLLER), num_cpus=0, max_concurrency=1000)
    return actor.remote(roles, _GROUP if has_group else "", spec.router.drain_s)


def launch_members(spec: ClusterSpec, secret: str, *, loopback: bool) -> None:
    """Create every worker and router of a resolved spec. Nothing waits for anything: an actor whose resources are not
    there yet starts when they come."""
    plans = workers_of(spec, secret=secret)
    bundles = [bundle_of(plan) for plan in plans]
    group = _reserve([bundle for bundle in bundles if bundle])
    index = 0
    for plan, bundle in zip(plans, bundles, strict=True):
        _launch_worker(plan, bundle, group, index, loopback)
        index += bool(bundle)
    for i in range(spec.router.replicas):
        _launch_router(spec, i, secret)


_GROUP = "workers"


def _reserve(bundles: list[dict[str, float]]) -> Any | None:
    import ray

    if not bundles:
        return None
    return ray.util.placement_group(bundles, strategy="PACK", name=_GROUP, lifetime="detached")


def _always(name: str) -> dict[str, Any]:
    """Named, outliving its maker, always restarted; a call that a crash broke is not made again."""
    return {"name": name, "lifetime": "detached", "max_restarts": -1, "max_task_retries": 0}


def _launch_worker(plan: WorkerPlan, bundle: Mapping[str, float], group: Any, index: int, loopback: bool) -> None:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    options = _always(plan.name) | {
        "num_cpus": plan.num_cpus,
        "num_gpus": plan.num_gpus,
        "resources": dict(plan.resources),
        "max_concurrency": 4,
    }
    if bundle:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    actor = ray.remote(_actor_class(plan.options.role)).options(**options)
    actor.remote(plan.options, dict(plan.engine), plan.cpus, loopback, CONTROLLER)


def _actor_class(role: str) -> type[Any]:
    """Under the role's name, by which `ps` and Ray's dashboard tell workers apart."""
    from worker.actor import WorkerActor

    return type(f"{role.capitalize()}Actor", (WorkerActor,), {})


def _launch_router(spec: ClusterSpec, index: int, secret: str) -> None:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from cluster.deploy.router_actor import RouterActor

    options = _always(f"router-{index}") | {"num_cpus": 0, "max_concurrency": 4}
    if spec.router.resources:
        options["resources"] = dict(spec.router.resources)
    else:  # where `up` runs, so that the endpoint is where one looks for it
        node_id = ray.get_runtime_context().get_node_id()
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id, soft=True)
    ray.remote(RouterActor).options(**options).remote(spec, index, secret, CONTROLLER)


def end_actors(controller: Any) -> None:
    """End the actors of a cluster, the controller last, whether or not it still answers."""
    import ray
    from ray.exceptions import RayError

    with contextlib.suppress(RayError):  # its own end would be reported so too; what is left is killed below
        ray.get(controller.stop.remote(), timeout=STOP_TIMEOUT_S)
    for entry in ray.util.list_named_actors():
        handle = _find(entry) if entry != CONTROLLER else None
        if handle is not None:
            ray.kill(handle, no_restart=True)
    ray.kill(controller, no_restart=True)


def end_joined(address: str, name: str) -> None:
    """`down` for a cluster in a Ray that goes on running. Raises DeployError when there is none of that name."""
    import ray

    join_ray(address, name)
    try:
        controller = _find(CONTROLLER)
        if controller is None:
            raise DeployError(f"no cluster named {name} runs in the Ray at {address}")
        end_actors(controller)
    finally:
        ray.shutdown()


def follow(deployment: Deployment) -> Iterator[dict[str, Any]]:
    """Snapshots until all are ready or one has failed. Raises DeployError with one sentence for each failure."""
    timeout_s = deployment.spec.ready_timeout_s
    deadline = time.monotonic() + timeout_s
    while True:
        snapshot = deployment.next_snapshot()
        yield snapshot
        if snapshot["failed"]:
            raise DeployError("\n".join(snapshot["failed"]), is_a_crash=snapshot["has_crashed"])
        if snapshot["is_ready"]:
            return
        if time.monotonic() > deadline:
            raise DeployError(_too_slow(snapshot, timeout_s), is_a_crash=True)


def _too_slow(snapshot: Mapping[str, Any], timeout_s: float) -> str:
    late = [_standing(m) for m in snapshot["members"] if m["stage"] != "ready"]
    return f"not ready after {timeout_s:g} s: {', '.join(late)}; mend it, or raise ready_timeout_s"


def _standing(member: Mapping[str, Any]) -> str:
    reason = f" ({member['reason']})" if member["reason"] else ""
    return f"{member['name']} is at {member['stage']}{reason}"


def endpoints_of(snapshot: Mapping[str, Any]) -> list[str]:
    return [m["address"] for m in snapshot["members"] if m["role"] == "router" and m["address"]]
