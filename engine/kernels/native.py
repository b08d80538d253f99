"""Builds and loads the C++ kernels of engine/kernels/csrc, once for each machine: source, compiler, CPU name the file.

engine/build_cache.py keeps the library, and lets one build it of several processes that start at once.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
from pathlib import Path

import torch  # before the kernels are loaded: it brings a libgomp of the same name, and both share one pool of threads

from engine.build_cache import NoCacheFolder, built_once, cache_folder

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
    try:
        path = built_once(cache_folder() / f"kernels-{_key(compiler)}.so", functools.partial(_build, compiler))
    except (NoCacheFolder, OSError) as error:
        raise NativeUnavailable(f"there is no place for the built kernels: {error}") from error
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(f"the built kernels cannot be loaded: {error}") from error


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


def _build(compiler: str, target: Path) -> None:
    _output([compiler, *FLAGS, "-o", str(target), *sorted(map(str, SOURCES.glob("*.cpp")))])
