"""A container's limits are seen where `nproc` and /proc/meminfo show the whole machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.limits.cgroups import core_limit, memory_limit_bytes

pytestmark = pytest.mark.unit

GIB = 1 << 30


def tree(root: Path, files: dict[str, object]) -> tuple[Path, Path]:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root / "proc", root / "cg"


def test_the_least_limit_of_all_groups_above_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/pod/worker",
        "cg/pod/memory.max": 4 * GIB,
        "cg/pod/cpu.max": "150000 100000",
        "cg/pod/worker/memory.max": "max",
        "cg/pod/worker/cpu.max": "max 100000",
    }
    assert (memory_limit_bytes(*tree(tmp_path, files)), core_limit(*tree(tmp_path, files))) == (4 * GIB, 1.5)


def test_version_1_has_them_in_two_hierarchies(tmp_path: Path) -> None:
    """Inside of a container that is not told its own path: the group is the hierarchy's root there."""
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/docker/12\n4:memory:/docker/12\n0::/",
        "cg/memory/memory.limit_in_bytes": 3 * GIB,
        "cg/cpu,cpuacct/cpu.cfs_quota_us": 400000,
        "cg/cpu,cpuacct/cpu.cfs_period_us": 100000,
    }
    assert (memory_limit_bytes(*tree(tmp_path, files)), core_limit(*tree(tmp_path, files))) == (3 * GIB, 4.0)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": "0::/", "cg/memory.max": "max", "cg/cpu.max": "max 100000"},
        {"proc/self/cgroup": "1:cpu:/", "cg/cpu/cpu.cfs_quota_us": -1, "cg/cpu/cpu.cfs_period_us": 100000},
    ],
)
def test_without_a_limit_there_is_none(tmp_path: Path, files: dict[str, object]) -> None:
    assert (memory_limit_bytes(*tree(tmp_path, files)), core_limit(*tree(tmp_path, files))) == (None, None)
