"""KV pages that do not fit are refused at the start, in a sentence, and not by the kernel under load."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from engine.pages import host_memory
from engine.pages.host_memory import FreeMemory, HostFile, free_memory

pytestmark = pytest.mark.unit

GIB = 1 << 30


def tree(root: Path, files: dict[str, object]) -> tuple[Path, Path]:
    files = {"proc/meminfo": "MemTotal:  33554432 kB\nMemAvailable:  16777216 kB", **files}
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))
    return root / "proc", root / "cg"


def test_without_a_limit_the_machine_counts(tmp_path: Path) -> None:
    paths = tree(tmp_path, {"proc/self/cgroup": "0::/a", "cg/a/memory.max": "max", "cg/a/memory.current": 5})
    assert free_memory(*paths) == FreeMemory(16 * GIB, "on this machine")


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_limit_of_all_groups_above_counts(tmp_path: Path, version: int) -> None:
    limit, usage, cached = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }[version]
    root = {1: "cg/memory", 2: "cg"}[version]
    files = {
        "proc/self/cgroup": {1: "5:cpu:/x\n4:memory:/pod/worker", 2: "0::/pod/worker"}[version],
        f"{root}/pod/{limit}": 4 * GIB,
        f"{root}/pod/{usage}": 3 * GIB,
        f"{root}/pod/memory.stat": f"anon 1\n{cached} {GIB}",
        f"{root}/pod/worker/{limit}": 9 * GIB,
        f"{root}/pod/worker/{usage}": GIB,
        f"{root}/pod/worker/memory.stat": f"{cached} 0",
    }
    free = free_memory(*tree(tmp_path, files))
    assert free == FreeMemory(2 * GIB, f"under the limit of the cgroup {tmp_path}/{root}/pod")


def test_a_group_that_cannot_be_seen_is_no_limit(tmp_path: Path) -> None:
    assert free_memory(*tree(tmp_path, {"proc/self/cgroup": "0::/../of/another/namespace"})).num_bytes == 16 * GIB


def taken_bytes(file: HostFile) -> int:
    return os.fstat(file.fd).st_blocks * 512


def test_a_small_file_has_its_memory_from_the_start() -> None:
    file = HostFile(1 << 20)
    assert (os.fstat(file.fd).st_size, taken_bytes(file) >= 1 << 20) == (1 << 20, True)
    file.close()


def test_a_large_one_has_some_at_once_and_the_rest_without_being_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "AT_ONCE_BYTES", 1 << 20)
    monkeypatch.setattr(host_memory, "PIECE_BYTES", 1 << 20)
    file = HostFile(7 << 19)
    assert os.fstat(file.fd).st_size == 7 << 19
    assert taken_bytes(file) >= 1 << 20
    file.wait()
    assert taken_bytes(file) == 7 << 19
    file.close()
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(file.fd)


def test_what_somebody_else_took_meanwhile_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    took = os.posix_fallocate

    def taken_by_another(fd: int, start: int, num_bytes: int) -> None:
        if start:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        took(fd, start, num_bytes)

    monkeypatch.setattr(host_memory, "AT_ONCE_BYTES", 1 << 20)
    monkeypatch.setattr("os.posix_fallocate", taken_by_another)
    file = HostFile(2 << 20)
    file.wait()
    file.close()
    assert "kv_memory is 2097152 bytes" in caplog.text
    assert "give a smaller kv_memory" in caplog.text


def test_what_is_not_free_is_refused_by_name_with_what_is() -> None:
    with pytest.raises(
        ValueError, match=r"kv_memory is 1125899906842624 bytes \(1048576\.0 GiB.*\), but \d+\.\d GiB are free"
    ):
        HostFile(1 << 50)


def test_a_limit_on_files_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (1 << 20, 1 << 30))
    with pytest.raises(ValueError, match=r"GiB are free in one file under this process' limit \(`ulimit -f`\); give a"):
        HostFile(2 << 20)
    HostFile(1 << 20).close()
