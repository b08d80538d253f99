"""Files that ship with kvrelay and are asked for by name: models, hardware, plan requests, workloads, cluster specs.

They stand in configs/ of the repository. `placement/configs` is a link to it, which a wheel fills with the files
themselves, so one path serves a checkout, an editable install and a wheel. Reads nothing.
"""

from __future__ import annotations

from pathlib import Path

CONFIGS = (Path(__file__).parent / "configs").resolve()  # beside the sources, also where `placement` is compiled


def named_file(kind: str, name: str, suffix: str) -> Path | None:
    """The file that a name means: "llama-3.1-8b" among "models". None where no such file ships."""
    path = CONFIGS / kind / f"{name.lower().replace('_', '-')}{suffix}"
    return path if path.is_file() else None


def names_of(kind: str, suffix: str) -> list[str]:
    return sorted(path.name.removesuffix(suffix) for path in (CONFIGS / kind).glob(f"*{suffix}"))
