"""write_whole has a file say something else, whole or not at all: where a disk is full, it says what it said."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """What is no plain file, such as /dev/stdout, is written to as it is. Raises OSError."""
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    target = path.resolve()  # of a link, what it is to
    made = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        made.write_bytes(data)
        made.replace(target)
    except OSError:
        made.unlink(missing_ok=True)
        raise
