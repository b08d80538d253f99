"""What is measured in minutes is written at their end: whether it can be is asked before they are spent."""

from __future__ import annotations

import os
from pathlib import Path

from kvrelay.cli.console import USAGE, CliError


def check_writable(option: str, path: Path) -> None:
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise CliError(f"{option} is {path}, where no file can be written; give another", USAGE)
