"""On what a result was measured: when, which version and commit, which machine."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

LIBRARIES = ("kvrelay", "torch", "transformers", "ray", "grpcio")


def about() -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "machine": {
            "host": platform.node(),
            "cpu": _cpu_name(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        },
        "versions": {"python": platform.python_version()} | dict(filter(None, map(_version, LIBRARIES))),
    }


def _version(name: str) -> tuple[str, str] | None:
    with suppress(PackageNotFoundError):
        return name, version(name)
    return None


def _commit() -> str:
    """Of the checkout that this code stands in; nothing where it is installed without one."""
    with suppress(OSError):
        asked = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
        return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    return ""


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
