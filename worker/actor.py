"""MemberActor is the process in which Ray starts one member of a cluster: a worker of any role here, a router in
cluster/deploy/router_actor.py. It carries no request, token or KV byte.

    started -> greet the controller, which knows the secrets -> build the service (a worker loads its engine) -> serve

It tells the controller how that goes and answers when the controller asks; the controller ends it when it hangs, and it
ends a controller that hangs, so that Ray starts each again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from engine.process import pin_process, set_environment
from worker.log_file import log_into
from worker.membership import Greeting, Membership
from worker.options import WorkerOptions, with_role
from worker.process import BROKEN_EXIT_CODE, Progress, Service, ServiceEvent, ServiceThread
from worker.wire.secrets import Secrets

logger = logging.getLogger(__name__)

GREET_TIMEOUT_S = 10.0
GREET_RETRY_S = 1.0
CONTROLLER_CHECK_S = 1.0
DRAIN_TIMEOUT_S = 10.0  # that its loop may take to hear of it


Build = Callable[[str, Progress, Greeting], Service]  # the incarnation's name, and whom to tell of progress


class MemberActor:
    """Made by Ray, again after each crash."""

    def __init__(self, name: str, host: str, membership: Membership, build: Build) -> None:
        log_into(membership.log_dir, name)
        self._membership = membership
        self._greeting: Greeting | None = None
        self._asked_s = time.monotonic()

        def greet_and_build(incarnation: str, progress: Progress) -> Service:
            self._greeting = self._greet()
            time.sleep(self._greeting.load_delay_s)
            return build(incarnation, progress, self._greeting)

        def tell(event: ServiceEvent) -> None:
            ray.get_actor(membership.controller).on_event.remote(event.as_dict())

        try:
            self._thread = ServiceThread(name, host, greet_and_build, tell)
            self._thread.begin()
            threading.Thread(target=self._watch_controller, name="controller watch", daemon=True).start()
        except Exception:  # raised, it would end the actor for good; a process that ends is started again
            logger.exception("%s cannot be begun", name)
            os._exit(BROKEN_EXIT_CODE)

    def describe(self) -> dict[str, Any]:
        """Where it stands, with the turns of the loop that serves."""
        self._asked_s = time.monotonic()
        return self._thread.event.as_dict() | {"turns": self._thread.turns}

    def secrets(self) -> Secrets | None:
        """For a controller that was restarted."""
        return self._greeting.secrets if self._greeting is not None else None

    def stop(self, grace_s: float) -> None:
        self._thread.stop(grace_s)

    def _greet(self) -> Greeting:
        while True:
            try:
                asked = ray.get_actor(self._membership.controller).greet.remote(self._thread.event.as_dict())
                greeting: Greeting = ray.get(asked, timeout=GREET_TIMEOUT_S)
                return greeting
            except (RayError, ValueError) as error:  # it is being restarted, or knows the secrets only soon
                logger.warning("the controller does not answer yet: %s", " ".join(str(error).split()))
                time.sleep(GREET_RETRY_S)

    def _watch_controller(self) -> None:
        while True:
            time.sleep(CONTROLLER_CHECK_S)
            if time.monotonic() - self._asked_s > self._membership.liveness_timeout_s:
                self._end_hung_controller()
                self._asked_s = time.monotonic()

    def _end_hung_controller(self) -> None:
        try:
            controller = ray.get_actor(self._membership.controller)
            ray.get(controller.ping.remote(), timeout=self._membership.liveness_timeout_s)
        except GetTimeoutError:
            logger.warning("killing the controller: it gave no sign of life for %g s", time.monotonic() - self._asked_s)
            ray.kill(controller, no_restart=False)
        except (RayError, ValueError) as error:  # Ray is starting it again, or the cluster ends
            logger.info("the controller is not there: %s", " ".join(str(error).split()))


class WorkerActor(MemberActor):
    def __init__(
        self,
        options: WorkerOptions,
        engine: Mapping[str, Any],
        cpus: Sequence[int],
        loopback: bool,
        membership: Membership,
    ) -> None:
        """`options` without the secret: what an actor is made with is kept in Ray's GCS."""
        host = "127.0.0.1" if loopback else ray.util.get_node_ip_address()
        set_environment(engine["threads"])

        def build(incarnation: str, progress: Progress, greeting: Greeting) -> Service:
            from engine.engine import Engine
            from engine.options import EngineOptions
            from kv_transfer.transports.gpu import nccl_settings
            from worker.driver import make_worker

            wanted = EngineOptions(**engine)
            if wanted.device == "cuda" and wanted.num_processes > 1:
                nccl_settings.prepare(options.transfer.nccl, host)  # NCCL reads them for its first group: the ranks'
            loaded = Engine.load(wanted, progress=progress)
            pin_process(cpus)
            secret = greeting.secrets.cluster
            newest = with_role(options, options.role, greeting.knobs) if greeting.knobs else options
            return make_worker(replace(newest, host=host, incarnation=incarnation, secret=secret), loaded)

        super().__init__(options.name, host, membership, build)

    def describe(self) -> dict[str, Any]:
        service = self._thread.service
        return super().describe() | {"drained": service is not None and service.is_drained}

    def drain(self, undo: bool) -> None:
        """Have it left, or take it back."""
        self._thread.call(self._drain(undo), DRAIN_TIMEOUT_S)

    async def _drain(self, undo: bool) -> None:
        from kvrelay.v1 import worker_pb2

        self._thread.service.on_drain(worker_pb2.Drain(undo=undo))

    def take_knobs(self, knobs: Mapping[str, Any]) -> None:
        """Go by these from the next step on."""
        self._thread.call(self._take_knobs(knobs), DRAIN_TIMEOUT_S)

    async def _take_knobs(self, knobs: Mapping[str, Any]) -> None:
        self._thread.service.take_knobs(knobs)
