"""`kvrelay down`: ends a cluster that `kvrelay up` started. It signals the one process that started it, or ends the
named actors in a Ray that was joined. It never stops a Ray that kvrelay did not start.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import replace
from typing import Annotated

import typer

from kvrelay import known_clusters
from kvrelay.cli import completing
from kvrelay.cli.cluster import state
from kvrelay.cli.console import CliError, JsonOption, note, print_json

POLL_S = 0.05

HELP = """End a cluster in good order: running requests may finish, then every process that belongs to it is gone.

Examples:

  kvrelay down

  kvrelay down chat

  kvrelay down chat --address auto
"""


def register(app: typer.Typer) -> None:
    app.command(help=HELP)(down)


def down(
    name: Annotated[
        str | None,
        typer.Argument(help="Which cluster; not needed while there is only one.", autocompletion=completing.clusters),
    ] = None,
    address: Annotated[str | None, typer.Option(help="The Ray it was put on: auto, or HOST:PORT.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait until it is gone.")] = 60.0,
    forget: Annotated[
        bool, typer.Option("--forget", help="Take it off the list of clusters though the Ray it was put on is gone.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    cluster = _in_ray(name, address) if address is not None else _pick(name)
    if cluster.mode == "joined":
        _end_joined(cluster, forget=forget)
    else:
        _end_process(cluster, timeout)
    if as_json:
        print_json({"name": cluster.name, "ended": True})
    else:
        note(f"{cluster.name} is down")


def _in_ray(name: str | None, address: str) -> known_clusters.ClusterState:
    return known_clusters.ClusterState(name=name or "kvrelay", mode="joined", pid=0, started="", address=address)


def _pick(name: str | None) -> known_clusters.ClusterState:
    clusters = {cluster.name: cluster for cluster in known_clusters.alive()}
    if name is not None:
        stale = known_clusters.read(name)
        if stale is not None and not stale.is_alive:
            if stale.address:  # what it left there does not end with it
                return replace(stale, mode="joined")
            state.remove(name)
            raise CliError(f"{name} was gone already: process {stale.pid} ended without `kvrelay down`")
        if name not in clusters:
            known = f"there are {', '.join(clusters)}" if clusters else "none runs"
            raise CliError(f"no cluster named {name} was started from here; {known}")
        return clusters[name]
    if len(clusters) != 1:
        known = f"give one of the names {', '.join(clusters)}" if clusters else "none runs"
        raise CliError(f"{len(clusters)} clusters were started from here; {known}")
    return next(iter(clusters.values()))


def _end_process(cluster: known_clusters.ClusterState, timeout_s: float) -> None:
    """One that nobody reaps has ended, as in a container without an init."""
    deadline = time.monotonic() + timeout_s
    if cluster.is_alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(cluster.pid, signal.SIGTERM)
    while cluster.is_alive:
        if time.monotonic() > deadline:
            raise CliError(f"{cluster.name} (process {cluster.pid}) has not ended after {timeout_s:g} s")
        time.sleep(POLL_S)
    state.remove(cluster.name)


def _end_joined(cluster: known_clusters.ClusterState, *, forget: bool) -> None:
    """Its note goes once it has ended, or its Ray says that there is none: what only does not answer may serve on, and
    the token that was drawn for it stands nowhere else."""
    from cluster.deploy.deployment import NoSuchCluster, end_joined
    from cluster.deploy.ray import DeployError, quiet_stdout

    known = known_clusters.read(cluster.name)
    addresses = {known.address if known is not None else "", cluster.address}
    is_noted = "" not in addresses and (len(addresses) == 1 or "auto" in addresses)
    try:
        with quiet_stdout():
            end_joined(cluster.address, cluster.name)
    except DeployError as error:
        if is_noted and (forget or isinstance(error, NoSuchCluster)):
            state.remove(cluster.name)
            if forget:
                note(f"{error}: it is off the list")
                return
        elif is_noted:
            raise CliError(f"{error}; if it is gone for good: kvrelay down {cluster.name} --forget") from None
        raise CliError(str(error)) from None
    if is_noted:
        state.remove(cluster.name)
