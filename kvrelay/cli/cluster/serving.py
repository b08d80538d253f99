"""One run of `kvrelay up` in this process: start, tell how it goes, serve, and end everything whatever happens.

It owns the signals: the first SIGINT, SIGTERM or SIGHUP ends the run in good order wherever it stands; later ones are
ignored while that goes on, so that nothing is left behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from types import FrameType
from typing import TYPE_CHECKING, Any

from kvrelay.cli.cluster import checking, state
from kvrelay.cli.cluster.secrets import noted
from kvrelay.cli.console import FAILURE, INTERRUPTED, USAGE, CliError, note
from kvrelay.doctor.finding import plain
from kvrelay.doctor.ports import why_taken

if TYPE_CHECKING:
    from cluster.deploy.deployment import Deployment
    from cluster.spec.model import ClusterSpec
    from kvrelay.cli.cluster.views import View
    from kvrelay.cli.spec.wanted import Wanted
    from kvrelay.doctor.finding import Finding
    from kvrelay.known_clusters import ClusterState, Mode
    from kvrelay.replan.journal import Entry
    from kvrelay.replan.options import Asked
    from worker.wire.secrets import Secrets

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
WATCH_S = 15.0  # how long a quiet cluster is left alone: a change wakes us at once
SERVING_TIMEOUT_S = 30.0


class Stopped(BaseException):
    """A signal asked us to end. Raised while Ray's own code runs it may come out as another, or not at all: see
    `_asked_to_stop`."""


_asked_to_stop: list[int] = []  # the signal, once one came: there is one run in a process
_left_in_ray: list[bool] = []  # once Ray has not let this process go


def serve(
    wanted: Wanted,
    *,
    address: str | None,
    drawn: Secrets,
    log_dir: str,
    mode: Mode,
    view: View,
    checks: bool = False,
) -> int:
    """Returns the exit code: see kvrelay/cli/cluster/up.py. `checks`: the doctor looks before and afterwards."""
    code = _run(wanted, address, drawn, log_dir, mode, view, checks)
    if _left_in_ray:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(code)
    return code


def _run(
    wanted: Wanted, address: str | None, drawn: Secrets, log_dir: str, mode: Mode, view: View, checks: bool
) -> int:
    began_s = time.monotonic()
    _raise_on_signals()
    try:
        spec = wanted.spec
        own_state = replace(noted(spec, drawn, state.this_process(spec.name, mode)), address=address or "")
        with _claimed(own_state) if address is None else nullcontext():  # a Ray that is joined says if the name is free
            check_ports(spec, is_local=address is None)
            found = checking.before(spec, address) if checks else None
            return _serve(wanted, address, drawn, log_dir, own_state, view, began_s, found)
    except CliError as error:
        return view.failed(error)
    except BaseException as error:
        if not _asked_to_stop and not isinstance(error, SystemExit):  # Ray's own handler of SIGTERM, while it starts
            raise
        return INTERRUPTED if signal.SIGINT in _asked_to_stop else 0


@contextmanager
def _claimed(own_state: ClusterState) -> Iterator[None]:
    """From before anything takes its time, so that `kvrelay down` ends what only begins. Raises CliError."""
    try:
        state.claim(own_state)
        yield
    finally:
        state.remove_own(own_state.name)


def check_ports(spec: ClusterSpec, *, is_local: bool) -> None:
    """Ask before Ray is started: some seconds sooner. The router's own bind is what counts."""
    if not is_local:
        return
    host = "127.0.0.1" if spec.router.host == "auto" else spec.router.host
    if why := why_taken(host, 0):
        raise CliError(f"router cannot listen on {host}: {why}; give another --host, one of this machine")
    for flag, first in {"--port": spec.router.port, "--http-port": spec.router.http_port}.items():
        if isinstance(first, int) and first:
            for port in range(first, first + spec.router.replicas):
                if why := why_taken(host, port):
                    raise CliError(f"router cannot listen on {host}:{port}: {why}; give another {flag}, or 0")


