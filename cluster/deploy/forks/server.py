"""The fork server of a Ray of our own: it imports once what every actor needs, loads a small model once for all who
serve it, and forks a worker process for each that the raylet starts; ask.py, which the raylet runs, asks for it.

    server  import what routers need   -> hear of the spec -> fork the first who ask, pass on all others
    loaded  import torch, transformers ----------------------> load -> fork who is passed on
    fork    answer -> hear "go" -> take over what the raylet gave -> run Ray's own script

    `up` tells of another spec: a model that is not in it is let go
    `up` has ended: the server ends, and the loaded one with it

Imports are paid once, and their memory and the model's weights are shared until they are written. The first who ask
become the controller and the routers, by the order in which actors are created: they start while the other process
imports. If one becomes a worker it imports and loads for itself, as does whoever serves another model.

Ray reads its settings from the environment when it is imported, which is when somebody asks first: who asks with other
settings is left to Ray. Neither process has a second thread or a connection, so that nothing is half there in a fork:
if a library ever starts a thread when it is imported, it ends, and workers are started as Ray starts them. They keep
nothing of their forks: Ray watches them, and they end with the raylet.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from cluster.deploy.forks.ask import ANSWER_TIMEOUT_S, GO, LOADED, STREAMS
from cluster.deploy.forks.preload import Imports, Preload
from engine.kernels import build
from engine.process import end_with_parent, set_environment
from worker.heap import give_memory_back

MAX_REQUEST_BYTES = 1 << 18  # more does not fit into a message
FORKED = b"f"
PASSED_ON = b"p"
CONTROL = 0  # stdin: a socket of who started it (started.py)
MAX_THREADS = 8  # a small model's load has no use for more
LOAD_S = 20  # of a model: whoever asks waits no longer than ANSWER_TIMEOUT_S, and gets the imports at least
ENDING_S, LOOK_S = 1.0, 0.01  # that threads are waited for, and between two looks


def main() -> None:
    """`sys.argv`: what to import, at once."""
    imports = Imports(**json.loads(sys.argv[1]))
    set_environment(min(len(os.sched_getaffinity(0)), MAX_THREADS))  # of the load
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # it starts its threads when it is imported
    to_loaded, from_server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = os.getpid()
    if os.fork() > 0:
        from_server.close()
        with to_loaded:
            request = _as_server(imports, to_loaded)
    else:
        end_with_parent(server)
        to_loaded.close()
        with from_server:
            request = _as_loaded(imports, from_server)
    if request is None:
        os._exit(0)  # Ray, where it is imported, would look for what to end
    sys.argv = request["arguments"]
    runpy.run_path(sys.argv[0], run_name="__main__")


def _as_server(imports: Imports, to_loaded: socket.socket) -> dict[str, Any] | None:
    """What a fork is to run; None in the server, when it has ended."""
    if build.is_missing():
        command = [sys.executable, "-P", "-m", build.__name__]
        subprocess.Popen(command, stdin=subprocess.DEVNULL)  # of a machine's first start: beside the imports
    with _kept():
        _import_all(imports.light)
    control = socket.socket(fileno=CONTROL)
    message, descriptors, _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, 1)
    control.detach()  # it stays open: its end is that of `up`
    if not descriptors:
        return None  # nobody is to be forked
    with contextlib.suppress(OSError):  # it has failed: Ray starts who is passed on
        to_loaded.send(message)
    preload = Preload(**json.loads(message))
    with socket.socket(fileno=descriptors[0]) as listener:
        return _serve(_first(listener, to_loaded, preload.num_light), imports.ray, FORKED)


def _as_loaded(imports: Imports, from_server: socket.socket) -> dict[str, Any] | None:
    with _kept():
        _import_all(imports.all)
    message = from_server.recv(MAX_REQUEST_BYTES)
    if not message:
        return None
    preload = Preload(**json.loads(message))
    if preload.engine is not None:
        with _kept():
            _load(preload.engine)
    return _serve(_passed_on(from_server, preload), imports.ray, LOADED)


@contextlib.contextmanager
def _kept() -> Iterator[None]:
    """What is made inside stays: no fork's collections write to it, nor look through it, which took 0.2 s."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()
    give_memory_back()


def _import_all(modules: Sequence[str]) -> None:
    for module in modules:
        import_module(module)


def _import_ray(settings: Mapping[str, str], modules: Sequence[str]) -> None:
    for key in _settings_of(os.environ).keys() - settings.keys():
        del os.environ[key]  # which a raylet was not to have
    os.environ.update(settings)
    with _kept():
        _import_all(modules)


