"""A pool of processes that run the simulator compiled: the same sources, the same outcome, several times as fast.

    with simulation_pool(2) as pool:
        outcomes = pool.map(call, [packed(simulate, cluster, workload), ...])

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
from contextlib import contextmanager
from dataclasses import fields
from importlib import import_module
from multiprocessing import resource_tracker
from multiprocessing.pool import Pool
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
def simulation_pool(processes: int, *, cache: Path | None = None) -> Iterator[Pool]:
    """Fresh processes that import the compiled modules, or the sources where there are none."""
    folder = compiled_folder(cache)
    for module, name in PASSED_TO_PROCESSES:
        copyreg.pickle(getattr(import_module(module), name), _taken_apart)
    context = multiprocessing.get_context("spawn")  # a spawned process takes over sys.path
    before = list(sys.path)
    if folder is not None:
        sys.path[:0] = [str(folder), str(ROOT)]  # what is not compiled is found beside the sources
    resource_tracker.ensure_running()  # it would have the signal again
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C is for whoever ends the pool
    try:
        pool = context.Pool(processes, _collect_seldom)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        sys.path[:] = before
    with pool:
        yield pool


def packed(work: Callable[..., Any], *arguments: Any) -> bytes:
    """A task for `call`. A pool's process that cannot read a task dies of it, and the pool waits without end; one that
    reads it inside its work tells what went wrong."""
    return pickle.dumps((work, arguments))


def call(task: bytes) -> Any:
    work, arguments = pickle.loads(task)
    return work(*arguments)


def _collect_seldom() -> None:
    """A simulation frees what it drops by itself; looking for cycles among a million live objects is for nothing."""
    gc.set_threshold(200_000, 20, 50)


def _taken_apart(value: Any) -> tuple[Any, ...]:
    kind = type(value)
    return _put_together, (kind.__module__, kind.__name__, {f.name: getattr(value, f.name) for f in fields(value)})


def _put_together(module: str, name: str, values: dict[str, Any]) -> Any:
    return getattr(import_module(module), name)(**values)
