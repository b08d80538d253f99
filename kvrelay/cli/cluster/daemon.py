"""`up --detach`: starts the same command again as a process in a session of its own and waits until it is ready.

The child sends its progress down a pipe; when the pipe ends without a last word it has died, and its log says why.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import TextIO

from kvrelay.cli.cluster import state, views
from kvrelay.cli.console import INTERRUPTED, CliError

LOG_TAIL_LINES = 5
ENDED_IN_ORDER = (0, -signal.SIGTERM)  # the latter before it has begun anything


def start_and_wait(name: str, as_json: bool) -> int:
    """Returns the exit code: 0 when it is ready. Ctrl-C ends the child, too, and so does a SIGTERM, as of `timeout`."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    view = views.choose(as_json=as_json, report_fd=None)
    read_fd, write_fd = os.pipe()
    child = _spawn(name, write_fd)
    os.close(write_fd)
    with suppress(CliError):  # it says itself why not
        state.claim_for(state.of_process(child.pid, name, "daemon"))
    try:
        with os.fdopen(read_fd) as pipe:
            code = _relay(pipe, view)
    except KeyboardInterrupt:
        child.send_signal(signal.SIGTERM)
        code = INTERRUPTED
    if code == 0:
        return code
    child.wait()  # it has ended all that it started
    state.remove_own(name, child.pid)
    return view.failed(_why_ended(name, child.returncode)) if code is None else code


def _why_ended(name: str, code: int) -> CliError:
    """Of one that has said nothing of it."""
    if code in ENDED_IN_ORDER:
        return CliError(f"{name} was ended before it was ready, as by `kvrelay down`")
    return CliError(f"the background process died (exit code {code}): {_log_tail(name)}")


def _spawn(name: str, write_fd: int) -> subprocess.Popen[bytes]:
    arguments = [a for a in sys.argv[1:] if a not in ("--detach", "-d", "--json")]
    python = [sys.executable, "-P"]  # no package in the folder where one stands hides ours
    command = [*python, "-m", "kvrelay.cli.main", *arguments, "--report-fd", str(write_fd)]
    state.make_directory()
    log = state.log_path(name)
    with state.written_or_told():
        log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        log_fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(log_fd, "wb") as file:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            pass_fds=[write_fd],
            start_new_session=True,
        )


def _relay(pipe: TextIO, view: views.View) -> int | None:
    for line in pipe:
        code = views.replay(view, json.loads(line))
        if code is not None:
            return code
    return None


def _log_tail(name: str) -> str:
    lines = state.log_path(name).read_text(errors="replace").splitlines()
    return " | ".join(lines[-LOG_TAIL_LINES:]) or "its log is empty"