def _serve(
    wanted: Wanted,
    address: str | None,
    drawn: Secrets,
    log_dir: str,
    own_state: ClusterState,
    view: View,
    began_s: float,
    found: list[Finding] | None,
) -> int:
    """`found`: by the checks before; None: nothing is checked."""
    from cluster.deploy.deployment import Deployment
    from cluster.deploy.ray import DeployError, quiet_stdout
    from cluster.spec.errors import SpecError
    from worker.log_file import why_no_log

    state.make_directory()
    if log_dir and (why := why_no_log(log_dir)):
        note(f"{why}; give another --log-dir")
    spec, mode = wanted.spec, own_state.mode
    deployment = Deployment(spec, address=address, secrets=drawn, log_dir=log_dir, sources=wanted.sources)
    keep = has_crashed = False
    with quiet_stdout():
        try:
            _start(deployment, view)
            state.write(own_state)
            snapshot = _until_ready(deployment, view)
            ready_s = time.monotonic() - began_s
            told = summary(deployment, snapshot, ready_s)
            endpoints = tuple(told["endpoints"])
            own_pid = 0 if mode == "joined" else own_state.pid
            own_state = replace(own_state, endpoints=endpoints, http=tuple(told["http"]), pid=own_pid)
            state.write(own_state)
            keep = mode == "joined"
            if found is not None:
                told["checks"] = plain([*found, *checking.after(deployment.spec, endpoints[0])])
            view.ready(told | {"detached": keep})
            if keep:
                return 0
            while True:
                with _replanning(deployment.spec, endpoints):
                    _watch(deployment, view)
        except SpecError as error:
            raise CliError(str(error), USAGE) from None
        except DeployError as error:
            has_crashed = error.is_a_crash
            where = f"\nthe logs are in {deployment.logs}" if has_crashed else ""
            raise CliError(f"{error}{where}", FAILURE) from None
        finally:
            _ignore_signals()
            if keep:
                deployment.leave()
            else:
                view.stopping()
                _stop(deployment, spec.name, has_crashed=has_crashed)


def _start(deployment: Deployment, view: View) -> None:
    view.starting()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])  # in all that is started now, too: we end it in order
    try:
        deployment.start()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP])
    _raise_on_signals()  # ray.init has set a handler of its own


def _stop(deployment: Deployment, name: str, *, has_crashed: bool) -> None:
    try:
        if not deployment.stop(has_crashed=has_crashed, keep_signals=_ignore_signals):
            _left_in_ray.append(True)
    finally:
        state.remove_own(name)


def _until_ready(deployment: Deployment, view: View) -> dict[str, Any]:
    from cluster.deploy.deployment import follow

    snapshot: dict[str, Any] = {}
    for snapshot in follow(deployment):
        view.progress(snapshot)
        _check_signals()
    deployment.wait_serving(SERVING_TIMEOUT_S)
    return snapshot


@contextmanager
def _replanning(spec: ClusterSpec, endpoints: Sequence[str]) -> Iterator[None]:
    """As the spec has it."""
    if spec.replan == "off":
        yield
        return
    from kvrelay.cli.cluster.replan import lines_of
    from kvrelay.replan.watching import ReplanThread

    def tell(entry: Entry) -> None:
        if entry.changes:
            for line in lines_of(asdict(entry)):
                note(line)

    thread = ReplanThread(endpoints, asked_of(spec), tell)
    thread.start()
    try:
        yield
    finally:
        thread.stop()


def asked_of(spec: ClusterSpec) -> Asked:
    """Of a replanner."""
    from kvrelay.replan.options import Asked
    from placement.plan import Slo

    return Asked(
        slo=Slo(**spec.targets_s, attainment=spec.replan_attainment),
        acts=spec.replan == "act",
        most_devices=spec.replan_most_devices,
        policy=spec.replan_policy,
    )


def _watch(deployment: Deployment, view: View) -> None:
    """Until a signal, or until another replanner is wanted. Ray restarts what ends; here it is only told."""
    replanner = _replanner_of(deployment.spec)
    while _replanner_of(deployment.spec) == replanner:
        _check_signals()
        view.progress(deployment.next_snapshot(WATCH_S))


def _replanner_of(spec: ClusterSpec) -> object:
    return spec.replan != "off" and asked_of(spec)


def summary(deployment: Deployment, snapshot: dict[str, Any], ready_s: float) -> dict[str, Any]:
    """What --json prints when the cluster is ready."""
    spec = deployment.spec
    scheme = "https" if spec.router.tls else "http"
    keys = ("name", "role", "address", "pid", "host")
    return {
        "name": spec.name,
        "model": spec.model,
        "served_model_name": spec.model_name,
        "models": [spec.model_name, *(model.name for model in spec.models)],
        "endpoints": _endpoints(snapshot),
        "http": [f"{scheme}://{member['http']}" for member in snapshot["members"] if member["http"]],
        "ready_s": round(ready_s, 3),
        "logs": deployment.logs,
        "members": [{key: member[key] for key in keys} for member in snapshot["members"]],
    }


def _endpoints(snapshot: dict[str, Any]) -> list[str]:
    from cluster.deploy.deployment import endpoints_of

    return endpoints_of(snapshot)


def _raise_on_signals() -> None:
    def stop(signum: int, _: FrameType | None) -> None:
        _ignore_signals()
        _asked_to_stop.append(signum)
        raise Stopped

    for signum in SIGNALS:
        if signum != signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN:  # as nohup wants it
            signal.signal(signum, stop)


def _check_signals() -> None:
    if _asked_to_stop:
        raise Stopped


def _ignore_signals() -> None:
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
