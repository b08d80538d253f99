"""The fork server of a Ray of our own: one process imports once what every actor needs, and forks a worker process
for each that the raylet starts; ask.py, which the raylet runs, asks for it.

    import -> wait -> fork -> wait ... `up` has ended: end
                       `-> in the fork: answer -> hear "go" -> take over what the raylet gave -> run Ray's own script
                                        `-> nobody waits for it any more: end

Imports are paid once, and their memory is shared until it is written. Ray is not among them, which reads its settings
from the environment when it is imported, and the raylet gives each worker its own. The server has one thread and no
connection, so that nothing is half there in a fork: if a library ever starts a thread when it is imported, it ends, and
workers are started as Ray starts them. It keeps nothing of its forks: Ray watches them, and they end with the raylet.
"""

from __future__ import annotations

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
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from cluster.deploy.forks.ask import ANSWER_TIMEOUT_S, GO, SOCKET_VARIABLE, STREAMS
from engine.process import set_environment
from worker.heap import give_memory_back

MODULES = (
    "cluster.deploy.router_service",
    "cluster.deploy.changes.rolling",  # the controller's class, which Ray has all who call it import
    "worker.driver",
    "worker.log_file",
    "worker.process",
    "mixed_worker.driver",  # of the parts of the two others
    "google.protobuf.json_format",  # what Ray imports
    "jsonschema",
    "msgpack",
    "pdb",
    "pydantic.v1",
    "requests",
    "starlette.datastructures",
)
MAX_REQUEST_BYTES = 1 << 18  # more does not fit into a message
FORKED = b"f"
STDIN = 0


def start_fork_server(folder: Path, threads: int, modules: Sequence[str] = MODULES) -> subprocess.Popen[bytes]:
    """It ends when its stdin is closed: by the caller, or by the caller's own end. `folder` is private; `threads` are a
    worker's."""
    os.environ[SOCKET_VARIABLE] = path = str(folder / "forks")  # for ask.py, by way of the raylet
    return subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, path, str(threads), *modules],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C is `up`'s, who ends all in order
    )


def main() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(sys.argv[1])
        listener.listen()
        _import_all(sys.argv[3:], threads=int(sys.argv[2]))
        request = _serve(listener)
    if request is not None:
        sys.argv = request["arguments"]
        runpy.run_path(sys.argv[0], run_name="__main__")


def _import_all(modules: Sequence[str], *, threads: int) -> None:
    set_environment(threads)
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # it starts its threads when it is imported
    gc.disable()
    for module in modules:
        import_module(module)
    gc.collect()
    gc.freeze()  # so that a fork's collections write to none of it
    gc.enable()
    give_memory_back()


def _serve(listener: socket.socket) -> dict[str, Any] | None:
    """What this process is to run: returns in each fork, with nothing in the server when `up` has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a fork
    waiting = select.poll()
    waiting.register(STDIN, 0)  # its end
    waiting.register(listener, select.POLLIN)
    while all(descriptor != STDIN for descriptor, _ in waiting.poll()) and _has_one_thread():
        asker, _ = listener.accept()
        with asker:
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                return _taken_over(asker)
    return None


def _has_one_thread() -> bool:
    return len(os.listdir("/proc/self/task")) == 1


def _taken_over(asker: socket.socket) -> dict[str, Any] | None:
    """What the asker wants to be run, in its place; None if it does not want it any more."""
    asker.settimeout(ANSWER_TIMEOUT_S)
    try:
        message, streams, _, _ = socket.recv_fds(asker, MAX_REQUEST_BYTES, len(STREAMS))
        asker.send(FORKED)
        if asker.recv(len(GO)) != GO:
            return None
    except OSError:
        return None
    standing: dict[str, Any] = json.loads(message)
    _stand_as(standing)
    for ours, theirs in zip(STREAMS, streams, strict=True):
        os.dup2(theirs, ours)
        os.close(theirs)
    return standing


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
