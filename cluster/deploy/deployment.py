"""Deployment puts a resolved spec onto Ray and takes it off again. The command's `up` and `down` stand on it.

    start or join Ray -> launch: placement group, controller, routers, workers, all at once -> follow until ready
    stop: routers drain, workers end, actors and placement group are removed, and a Ray of our own is ended

Everything is a named, detached actor in a namespace of the cluster's own, so that `down`, or another `up`, finds it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from cluster.deploy import gpus
from cluster.deploy.changes.running_spec import RunningSpec
from cluster.deploy.forks.preload import Preload
from cluster.deploy.forks.shared import preload_of
from cluster.deploy.launch import (
    CONTROLLER,
    STOP_TIMEOUT_S,
    end_actors,
    launch_controller,
    launch_members,
    needs_of,
)
from cluster.deploy.own_ray.local_ray import LOOPBACK, LocalRay
from cluster.deploy.ray import (
    ANSWER_TIMEOUT_S,
    DeployError,
    ends_within,
    find_actor,
    initialized_ray,
    join_ray,
    named_actors,
    namespace_of,
    node_host,
    shut_down,
    why_apart,
    why_full,
)
from cluster.deploy.roster import ROUTER, Version
from cluster.spec.model import ClusterSpec
from cluster.spec.resolve import Machine, resolve
from cluster.spec.sources import Sources
from engine.hub import at_commit
from engine.limits.cgroups import core_limit, memory_limit_bytes
from engine.limits.memory_kills import MemoryKills
from engine.limits.process_room import ProcessRoom, process_room
from worker.wire.secrets import Secrets

log = logging.getLogger(__name__)

CONTROLLER_RETRY_S = 0.2
THREADS_OF_RAY = 96  # at least, with `up` and the controller
THREADS_OF_MEMBER = 28  # likewise, of a router or a worker's process
POLL_S = 5.0  # a watcher waits for a change at most so long, so that a signal or a dead controller is noticed


class Deployment:
    """One cluster on one Ray. `address` None: a Ray of our own; else auto or HOST:PORT of one that runs. `log_dir`, on
    each machine, is where every process logs; "": where Ray keeps it. `sources`: where the spec's values come from."""

    def __init__(
        self,
        spec: ClusterSpec,
        *,
        address: str | None,
        secrets: Secrets,
        log_dir: str,
        sources: Sources = MappingProxyType({}),
    ) -> None:
        self._written = spec
        self._sources = sources
        self._address = address
        self._secrets = secrets
        self._log_dir = log_dir
        self._local = LocalRay() if address is None else None
        self._controller: Any = None
        self._version = Version()
        self._memory_kills = MemoryKills()
        self._is_ready = self._is_told = False
        self._spec_number = 0  # of the spec that the cluster runs with by now
        self.spec = spec

    def start(self) -> None:
        """Start or join Ray and launch every actor; returns before they are ready. Raises DeployError, SpecError."""
        machine = this_machine() if self._local is not None else None
        if self._local is not None and machine is not None:
            self.spec = _at_commits(resolve(self._written, machine, node_host=LOOPBACK))
            if why := why_crowded(self.spec, process_room()):
                raise DeployError(why)
            if machine.gpus and machine.why_no_cuda:
                log.warning("workers run on the CPU although a GPU is here: %s", machine.why_no_cuda)
            try:
                needs = needs_of(self.spec)
                if needs.get("GPU"):  # all, or there were none for a worker more, nor for shares that fill none
                    needs["GPU"] = machine.gpus
                self._local.start(namespace_of(self.spec.name), needs, self._preload())
            except Exception as error:  # Ray raises plain Exception, too
                raise DeployError(f"Ray cannot be started: {' '.join(str(error).split())}") from error
        else:
            assert self._address is not None
            join_ray(self._address, self.spec.name)
            import ray

            if why := why_apart(ray.nodes()):
                raise DeployError(why)
            self.spec = _at_commits(resolve(self._written, None, node_host=node_host()))
            if named_actors():
                raise DeployError(
                    f"a cluster named {self.spec.name} runs in this Ray already; end it with "
                    f"`kvrelay down {self.spec.name} --address {self._address}`, or give another name"
                )
        loopback = self._local is not None
        host = LOOPBACK if loopback else node_host()
        running = RunningSpec.of(self._written, self.spec, dict(self._sources), machine, host)
        self._controller = launch_controller(running, self._log_dir, loopback=loopback)  # which `stop` ends
        launch_members(self.spec, self._log_dir, loopback=loopback)

    def _preload(self) -> Preload | None:
        """None with GPUs: what CUDA keeps of a fork was not tried."""
        return None if needs_of(self.spec).get("GPU") else preload_of(self.spec)

    def next_snapshot(self, timeout_s: float = POLL_S, deadline_s: float = math.inf) -> dict[str, Any]:
        """How all stand (Roster.snapshot): at once the first time, then when something has changed or after a while.

        A controller that hangs, or that Ray is starting, is waited for until `deadline_s` (monotonic). Raises
        DeployError then, and when it is gone for good or Ray is, or cannot be started as nothing can (`why_full`).
        """
        from ray.exceptions import ActorDiedError, ActorUnavailableError

        while True:
            change = self._controller.wait_change.remote(self._version, timeout_s)
            try:
                # unlike ray.get a signal interrupts this at once
                snapshot: dict[str, Any] = change.future().result(timeout_s + ANSWER_TIMEOUT_S)
                if snapshot["spec_number"] != self._spec_number:
                    self.spec = self._controller.resolved_spec.remote().future().result(ANSWER_TIMEOUT_S)
                    self._spec_number = snapshot["spec_number"]
                    if self._local is not None:
                        self._local.change(self._preload())
                if snapshot["wants_secrets"]:
                    self._controller.set_secrets.remote(self._secrets)
                break
            except (ActorUnavailableError, TimeoutError):
                time.sleep(CONTROLLER_RETRY_S)
            except ActorDiedError as error:
                raise DeployError(_why_gone(error, has_answered=self._has_answered)) from None
            self._check_ray(has_controller=False)
            if not self._has_answered and (why := why_full()):
                raise DeployError(f"the controller does not start, and {why}")
            if time.monotonic() > deadline_s:
                raise DeployError("the controller does not answer, so nothing is known of the others", is_a_crash=True)
        self._version = snapshot["version"]
        self._is_ready = self._is_ready or snapshot["is_ready"]
        self._check_ray()
        return snapshot

    @property
    def _has_answered(self) -> bool:
        """The controller; no request runs before it has."""
        return self._version > Version()

    def _check_ray(self, *, has_controller: bool = True) -> None:
        """Raises DeployError when a Ray of our own cannot keep the cluster any more. `has_controller`: it answers, and
        says itself why members ended."""
        kills = self._memory_kills.news()
        if self._local is not None:
            self._local.remember()
            if why := self._local.why_lost():
                short = kills or why_full()
                raise DeployError(f"{why}; start the cluster again{short and f': {short}'}", is_a_crash=True)
        if kills and self._is_ready and not has_controller:
            log.warning("the controller does not answer, and %s", kills)
        if not (self._is_ready or self._is_told) and (short := kills or why_full()):
            log.warning("%s", short)  # Ray and gRPC wait without end
            self._is_told = True

    def wait_serving(self, timeout_s: float) -> None:
        """Until every router has reached workers of each role: they are told of them when all are ready. Asked by Ray,
        which needs no certificate of a client. Raises DeployError."""
        from ray.exceptions import RayError

        for index in range(self.spec.router.replicas):
            router = find_actor(f"router-{index}")
            try:
                why = router.wait_serving.remote(timeout_s).future().result() if router is not None else ""
            except (RayError, TimeoutError) as error:
                why = " ".join(str(error).split())
            if why:
                raise DeployError(f"router-{index} has not reached the workers within {timeout_s:g} s: {why}")

    def stop(self, *, has_crashed: bool = False, keep_signals: Callable[[], object] = bool) -> bool:
        """End what `start` began, however far it came. If it has crashed, what Ray logged is kept beside our own.
        `keep_signals` is called as long as Ray gives them their defaults. Returns whether this process is rid of Ray;
        if not, its threads would bring down a Python that ends in good order."""
        is_answering = (ray := initialized_ray()) is None or self._end_actors()
        if not is_answering:
            log.warning("Ray does not answer: running requests are not waited for")
        if self._local is not None:
            logs = self._log_dir if has_crashed else ""
            return self._local.stop(is_answering=is_answering, keep_logs_in=logs, keep_signals=keep_signals)
        return ray is None or shut_down(ray, keep_signals)

    def _end_actors(self) -> bool:
        """Whether Ray has answered all the while. Who ends us may have ended it, too, as a signal to all of a service's
        processes does."""
        controller, drain_s = self._controller, self.spec.router.drain_s
        is_lost: Callable[[], object] = self._local.why_lost if self._local is not None else bool
        if not ends_within(named_actors, ANSWER_TIMEOUT_S, is_lost):
            return False
        timeout_s = drain_s + STOP_TIMEOUT_S if self._has_answered else ANSWER_TIMEOUT_S
        return controller is None or ends_within(lambda: end_actors(controller, timeout_s), 2 * timeout_s, is_lost)

    def leave(self) -> None:
        """Let go of a joined Ray; the actors stay."""
        import ray
        from ray.exceptions import RayError

        with contextlib.suppress(RayError, TimeoutError):
            self._controller.leave.remote().future().result(ANSWER_TIMEOUT_S)
        ray.shutdown()

    @property
    def logs(self) -> str:
        return self._log_dir or "Ray's session directory on each node"


