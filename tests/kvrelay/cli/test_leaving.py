"""What `kvrelay drain` and `kvrelay role` wait for, and what ends the wait."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvrelay.cli.cluster import leaving
from kvrelay.cli.console import CliError
from kvrelay.client.messages import status_from
from kvrelay.client.types import WorkerState
from kvrelay.v1 import cluster_pb2

pytestmark = pytest.mark.unit


def standing(state: str, role: str = "decode", running: int = 1, age_s: float = 0.1) -> Any:
    worker = cluster_pb2.WorkerStatus(name="decode-0", role=role, state=state, num_running=running, report_age_s=age_s)
    return status_from(cluster_pb2.GetStatusResponse(workers=[worker]))


NOBODY = status_from(cluster_pb2.GetStatusResponse())


def wait(
    monkeypatch: pytest.MonkeyPatch, *states: Any, may_end: bool = False, role: str = "decode", timeout_s: float = 5.0
) -> int:
    """The worker stands like these one after another, and like the last of them on and on."""
    script = list(states)
    monkeypatch.setattr(leaving, "POLL_S", 0.0)
    client: Any = SimpleNamespace(status=lambda: script.pop(0) if len(script) > 1 else script[0])

    def is_done(each: WorkerState) -> bool:
        return (each.role, each.state) == ((role, "ready") if role != "decode" else (role, "drained")) and not may_end

    return leaving.wait_until(client, "decode-0", is_done, timeout_s, show=False, may_end=may_end)[0]


@pytest.mark.parametrize(("role", "may_end"), [("decode", False), ("decode", True), ("prefill", False)])
def test_one_that_is_taken_back_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, role: str, may_end: bool) -> None:
    with pytest.raises(CliError, match=r"^decode-0 was taken back: it takes requests again$"):
        wait(monkeypatch, standing("ready"), standing("draining"), standing("ready"), role=role, may_end=may_end)


def test_nor_is_one_that_was_told_to_take_another_role(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CliError, match=r"^decode-0 was told to take another role since: it is a mixed worker$"):
        wait(monkeypatch, standing("ready"), standing("draining"), standing("ready", "mixed"), role="prefill")


def test_one_that_has_not_begun_to_leave_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its router knows by its next report, and knows nothing after it was started again."""
    unheard = standing("ready", age_s=0.0)
    assert wait(monkeypatch, standing("ready"), standing("draining"), unheard, standing("drained", running=0)) == 0
    assert wait(monkeypatch, standing("ready"), standing("draining"), standing("ready", "prefill"), role="prefill") == 0
    assert wait(monkeypatch, standing("ready"), standing("drained"), standing("lost"), NOBODY, may_end=True) == 0


def test_when_the_time_is_over_no_requests_are_told_of_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CliError, match=r"^decode-0 still has 3 requests after 0\.01 s; decode-0 goes on draining;"):
        wait(monkeypatch, standing("draining", running=3), timeout_s=0.01)
    with pytest.raises(CliError, match=r"^decode-0 is left by all, and no further after 0\.01 s; decode-0 goes on"):
        wait(monkeypatch, standing("drained", running=0), role="prefill", timeout_s=0.01)
