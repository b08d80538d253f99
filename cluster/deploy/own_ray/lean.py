"""What a Ray of our own goes without, for which `ray.init` has no switch: all that serves a dashboard, an autoscaler or
runtime environments. It takes four seconds of a core at each start, and 300 MB.

    autoscaler, log monitor    RayParams has a switch for each
    API server                 not started
    the raylet's two agents    a process that sleeps in the place of each (idle_agent.py), and "not in use" for their
                               ports, as Ray's own agents say in a minimal installation

A raylet ends when an agent of its does, and it asks them for nothing but metrics and runtime environments, and we have
none. A Ray that is made otherwise than we know starts all as ever.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

from cluster.deploy.forks import ask
from cluster.deploy.own_ray import idle_agent

AGENTS = ("dashboard_agent", "runtime_env_agent")  # Ray's names for kinds of processes
PORTS = (
    "METRICS_AGENT_PORT_NAME",
    "METRICS_EXPORT_PORT_NAME",
    "DASHBOARD_AGENT_LISTEN_PORT_NAME",
    "RUNTIME_ENV_AGENT_PORT_NAME",
)
NOT_IN_USE = -1
IDLE_AGENT = (sys.executable, "-I", "-S", idle_agent.__file__)
COMMAND = "_build_python_executable_command_memory_profileable"  # in Ray's services: how a helper is started
RUNTIME_ENVIRONMENTS = ("RAY_RUNTIME_ENV_HOOK", "RAY_JOB_CONFIG_JSON_ENV_VAR")  # variables, for another Ray's jobs


@contextlib.contextmanager
def lean_ray(*, is_forking: bool) -> Iterator[None]:
    """While it is started. `is_forking`: its workers are forked, by what ask.py asks."""
    from ray._private import parameter
    from ray._private.node import Node

    with contextlib.ExitStack() as undo:
        ours: dict[str, Any] = {"no_monitor": True, "include_log_monitor": False}
        if is_forking:
            ours["setup_worker_path"] = ask.__file__
        if ours.keys() <= inspect.signature(parameter.RayParams).parameters.keys():
            undo.enter_context(patch.object(parameter, "RayParams", partial(parameter.RayParams, **ours)))
        if hasattr(Node, "start_api_server") and hasattr(Node, "webui_url"):
            undo.enter_context(patch.object(Node, "start_api_server", _no_api_server))
        if _can_be_without_agents():
            undo.enter_context(patch.object(Node, "start_raylet", _without_agents(Node.start_raylet)))
        yield


def _no_api_server(node: Any, **_: Any) -> None:
    node._webui_url = None


def _can_be_without_agents() -> bool:
    from ray import _raylet
    from ray._private import services

    return all(hasattr(_raylet, name) for name in (*PORTS, "persist_port")) and hasattr(services, COMMAND)


def _without_agents(start_raylet: Any) -> Any:
    from ray._private import services

    raylet: Any = import_module("ray._raylet")
    build = getattr(services, COMMAND)

    def command(component: str, *rest: Any, **more: Any) -> Any:
        if component in AGENTS:
            return list(IDLE_AGENT)
        return build(component, *rest, **more)

    def start(node: Any, *rest: Any, **more: Any) -> None:
        for name in PORTS:
            raylet.persist_port(node._session_dir, node._node_id, getattr(raylet, name), NOT_IN_USE)
        with patch.object(services, COMMAND, command):
            start_raylet(node, *rest, **more)

    return start
