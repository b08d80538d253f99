"""What is said to the threads of libraries before and after a model is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.process import set_environment

TEAMS = """
import threading
import time
from pathlib import Path
from engine.process import end_team, set_environment

set_environment(2)
import torch

def compute():
    torch.ones(4_000_000).add_(1)

def threads():
    return len(list(Path("/proc/self/task").iterdir()))

def wait_for(wanted):  # the system takes a thread off its list some time after it was joined
    deadline = time.monotonic() + 20
    while threads() != wanted:
        assert time.monotonic() < deadline, f"{threads()} threads for {wanted}"
        time.sleep(0.01)

before = threads()
compute()
wait_for(before + 1)  # a team of two
end_team()
wait_for(before)
other = threading.Thread(target=compute)
other.start()
other.join()
compute()
wait_for(before + 1)  # it comes again where it is wanted
"""


def test_the_team_of_who_has_loaded_is_let_go() -> None:
    done = subprocess.run([sys.executable, "-c", TEAMS], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-500:]


def test_what_the_environment_says_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"GOMP_SPINCOUNT": "7"})
    set_environment(3)
    assert (os.environ["GOMP_SPINCOUNT"], os.environ["OMP_NUM_THREADS"]) == ("7", "3")
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32", "the most that CUDA takes"


def test_large_tensors_lie_in_huge_pages() -> None:
    """Where the kernel gives them to who asks."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[madvise]" not in setting.read_text():
        pytest.skip("this kernel gives huge pages to all, or to nobody")
    program = """
from pathlib import Path
from engine.process import set_environment
set_environment(1)
import torch
weights = torch.ones(16 << 20)
print(next(line for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if "AnonHugePages" in line))
"""
    told = {key: value for key, value in os.environ.items() if key != "THP_MEM_ALLOC_ENABLE"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=told)
    assert done.returncode == 0, done.stderr[-500:]
    assert int(done.stdout.split()[1]) > 0