def why_crowded(spec: ClusterSpec, room: ProcessRoom | None) -> str:
    """Why a cluster with a Ray of its own cannot run where so many more processes and threads may be started, in one
    sentence: one of Ray's processes would end for it, or none would ever come."""
    members = spec.router.replicas + sum(pool.replicas * pool.processes for pool in spec.pools)
    wanted = THREADS_OF_RAY + THREADS_OF_MEMBER * members
    if room is None or room.left >= wanted:
        return ""
    return f"only {room}, and this cluster takes {wanted} at least; raise that limit"


def this_machine() -> Machine:
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit_bytes, limit = memory_limit_bytes(), core_limit()
    num_gpus = gpus.count_gpus()
    return Machine(
        cores=tuple(sorted(os.sched_getaffinity(0))),
        memory_bytes=memory_bytes if limit_bytes is None else min(memory_bytes, limit_bytes),
        core_limit=None if limit is None else max(1, int(limit)),
        gpus=num_gpus,
        why_no_cuda=gpus.why_no_cuda(num_gpus, gpus.torch_cuda_version()),
    )


class NoSuchCluster(DeployError):
    """A Ray has answered, and none of the name is in it."""


def end_joined(address: str, name: str) -> None:
    """`down` for a cluster in a Ray that goes on running. Raises NoSuchCluster; DeployError where no Ray answers."""
    import ray

    join_ray(address, name)
    try:
        if not named_actors():
            raise NoSuchCluster(f"no cluster named {name} runs in the Ray at {address}")
        controller = find_actor(CONTROLLER)
        end_actors(controller, _drain_s(controller) + STOP_TIMEOUT_S)
    finally:
        ray.shutdown()