def _load(engine: Mapping[str, Any]) -> None:
    """Where it cannot be loaded, or not soon, workers load for themselves, and say why not."""
    from transformers.utils.logging import disable_progress_bar

    from engine.loading.load import prepare_for_forks
    from engine.options import EngineOptions

    disable_progress_bar()  # it has a thread
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(LOAD_S)
    with contextlib.suppress(Exception, KeyboardInterrupt):
        prepare_for_forks(EngineOptions(**engine))
    signal.alarm(0)
    gc.collect()


def _first(listener: socket.socket, to_loaded: socket.socket, count: int) -> Iterator[socket.socket]:
    """Those who ask first, until `up` has ended; all else is passed on to the loaded process."""
    while True:
        ready, _, _ = select.select((CONTROL, listener.fileno()), (), ())
        if CONTROL in ready:
            if not (message := os.read(CONTROL, MAX_REQUEST_BYTES)):
                return
            with contextlib.suppress(OSError):
                to_loaded.send(message)
            continue
        asker, _ = listener.accept()
        if count > 0:
            count -= 1
            yield asker
            continue
        with asker, contextlib.suppress(OSError):  # it is not there any more: Ray starts who asked
            socket.send_fds(to_loaded, [PASSED_ON], [asker.fileno()])


def _passed_on(from_server: socket.socket, preload: Preload) -> Iterator[socket.socket]:
    """Until the server has ended. The model is kept for as long as it is what workers load."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(from_server, MAX_REQUEST_BYTES, 1)
        if descriptors:
            yield socket.socket(fileno=descriptors[0])
        elif not message:
            return
        elif preload.engine is not None and Preload(**json.loads(message)).engine != preload.engine:
            _let_go()


def _let_go() -> None:
    from engine.loading import ready_made

    gc.unfreeze()
    with _kept():
        ready_made.clear()
        gc.collect()


def _serve(askers: Iterator[socket.socket], ray_modules: Sequence[str], answer: bytes) -> dict[str, Any] | None:
    """What this process is to run: returns in each fork, which has answered so, and with nothing in the server when it
    has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a fork
    settings: dict[str, str] | None = None  # of Ray's; None: it is not imported yet
    for asker in askers:
        with asker, contextlib.suppress(OSError, ValueError):  # it has ended: nothing can be read
            asked = _Asked.of(asker)
            if settings is None:
                settings = asked.settings
                _import_ray(settings, ray_modules)
            if not _has_one_thread():
                return None
            if asked.settings == settings and os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                return asked.taken_over(asker, answer)
            asked.close()
    return None


def _has_one_thread() -> bool:
    """In a moment: one that has been told to end may still run."""
    deadline_s = time.monotonic() + ENDING_S
    while len(os.listdir("/proc/self/task")) > 1:
        if time.monotonic() > deadline_s:
            return False
        time.sleep(LOOK_S)
    return True


@dataclass(frozen=True, slots=True)
class _Asked:
    """How the process stands that asks, and its streams."""

    standing: dict[str, Any]
    streams: Sequence[int]

    @classmethod
    def of(cls, asker: socket.socket) -> _Asked:
        asker.settimeout(ANSWER_TIMEOUT_S)
        message, streams, _, _ = socket.recv_fds(asker, MAX_REQUEST_BYTES, len(STREAMS))
        return cls(json.loads(message), streams)

    @property
    def settings(self) -> dict[str, str]:
        """Ray's."""
        return _settings_of(self.standing["environment"])

    def close(self) -> None:
        for stream in self.streams:
            os.close(stream)

    def taken_over(self, asker: socket.socket, answer: bytes) -> dict[str, Any] | None:
        """What the asker wants to be run, in its place; None if it does not want it any more."""
        try:
            asker.send(answer)
            if asker.recv(len(GO)) != GO:
                return None
        except OSError:
            return None
        _stand_as(self.standing)
        for ours, theirs in zip(STREAMS, self.streams, strict=True):
            os.dup2(theirs, ours)
            os.close(theirs)
        return self.standing


def _settings_of(environment: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in environment.items() if key.startswith("RAY_")}


def _stand_as(standing: Mapping[str, Any]) -> None:
    os.setpgid(0, 0)  # a raylet kills all of the group of a worker that has died
    os.chdir(standing["folder"])
    os.environ.clear()
    os.environ.update(standing["environment"])
    resource.setrlimit(resource.RLIMIT_NOFILE, standing["open_files"])
    Path("/proc/self/oom_score_adj").write_text(standing["oom_score_adj"])
    signal.pthread_sigmask(signal.SIG_SETMASK, standing["blocked_signals"])


if __name__ == "__main__":
    main()
