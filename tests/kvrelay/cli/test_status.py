"""What `kvrelay status` says is wrong, in sentences."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
import typer

from kvrelay.cli.cluster import status
from kvrelay.cli.cluster.status import _name, troubles
from kvrelay.cli.console import CliError
from kvrelay.client.messages import status_from
from kvrelay.v1 import cluster_pb2

pytestmark = pytest.mark.unit


def answer(**worker: Any) -> dict[str, Any]:
    of_worker = cluster_pb2.WorkerStatus(name="w", **worker)
    return asdict(status_from(cluster_pb2.GetStatusResponse(router_id="r", workers=[of_worker])))


def test_addresses_of_ipv6_are_shown_whole(capsys: pytest.CaptureFixture[str]) -> None:
    status._show(answer(address="[fd00::2]:4711") | {"endpoint": "[fd00::1]:50051"})
    shown = capsys.readouterr().out
    assert "r at [fd00::1]:50051: " in shown
    assert " [fd00::2]:4711 " in shown


def test_a_healthy_cluster_has_none() -> None:
    assert troubles(answer(state="ready", circuit="closed", leased_pages=3, step_age_s=0.2)) == []


@pytest.mark.parametrize(
    ("worker", "sentence"),
    [
        (
            {"state": "suspect", "reason": "it has said nothing for 2.3 s"},
            "w is suspect: it has said nothing for 2.3 s",
        ),
        ({"circuit": "half_open"}, "w: its circuit is half open; others get its requests"),
        (
            {"pairs": [cluster_pb2.PairStatus(peer="d", failures=2, reason="no route", age_s=7)]},
            "w cannot hand over to d: 2 failed, the last 7 s ago: no route",
        ),
        ({"fenced_pages": 7}, "w: 7 pages are fenced: no lease holds them, a sender may still write them"),
        ({"quarantined_pages": 9}, "w: 9 pages are out of use: a sender that hangs may still write them"),
        ({"step_age_s": 8.0}, "w: its step has been running for 8.0 s"),
        ({"loop_lag_s": 2.0}, "w: its event loop is 2.0 s late"),
    ],
)
def test_each_trouble_is_told_with_its_reason(worker: dict[str, Any], sentence: str) -> None:
    assert troubles(answer(**worker)) == [sentence]


@pytest.mark.parametrize(
    ("limits", "shown"),
    [
        ({}, "decode-0"),
        ({"tensor_parallel": "2", "pipeline_parallel": "1"}, "decode-0 (TP 2)"),
        ({"pipeline_parallel": "3"}, "decode-0 (PP 3)"),
        ({"tensor_parallel": "2", "pipeline_parallel": "2"}, "decode-0 (TP 2 x PP 2)"),
    ],
)
def test_a_worker_of_several_processes_is_shown_with_all_its_degrees(limits: dict[str, str], shown: str) -> None:
    assert _name({"name": "decode-0", "limits": limits}) == shown


@pytest.fixture
def one_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(where: str, _: Any) -> dict[str, Any]:
        if where == "h:1":
            raise CliError("no status from h:1: nothing answers")
        return {"endpoint": where, **answer()}

    monkeypatch.setattr(status, "_ask", ask)
    monkeypatch.setattr(status, "_endpoints", lambda: ["h:1", "h:2"])


def test_a_silent_router_hides_no_other(one_is_silent: None, capsys: pytest.CaptureFixture[str]) -> None:
    entrance: Any = None
    with pytest.raises(CliError, match="no status from h:1: nothing answers"):
        status.status(entrance, None)
    assert "r at h:2" in capsys.readouterr().out
    with pytest.raises(typer.Exit) as ended:
        status.status(entrance, None, as_json=True)
    assert ended.value.exit_code == 1
    silent, other = json.loads(capsys.readouterr().out)["routers"]
    assert silent == {"endpoint": "h:1", "error": "no status from h:1: nothing answers"}
    assert (other["endpoint"], other["router_id"]) == ("h:2", "r")
