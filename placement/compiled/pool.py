"""A pool of processes that run the simulator compiled: the same sources, the same outcome, several times as fast.

    with simulation_pool(2) as pool:
        outcomes = pool.map(call, [packed(simulate, cluster, workload), ...])

A process that is ended from outside (by a signal to all of a job's processes, or for the memory it takes) breaks the
pool: what waits for an outcome is told. multiprocessing's own pool would wait without end, and could not be left.

Where the modules cannot be compiled (placement/compiled/build.py) the pool runs the sources as they are. A process must
not mix both kinds, so the one that makes the pool keeps what it has imported.
"""

from __future__ import annotations

import copyreg
import gc
import multiprocessing
import pickle
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import fields
from importlib import import_module
from multiprocessing import resource_tracker
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from placement.compiled.build import ROOT, compiled_folder
from placement.papers import registry

PASSED_TO_PROCESSES = (  # compiled dataclasses that are arguments; pickle cannot restore them by itself
    ("cluster.router.options", "RouterOptions"),
    ("placement.latency.base", "DecodeLine"),
    ("placement.latency.roofline", "RooflineLatency"),
    ("placement.latency.scaled", "ScaledLatency"),
    *registry.PASSED_TO_PROCESSES,
)


@contextmanager
def simulation_pool(processes: int, *, cache: Path | None = None) -> Iterator[Executor]:
    """Fresh processes that import the compiled modules, or the sources where there are none. They end with it, whatever
    they do."""
    folder = compiled_folder(cache)
    for module, name in PASSED_TO_PROCESSES:
        copyreg.pickle(getattr(import_module(module), name), _taken_apart)
    context = multiprocessing.get_context("spawn")  # a spawned process takes over sys.path
    resource_tracker.ensure_running()  # it would have Ctrl-C again
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(processes, context, _begin, (context.Barrier(processes),))
    try:
        _start(pool, processes, folder)
        yield pool
    finally:
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
        pool.shutdown(cancel_futures=True)


def _start(pool: Executor, processes: int, folder: Path | None) -> None:
    before = list(sys.path)
    if folder is not None:
        sys.path[:0] = [str(folder), str(ROOT)]  # what is not compiled is found beside the sources
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C is for whoever ends the pool
    try:
        for _ in range(processes):  # each starts one, as none that is there begins before all are
            pool.submit(_nothing)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        sys.path[:] = before


def packed(work: Callable[..., Any], *arguments: Any) -> bytes:
    """A task for `call`. A pool's process that cannot read a task dies of it, and breaks the pool; one that reads it
    inside its work tells what went wrong."""
    return pickle.dumps((work, arguments))


def call(task: bytes) -> Any:
    work, arguments = pickle.loads(task)
    return work(*arguments)


def _begin(all_started: Barrier) -> None:
    """A simulation frees what it drops by itself; looking for cycles among a million live objects is for nothing."""
    gc.set_threshold(200_000, 20, 50)
    all_started.wait()


def _nothing() -> None:
    pass


def _taken_apart(value: Any) -> tuple[Any, ...]:
    kind = type(value)
    return _put_together, (kind.__module__, kind.__name__, {f.name: getattr(value, f.name) for f in fields(value)})


def _put_together(module: str, name: str, values: dict[str, Any]) -> Any:
    return getattr(import_module(module), name)(**values)
