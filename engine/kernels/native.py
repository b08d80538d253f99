"""Builds and loads the C++ kernels of engine/kernels/csrc, once for each machine: source, compiler, CPU name the file.

engine/build_cache.py keeps the library, and lets one build it of several processes that start at once. Where a CPU has
instructions that may be slower than what they replace, the products are built without them, too, and the faster are
measured before all is built: so all workers of a machine compute by the same ones.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch  # before the kernels are loaded: it brings a libgomp of the same name, and both share one pool of threads

from engine.build_cache import NoCacheFolder, built_once, cache_folder

SOURCES = Path(__file__).parent / "csrc"
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-shared", "-fPIC", "-std=c++17")
# AVX512-BF16 multiplies at half the rate of plain AVX-512 on some Intel CPUs, and at twice the rate on AMD's. AMX is
# faster than both.
WITHOUT_BF16 = ("-mno-avx512bf16",)
TRIAL = (32, 768, 1536)  # rows, inputs, outputs of the product that is timed
TRIAL_ROUNDS = 20
FASTER = 0.9  # times as long must take what is to be preferred to the CPU's own instructions
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
    _compile(compiler, _fastest_flags(compiler, target), sorted(SOURCES.glob("*.cpp")), target)


def _compile(compiler: str, flags: Sequence[str], sources: Sequence[Path], target: Path) -> None:
    _output([compiler, *FLAGS, *flags, "-o", str(target), *map(str, sources)])


def _fastest_flags(compiler: str, target: Path) -> Sequence[str]:
    """Beside FLAGS, for this CPU."""
    has = _cpu_flags().split()
    if "avx512_bf16" not in has or "amx_bf16" in has:
        return ()
    runs: list[Callable[[], object]] = []
    for number, flags in enumerate(((), WITHOUT_BF16)):
        trial = target.with_name(f"{target.name}-{number}")  # a library of the same name would be taken for the first
        try:
            _compile(compiler, flags, [SOURCES / "products.cpp"], trial)
            runs.append(_product(ctypes.CDLL(str(trial))))
        finally:
            trial.unlink(missing_ok=True)
    own_s, without_s = _fastest_runs_s(runs)
    return WITHOUT_BF16 if without_s < FASTER * own_s else ()


def _product(library: ctypes.CDLL) -> Callable[[], torch.Tensor]:
    """One of TRIAL's size, of ones, in one thread."""
    rows, inputs, outputs = TRIAL
    sizes = [ctypes.c_int64(size) for size in TRIAL]
    shapes = (rows, inputs), (outputs, inputs), (rows, outputs)
    x, panels, to = (torch.ones(shape, dtype=torch.bfloat16) for shape in shapes)

    def run() -> torch.Tensor:
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, panels, to)]
        library.kvrelay_product(*pointers[:2], None, None, pointers[2], *sizes, ctypes.c_int32(1))
        return to

    return run


def _fastest_runs_s(runs: Sequence[Callable[[], object]]) -> list[float]:
    """Of each, in turns, so that other work hits all alike."""
    best = [float("inf")] * len(runs)
    for _ in range(TRIAL_ROUNDS):
        for index, run in enumerate(runs):
            began_s = time.perf_counter()
            run()
            best[index] = min(best[index], time.perf_counter() - began_s)
    return best
