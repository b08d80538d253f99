"""What the demo claims about processes that stay, it can see."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvrelay import demo

CHILD = "import sys, subprocess; subprocess.Popen([sys.executable, '-c', 'input()'], start_new_session=True).wait()"


def test_a_process_that_stays_is_seen_at_any_remove() -> None:
    env = os.environ | {demo.MARK: "mine"}
    parent = subprocess.Popen([sys.executable, "-c", CHILD], env=env, stdin=subprocess.PIPE)
    try:
        while len(left := demo.marked("mine")) < 2:
            assert parent.poll() is None
        assert {process.pid for process in left} > {parent.pid}
        assert demo.marked("another") == []
        with pytest.raises(demo.DemoFailed, match="2 processes were left behind"):
            demo.check_nothing_left("mine")
    finally:
        parent.communicate(b"\n")
    demo.check_nothing_left("mine")


def test_a_cluster_that_does_not_stop_is_killed_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"
    process = subprocess.Popen(
        [sys.executable, "-c", stubborn], env=os.environ | {demo.MARK: "stubborn"}, stdout=subprocess.PIPE, text=True
    )
    assert demo.endpoint_of(process) == "up"
    monkeypatch.setattr(demo, "STOP_TIMEOUT_S", 0.2)
    with pytest.raises(demo.DemoFailed, match="did not stop"):
        demo.stop(process, "stubborn")
    assert process.returncode is not None


def test_a_cluster_that_dies_before_it_is_ready_is_told() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE, text=True)
    with pytest.raises(demo.DemoFailed, match="not ready"):
        demo.endpoint_of(process)
    process.wait()
