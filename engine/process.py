"""What a process that computes is given before and after torch is imported: its threads, its cores, its log's format.

Torch-free: libraries read their thread counts when they are imported, so these are set first.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

THREAD_KEYS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
OUR_PACKAGES = ("engine.",)


def set_thread_counts(threads: int) -> None:
    """For libraries that read their thread count when they are imported: call before torch is."""
    for key in THREAD_KEYS:
        os.environ[key] = str(threads)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # a thread that spins at a barrier takes another's core
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


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
