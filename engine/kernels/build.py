"""Builds the C++ kernels of engine/kernels/csrc, once for each machine: source, compiler, CPU name the file.

    python -m engine.kernels.build

engine/build_cache.py keeps the library, and lets one build it of several processes that start at once. Where a CPU has
instructions that may be slower than what they replace, the products are built without them, too, and the faster are
measured before all is linked: so all workers of a machine compute by the same ones. Torch-free: the first start has it
done while torch is imported.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import mmap
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

from engine.build_cache import NoCacheFolder, built_once, cache_folder

SOURCES = Path(__file__).parent / "csrc"
PRODUCTS = SOURCES / "products.cpp"
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-fPIC", "-std=c++17")
# AVX512-BF16 multiplies at half the rate of plain AVX-512 on some Intel CPUs, and at twice the rate on AMD's. AMX is
# faster than both.
WITHOUT_BF16 = ("-mno-avx512bf16",)
TRIAL = (32, 768, 1536)  # rows, inputs, outputs of the product that is timed
TRIAL_ROUNDS = 20
FASTER = 0.9  # times as long must take what is to be preferred to the CPU's own instructions
ONE = b"\x80\x3f"  # in bfloat16
BUILD_TIMEOUT_S = 300.0

Compiler = Sequence[str]  # a command, and its own first arguments


class NativeUnavailable(Exception):
    """The kernels cannot be built or loaded here: one sentence that says why."""


def built() -> Path:
    """The library, made now if need be. Raises NativeUnavailable."""
    compiler = _compiler()
    try:
        return built_once(_path(compiler), functools.partial(_build, compiler))
    except (NoCacheFolder, OSError) as error:
        raise NativeUnavailable(f"there is no place for the built kernels: {error}") from error


def is_missing() -> bool:
    """Whether there is something to build, as far as one can say."""
    try:
        return not _path(_compiler()).exists()
    except (NativeUnavailable, NoCacheFolder, OSError):
        return False


def _compiler() -> Compiler:
    """As in $CXX, which may have arguments: `ccache g++`."""
    if given := os.environ.get("CXX", "").split():
        return given
    found = shutil.which("g++") or shutil.which("c++")
    if found is None:
        raise NativeUnavailable("no C++ compiler was found (looked for $CXX, g++ and c++)")
    return [found]


def _path(compiler: Compiler) -> Path:
    return cache_folder() / f"kernels-{_key(compiler)}.so"


def _key(compiler: Compiler) -> str:
    """What the machine code depends on."""
    digest = hashlib.blake2b(digest_size=12)
    for source in sorted(SOURCES.glob("*.[ch]*")):
        digest.update(source.read_bytes())
    for part in (" ".join([*compiler[1:], *FLAGS]), _output([*compiler, "--version"]), platform.machine(), cpu_flags()):
        digest.update(part.encode())
    return digest.hexdigest()


def cpu_flags() -> str:
    """What the CPU can do, in Linux's words; empty where it does not say."""
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


class Builder:
    """Compiles each source once with the same flags beside FLAGS, and as many at a time as the pool has threads."""

    def __init__(self, compiler: Compiler, folder: Path, pool: Executor) -> None:
        self.folder = folder
        self._compiler = compiler
        self._pool = pool
        self._objects: dict[tuple[tuple[str, ...], Path], Future[str]] = {}

    def begin(self, flags: Sequence[str], sources: Sequence[Path]) -> list[Future[str]]:
        return [self._object(tuple(flags), source) for source in sources]

    def link(self, flags: Sequence[str], sources: Sequence[Path], target: Path) -> None:
        objects = [each.result() for each in self.begin(flags, sources)]
        _output([*self._compiler, "-shared", "-fopenmp", "-o", str(target), *objects])

    def _object(self, flags: tuple[str, ...], source: Path) -> Future[str]:
        if (flags, source) not in self._objects:
            target = str(self.folder / f"{len(self._objects)}.o")
            self._objects[flags, source] = self._pool.submit(self._compile, flags, source, target)
        return self._objects[flags, source]

    def _compile(self, flags: tuple[str, ...], source: Path, target: str) -> str:
        _output([*self._compiler, *FLAGS, *flags, "-c", "-o", target, str(source)])
        return target


@contextmanager
def building(compiler: Compiler, within: Path) -> Iterator[Builder]:
    """`within`: a folder that libraries can be loaded from, which that of temporary files may not be."""
    with tempfile.TemporaryDirectory(dir=within) as folder, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        yield Builder(compiler, Path(folder), pool)


def _build(compiler: Compiler, target: Path) -> None:
    sources = sorted(SOURCES.glob("*.cpp"), key=lambda source: -source.stat().st_size)  # the longest first
    with building(compiler, target.parent) as builder:
        begun = builder.begin((), sources)  # most CPUs are served by these
        builder.link(_fastest_flags(builder, begun), sources, target)


def _fastest_flags(builder: Builder, begun: Sequence[Future[str]]) -> Sequence[str]:
    """Beside FLAGS, for this CPU; measured when what was `begun` is there, and nothing is compiled beside it."""
    has = cpu_flags().split()
    if "avx512_bf16" not in has or "amx_bf16" in has:
        return ()
    wait([*begun, *builder.begin(WITHOUT_BF16, [PRODUCTS])])
    runs: list[Callable[[], object]] = []
    for number, flags in enumerate(((), WITHOUT_BF16)):
        trial = builder.folder / f"trial-{number}.so"  # a library of the same name would be taken for the first
        builder.link(flags, [PRODUCTS], trial)
        runs.append(_product(ctypes.CDLL(str(trial))))
    own_s, without_s = _fastest_runs_s(runs)
    return WITHOUT_BF16 if without_s < FASTER * own_s else ()


def _product(library: ctypes.CDLL) -> Callable[[], bytes]:
    """One of TRIAL's size, of ones, in one thread; gives the bytes of what it has made, which is bfloat16."""
    rows, inputs, outputs = TRIAL
    sizes = [ctypes.c_int64(size) for size in TRIAL]
    memory = [mmap.mmap(-1, len(ONE) * size) for size in (rows * inputs, inputs * outputs, rows * outputs)]  # aligned
    for each in memory:
        each[:] = ONE * (len(each) // len(ONE))
    x, panels, to = (ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(each))) for each in memory)

    def run() -> bytes:
        library.kvrelay_product(x, panels, None, None, to, *sizes, ctypes.c_int32(1))
        return memory[2][:]

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


if __name__ == "__main__":
    built()
