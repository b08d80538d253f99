"""A Runner does jobs that know nothing of each other: in this process, or in processes of the compiled simulator.

    with open_runner(processes, on_progress) as runner:
        results = runner.map(find_goodput, searches, "pairs within nodes")

Whoever simulates much goes through it: the goodput search, the planner, provisioning. A job is a picklable value and
carries its own seed, so the results are the same in any number of processes. It decides nothing, and starts no process
before there is a job for one. `used_cpu_s` is how a job says what it cost, whichever process did it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from typing import Protocol, TypeVar

from placement.compiled.pool import call, packed, simulation_pool

Job = TypeVar("Job")
Result = TypeVar("Result")
Progress = Callable[[str, int, int], None]
"""Told what is being done, how many jobs of it are done, and how many there are."""


class Runner(Protocol):
    def map(self, work: Callable[[Job], Result], jobs: Sequence[Job], what: str) -> list[Result]:
        """work(job) of each job, in their order. `work` is a function of a module, `what` names the jobs for the
        progress. Raises what a job raised."""


@contextmanager
def open_runner(processes: int | None, on_progress: Progress | None = None) -> Iterator[Runner]:
    """`processes` None: as many as there are cores; 0: this process alone, from the sources."""
    say = on_progress or _silent
    if processes == 0:
        yield _ThisProcess(say)
        return
    with ExitStack() as stack:
        yield _ProcessPool(processes or len(os.sched_getaffinity(0)), stack, say)


def used_cpu_s() -> float:
    """CPU seconds that this process has used so far."""
    used = os.times()
    return used.user + used.system


class _ThisProcess:
    def __init__(self, say: Progress) -> None:
        self._say = say

    def map(self, work: Callable[[Job], Result], jobs: Sequence[Job], what: str) -> list[Result]:
        results = []
        for done, job in enumerate(jobs):
            self._say(what, done, len(jobs))
            results.append(work(job))
        self._say(what, len(jobs), len(jobs))
        return results


class _ProcessPool:
    """Started with the first jobs for it: what is refused before costs no process. It ends with `stack`."""

    def __init__(self, processes: int, stack: ExitStack, say: Progress) -> None:
        self._processes = processes
        self._stack = stack
        self._pool: Executor | None = None
        self._say = say

    def map(self, work: Callable[[Job], Result], jobs: Sequence[Job], what: str) -> list[Result]:
        if self._pool is None:
            self._say("starting the simulator", 0, 1)
            self._pool = self._stack.enter_context(simulation_pool(self._processes))
        self._say(what, 0, len(jobs))
        results = []
        for result in self._pool.map(call, [packed(work, job) for job in jobs]):
            results.append(result)
            self._say(what, len(results), len(jobs))
        return results


def _silent(what: str, done: int, total: int) -> None:
    return None