def _drain_s(controller: Any | None) -> float:
    """That running requests have; 0 where it does not say."""
    import ray
    from ray.exceptions import RayError

    if controller is None:
        return 0.0
    try:
        spec: ClusterSpec = ray.get(controller.resolved_spec.remote(), timeout=ANSWER_TIMEOUT_S)
    except RayError:
        return 0.0
    return spec.router.drain_s


def follow(deployment: Deployment) -> Iterator[dict[str, Any]]:
    """Snapshots until all are ready or one has failed. Raises DeployError with one sentence for each failure."""
    timeout_s = deployment.spec.ready_timeout_s
    deadline = time.monotonic() + timeout_s
    while True:
        snapshot = deployment.next_snapshot(deadline_s=deadline)
        yield snapshot
        if snapshot["failed"]:
            raise DeployError("\n".join(snapshot["failed"]), is_a_crash=snapshot["has_crashed"])
        if snapshot["is_ready"]:
            return
        if time.monotonic() > deadline:
            raise DeployError(_too_slow(snapshot, timeout_s), is_a_crash=True)


def _why_gone(error: Exception, *, has_answered: bool) -> str:
    if has_answered:
        return "the controller is gone: somebody has ended it, or Ray, from outside"
    return f"the controller cannot be started: {str(error).strip().splitlines()[-1].strip()}"


def _at_commits(spec: ClusterSpec) -> ClusterSpec:
    """Its names on the hub as they are there now: a worker that starts later than others loads what they have."""
    drafts = {pool.label: getattr(pool.policy, "speculative_model", "") for pool in spec.pools}
    pools = (
        pool.model_copy(update={"speculative_model": at_commit(draft)}) if (draft := drafts[pool.label]) else pool
        for pool in spec.pools
    )
    return spec.with_paths(at_commit).model_copy(update={"pools": tuple(pools)})


def _too_slow(snapshot: Mapping[str, Any], timeout_s: float) -> str:
    late = [_standing(m) for m in snapshot["members"] if m["stage"] != "ready"]
    return f"not ready after {timeout_s:g} s: {', '.join(late)}; mend it, or raise ready_timeout_s"


def _standing(member: Mapping[str, Any]) -> str:
    reason = f" ({member['reason']})" if member["reason"] else ""
    return f"{member['name']} is at {member['stage']}{reason}"


def endpoints_of(snapshot: Mapping[str, Any]) -> list[str]:
    return [m["address"] for m in snapshot["members"] if m["role"] == ROUTER and m["address"]]
