"""How many more processes and threads may be started, by the least of all limits."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from engine.limits.process_room import ProcessRoom, process_room
from tests.engine.limits.test_cgroups import tree

pytestmark = pytest.mark.unit

USER = 1234


@pytest.fixture(autouse=True)
def limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """After pytest has made its folder, whose owner it looks at."""
    monkeypatch.setattr(os, "getuid", lambda: USER)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return monkeypatch


def test_the_fullest_group_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/pod/worker",
        "cg/pod/pids.max": 100,
        "cg/pod/pids.current": 60,
        "cg/pod/worker/pids.max": "max",
        "cg/pod/worker/pids.current": 50,
    }
    where = f"60 run, and pids.max of the cgroup {tmp_path}/cg/pod is 100"
    assert process_room(*tree(tmp_path, files)) == ProcessRoom(40, where)


def test_a_users_threads_are_counted_over_all_its_processes(tmp_path: Path, limit: pytest.MonkeyPatch) -> None:
    files: dict[str, object] = {
        "proc/7/status": f"Name:\tray\nUid:\t{USER}\t0\t0\t0\nThreads:\t30",
        "proc/8/status": f"Name:\tup\nUid:\t{USER}\t{USER}\t{USER}\t{USER}\nThreads:\t20",
        "proc/9/status": f"Name:\tother\nUid:\t0\t{USER}\t0\t0\nThreads:\t40",
    }
    roots = tree(tmp_path, files)
    limit.setattr(resource, "getrlimit", lambda _: (64, 128))
    assert str(process_room(*roots)) == (
        "14 more processes and threads may be started (50 run of this user, and `ulimit -u` is 64)"
    )
    limit.setattr(os, "getuid", int)
    assert process_room(*roots) is None, "root may start any number"


def test_without_a_limit_there_is_none(tmp_path: Path) -> None:
    assert process_room(*tree(tmp_path, {"proc/self/cgroup": "0::/", "cg/pids.current": 5})) is None
