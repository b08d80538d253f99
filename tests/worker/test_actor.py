"""What a worker's process does before its engine loads."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

import pytest

from engine.engine import Engine
from engine.options import EngineOptions
from worker import actor
from worker.membership import Greeting, Membership
from worker.options import worker_options
from worker.wire.secrets import Secrets


class Loads(Exception):
    """The engine is about to load."""


@pytest.mark.parametrize(
    ("degrees", "is_told"),
    [({}, False), ({"tensor_parallel": 2}, True), ({"pipeline_parallel": 2}, True)],
    ids=["alone", "ranks", "stages"],
)
def test_nccl_is_told_its_settings_before_a_load_that_meets_by_it(
    degrees: dict[str, int], is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads them once, when the processes of a worker meet."""
    builds: list[Any] = []
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(actor, "set_environment", lambda threads: None)
    monkeypatch.setattr(actor.MemberActor, "__init__", lambda self, name, host, membership, build: builds.append(build))

    def load(options: EngineOptions, progress: object) -> None:
        assert options.num_processes == max(degrees.values(), default=1)
        raise Loads

    monkeypatch.setattr(Engine, "load", load)
    engine = asdict(EngineOptions(model="m", device="cuda", **degrees))  # type: ignore[arg-type]
    options = worker_options("decode-0", "decode", nccl={"NCCL_SOCKET_IFNAME": "eth7"})
    actor.WorkerActor(options, engine, (), True, Membership(controller="c", liveness_timeout_s=1.0))
    with pytest.raises(Loads):
        builds[0]("incarnation", lambda stage, fraction: None, Greeting(secrets=Secrets(cluster="s")))
    assert os.environ.get("NCCL_SOCKET_IFNAME") == ("eth7" if is_told else None)
