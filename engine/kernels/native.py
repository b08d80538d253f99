"""Builds and loads the C++ kernels of engine/kernels/csrc, once for each machine: source, compiler, CPU name the file.

The library lives in $XDG_CACHE_HOME/kvrelay (or ~/.cache/kvrelay). Several processes may start at once: one builds
under a lock, and the file appears whole by a rename.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch  # before the kernels are loaded: it brings a libgomp of the same name, and both share one pool of threads

SOURCES = Path(__file__).parent / "csrc"
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-shared", "-fPIC", "-std=c++17")
BUILD_TIMEOUT_S = 300.0
DTYPE_CODE = {torch.float32: 0, torch.bfloat16: 1}  # as the kernels know them


class NativeUnavailable(Exception):
    """The kernels cannot be built or loaded here: one sentence that says why."""


@functools.cache
def library() -> ctypes.CDLL:
    """The kernels. Raises NativeUnavailable. The answer is kept: nothing about a machine changes while it runs."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise NativeUnavailable("no C++ compiler was found (looked for $CXX, g++ and c++)")
    path = _cache_dir() / f"kernels-{_key(compiler)}.so"
    if not path.exists():
        _build(compiler, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(f"the built kernels cannot be loaded: {error}") from error


def _cache_dir() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = base / "kvrelay"
    try:
        path.mkdir(parents=True, exist_ok=True)
        if os.access(path, os.W_OK):
            return path
    except OSError:
        pass
    path = Path(tempfile.gettempdir()) / f"kvrelay-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    if path.stat().st_uid != os.getuid():
        raise NativeUnavailable(f"{path} belongs to somebody else; set XDG_CACHE_HOME to a directory of your own")
    return path


def _key(compiler: str) -> str:
    """What the machine code depends on."""
    digest = hashlib.blake2b(digest_size=12)
    for source in sorted(SOURCES.glob("*.[ch]*")):
        digest.update(source.read_bytes())
    for part in (" ".join(FLAGS), _output([compiler, "--version"]), platform.machine(), _cpu_flags()):
        digest.update(part.encode())
    return digest.hexdigest()


def _cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=BUILD_TIMEOUT_S).stdout
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        raise NativeUnavailable(f"{command[0]} failed: {' '.join(detail.split())[:300]}") from error


def _build(compiler: str, path: Path) -> None:
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return
        built = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            _output([compiler, *FLAGS, "-o", str(built), *sorted(map(str, SOURCES.glob("*.cpp")))])
            os.replace(built, path)
        finally:
            built.unlink(missing_ok=True)
