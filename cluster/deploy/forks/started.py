"""ForkServer is the fork server (server.py) for who has started it: begun before anything is known of the cluster, for
it imports for seconds, and told the rest when that is known.

Imports nothing but the standard library, for the same reason.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from cluster.deploy.forks.ask import SOCKET_VARIABLE
from cluster.deploy.forks.preload import ACTORS, Imports, Preload
from worker.wire import secrets

SERVER = "cluster.deploy.forks.server"


class ForkServer:
    """It ends when it is told to, or with this process."""

    def __init__(self, imports: Imports = ACTORS) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        kept = {name: value for name, value in os.environ.items() if name not in secrets.VARIABLES}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", SERVER, json.dumps(asdict(imports))],
                env=kept | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C is `up`'s, who ends all in order
            )

    def tell(self, folder: Path, preload: Preload) -> None:
        """From here on ask.py may ask, who is run by children of this process. `folder` is private. Where the server
        has ended, nobody is forked."""
        os.environ[SOCKET_VARIABLE] = path = str(folder / "forks")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, contextlib.suppress(OSError):
            listener.bind(path)
            listener.listen()
            socket.send_fds(self._control, [json.dumps(asdict(preload)).encode()], [listener.fileno()])

    def change(self, preload: Preload) -> None:
        """What workers load by now."""
        with contextlib.suppress(OSError):
            self._control.send(json.dumps(asdict(preload)).encode())

    def end(self) -> None:
        """Returns at once."""
        self._control.close()


_begun: list[ForkServer] = []  # one, or none


def begin() -> None:
    """For `take`."""
    _begun.append(ForkServer())


def take() -> ForkServer:
    """The one that was begun, or a new one."""
    return _begun.pop() if _begun else ForkServer()


def end_untaken() -> None:
    """Returns when it is gone."""
    while _begun:
        server = _begun.pop()
        server.process.kill()  # it may be importing, and has nothing to lose
        server.process.wait()
        server.end()
