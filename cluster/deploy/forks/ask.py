"""What a raylet runs to start a worker process in a Ray of our own: it has the fork server (server.py) fork one, and
ends; where that cannot be had it becomes the process that Ray would have started.

    connect -> send how this process stands -> [forked] -> answer "go", end
                         no server, no word in time -> exec Ray's own script

The one who asks decides: a fork goes on only when it is told to, so that there are never two workers for one request.
Imports as little as it can, for each worker waits for it.
"""

import json
import os
import resource
import signal
import socket
import sys

SOCKET_VARIABLE = "KVRELAY_FORK_SERVER"  # the path of its socket
ANSWER_TIMEOUT_S = 40.0  # the server may be importing still; Ray itself gives a worker 60 s
LOADED_TIMEOUT_S = 5.0  # it is not, and what says nothing then is stopped
LOADED = b"l"  # the answer of a fork that has all imported
GO = b"go"
STREAMS = (0, 1, 2)
SETUP_FLAGS = ("--language=", "--serialized-runtime-env-context=")
PLAIN = ("--language=PYTHON", "--serialized-runtime-env-context={}")  # what needs no set-up


def main() -> None:
    """`sys.argv`: Ray's script for a worker and its flags, with those that are for Ray's setup_worker.py beside it."""
    try:
        os.getcwd()
    except OSError:  # that of `up` was removed since: torch and transformers want one that is there
        os.chdir("/")
    script, setup = sys.argv[1], [word for word in sys.argv if word.startswith(SETUP_FLAGS)]
    worker = [word for word in sys.argv[1:] if word not in setup]
    if not (all(word in PLAIN for word in setup) and _is_forked(worker)):
        ray_setup = os.path.join(os.path.dirname(script), "setup_worker.py")
        os.execv(sys.executable, [sys.executable, ray_setup, *sys.argv[1:]])


def _is_forked(arguments: list[str]) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        try:
            path = os.environ[SOCKET_VARIABLE]
            is_loaded = f"{path}.loaded"  # a file of whoever saw it first
            server.settimeout(LOADED_TIMEOUT_S if os.path.exists(is_loaded) else ANSWER_TIMEOUT_S)
            server.connect(path)
            socket.send_fds(server, [json.dumps(_standing(arguments)).encode()], STREAMS)
            if not (answer := server.recv(1)):
                return False
            if answer == LOADED:
                os.close(os.open(is_loaded, os.O_CREAT))
            server.send(GO)
        except OSError:
            return False
    return True


def _standing(arguments: list[str]) -> dict[str, object]:
    """What a raylet gave this process, and a fork takes over."""
    with open("/proc/self/oom_score_adj") as file:
        oom_score_adj = file.read()
    return {
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "oom_score_adj": oom_score_adj,
        "blocked_signals": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    }


if __name__ == "__main__":
    main()
