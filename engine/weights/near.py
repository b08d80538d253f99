"""Names of models that are had here and are spelt much like one that is not. It opens no file and asks nobody."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path

from engine.weights.files import CONFIG

MOST_NAMES = 2
LEAST_LIKENESS = 0.6


def did_you_mean(model: str, also: Iterable[str] = ()) -> str:
    """`did you mean ./model?`, or nothing. `also`: other names that there are."""
    names = {Path(name).name.lower(): name for name in (*also, *_directories(model))}
    near = get_close_matches(Path(model).name.lower(), names, MOST_NAMES, LEAST_LIKENESS)
    return f"did you mean {' or '.join(names[name] for name in near)}? " if near else ""


def _directories(model: str) -> Iterator[str]:
    """Of models, beside what was named and in it; written as it was."""
    named = Path(model).expanduser()
    for folder in (named.parent, *([named] if named.is_dir() else [])):
        for path in (folder / name for name in folders(folder)):
            if (path / CONFIG).exists():
                yield str(path) if path.is_absolute() else f".{os.sep}{path}"


def folders(folder: Path) -> list[str]:
    """Names; none where it cannot be read."""
    try:
        return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    except OSError:
        return []
