"""What a process that computes is given before and after torch is imported: its threads, its cores, its log's format.

Torch-free: libraries read their environment when they are imported, so that is set first.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterable
from pathlib import Path

THREAD_KEYS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
OMP_PAUSE_SOFT = 1  # OpenMP 5.0, omp_pause_resource_t
PR_SET_PDEATHSIG = 1
ORPHAN_EXIT_CODE = 1
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
OUR_PACKAGES = ("engine.",)


def set_environment(threads: int) -> None:
    """For libraries that read it when they are imported, or first used: call before torch is."""
    for key in THREAD_KEYS:
        os.environ[key] = str(threads)
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch asks for huge pages: small steps read weights faster
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # a thread that spins at a barrier takes another's core,
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # but for a moment: sleep and waking are dearer than most waits
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # else a line for each stranger who fails at TLS, past all bounds
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # of streams that do not wait for each other; else 8


def end_team() -> None:
    """Let go the OpenMP threads of the thread that calls: another one computes from now on, with threads of its own.

    libgomp counts those of all, and where they are more than the cores no thread waits for a moment before it sleeps
    (GOMP_SPINCOUNT), though most of them never run again. Nothing where the OpenMP library is another one.
    """
    for path in {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}:
        pause = getattr(ctypes.CDLL(path), "omp_pause_resource_all", None)
        if pause is not None:
            pause(OMP_PAUSE_SOFT)


def end_with_parent(parent: int) -> None:
    """Have the kernel end this process when its parent dies, or end now if that has happened already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(ORPHAN_EXIT_CODE)


def pin_process(cpus: Iterable[int]) -> None:
    """Pin every thread of this process, those of torch's pool among them; new threads inherit it."""
    wanted = set(cpus)
    if not wanted:
        return
    for task in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(task.name), wanted)
        except ProcessLookupError:  # the thread has ended since
            continue


def sentence_of(error: BaseException, our_packages: tuple[str, ...] = OUR_PACKAGES) -> str:
    """What a person is told: the error's own words where they are ours or meant for them, its kind too where not."""
    text = " ".join(str(error).split())
    is_ours = type(error).__module__.startswith(our_packages)
    if text and (is_ours or isinstance(error, ValueError | OSError)):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
