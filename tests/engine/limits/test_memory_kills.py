"""A process that the kernel killed for lack of memory says nothing; the kernel's counts do."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.limits.memory_kills import MemoryKills
from tests.engine.limits.test_cgroups import GIB, tree

pytestmark = pytest.mark.unit


def vmstat(kills: int) -> dict[str, object]:
    return {"proc/vmstat": f"nr_free_pages 12\noom_kill {kills}"}


@pytest.mark.parametrize(
    ("group", "limit", "counts"),
    [("0::/pod", "cg/pod/memory.max", "cg/pod/memory.events"), ("4:memory:/", "cg/memory/memory.limit_in_bytes", "")],
)
def test_a_cgroups_kills_are_told_once_with_its_limit(tmp_path: Path, group: str, limit: str, counts: str) -> None:
    counts = counts or "cg/memory/memory.oom_control"
    roots = tree(tmp_path, {"proc/self/cgroup": group, limit: GIB // 2, counts: "oom 9\noom_kill 7"} | vmstat(7))
    kills = MemoryKills(*roots)
    assert kills.news() == ""
    tree(tmp_path, {counts: "oom 11\noom_kill 9"} | vmstat(9))
    assert kills.news() == (
        "the kernel has killed 2 processes here for lack of memory (its cgroup may have 0.5 GiB); give more memory, a "
        "smaller kv_memory or fewer workers"
    )
    assert kills.news() == ""


def test_the_machines_kills_are_told_where_no_cgroup_has_any(tmp_path: Path) -> None:
    kills = MemoryKills(*tree(tmp_path, vmstat(0)))
    tree(tmp_path, vmstat(1))
    assert kills.news().startswith("the kernel has killed 1 process here for lack of memory; give")


def test_where_the_kernel_counts_none_there_are_none(tmp_path: Path) -> None:
    assert MemoryKills(*tree(tmp_path, {"proc/self/cgroup": "0::/"})).news() == ""
