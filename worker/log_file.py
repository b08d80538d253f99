"""A process's log as files that outlive it: all that it logs, and whatever it or a library writes to stdout and stderr
(the last words of a crash among them), in `NAME.log` and a bounded number of older ones beside it.

A disk that is full, or a folder that is gone, costs lines of the log and nothing else.
"""

from __future__ import annotations

import io
import logging
import os
import tempfile
from logging.handlers import RotatingFileHandler
from pathlib import Path

from engine.process import LOG_FORMAT

MAX_BYTES = 8 << 20
OLDER_FILES = 3  # each of at most MAX_BYTES
STREAMS = (1, 2)


def log_into(folder: str, name: str) -> None:
    """Called once, before anything else sets up logging. `folder` "": the process's stderr, whoever keeps it."""
    logging.raiseExceptions = False
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    try:
        if folder:
            Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
            handlers = [_OwnLogFile(Path(folder, f"{name}.log"), maxBytes=MAX_BYTES, backupCount=OLDER_FILES)]
    except OSError as error:
        print(f"{name} cannot log into {folder}: {error}", flush=True)
    logging.basicConfig(level=os.environ.get("KVRELAY_LOG_LEVEL", "INFO"), format=LOG_FORMAT, handlers=handlers)


def why_no_log(folder: str) -> str:
    """Why nothing can be logged there, in words for `up`: what processes say of it stands in no log. Empty: it can."""
    try:
        Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(b"\n")
    except OSError as error:
        return f"nothing can be logged into {folder}: {(error.strerror or str(error)).lower()}"
    return ""


class _OwnLogFile(RotatingFileHandler):
    """stdout and stderr follow the newest file."""

    def _open(self) -> io.TextIOWrapper:
        stream = super()._open()
        for descriptor in STREAMS:
            os.dup2(stream.fileno(), descriptor)
        return stream
