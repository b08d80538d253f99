"""Processes that are forked from one which has imported what they need. Each that is started anew, as in a cluster,
spends five seconds of a core on that; tests/engine/parallel/test_tensor_parallel.py starts ranks so.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from types import SimpleNamespace
from typing import Any

import pytest

from engine.parallel import processes
from engine.process import THREAD_KEYS


class ForkedRank:
    """What engine.parallel.processes has of a subprocess.Popen."""

    def __init__(self, command: Sequence[str], *, pass_fds: Sequence[int], **_: Any) -> None:
        assert command[2:4] == ["-m", "engine.parallel.rank"]
        with socket.socket(fileno=os.dup(pass_fds[0])) as channel:
            self._process = fork_server().Process(target=_run, args=(channel,), daemon=True)
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
        return code


@functools.cache
def fork_server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["engine.parallel.rank"])
    with pytest.MonkeyPatch.context() as patch:
        for key in THREAD_KEYS:
            patch.setenv(key, "1")  # a fork has none of its parent's threads
        forkserver.ensure_running()
    return context


def _run(channel: socket.socket) -> None:
    from engine.parallel.rank import main

    os._exit(main(channel.detach(), os.getppid()))


@pytest.fixture(scope="module", autouse=True)
def forked_ranks() -> Iterator[None]:
    """For a module, or a folder's conftest, that imports it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": ForkedRank}))
        yield
