"""WorkerActor is the process in which Ray starts one worker of any role. It carries no request, token or KV byte: it
loads the engine, lets the worker serve over gRPC, and tells the cluster's controller how that goes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray

from engine.process import pin_process, set_thread_counts
from worker.options import WorkerOptions
from worker.process import Progress, Service, ServiceEvent, ServiceThread


class WorkerActor:
    """Made by Ray, again after each crash. `controller` names the actor (in this namespace) that hears the events."""

    def __init__(
        self, options: WorkerOptions, engine: Mapping[str, Any], cpus: Sequence[int], loopback: bool, controller: str
    ) -> None:
        host = "127.0.0.1" if loopback else ray.util.get_node_ip_address()
        set_thread_counts(engine["threads"])

        def build(incarnation: str, progress: Progress) -> Service:
            from engine.engine import Engine
            from engine.options import EngineOptions
            from worker.driver import make_worker

            loaded = Engine.load(EngineOptions(**engine), progress=progress)
            pin_process(cpus)
            return make_worker(replace(options, host=host, incarnation=incarnation), loaded)

        def tell(event: ServiceEvent) -> None:
            ray.get_actor(controller).on_event.remote(event.as_dict())

        self._thread = ServiceThread(options.name, host, build, tell)
        self._thread.begin()

    def describe(self) -> dict[str, Any]:
        return self._thread.event.as_dict()

    def wait_end(self) -> str:
        """Blocks until the worker has ended: the controller learns of a crash by this call's failing."""
        return self._thread.wait_end()

    def stop(self, grace_s: float) -> None:
        self._thread.stop(grace_s)
