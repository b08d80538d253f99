"""What a Deployment does when Ray, or the controller, does not answer any more. Ray itself is a fake."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import Future
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from cluster.deploy import deployment as deployments
from cluster.deploy.deployment import Deployment, why_crowded
from cluster.deploy.ray import DeployError
from cluster.deploy.roster import Version
from cluster.spec.load import parse_spec
from cluster.spec.resolve import Machine
from engine.limits.process_room import ProcessRoom
from worker.wire.secrets import Secrets

pytestmark = pytest.mark.unit

LOST = "Ray's gcs_server ended, and nobody is left who restarts what fails"


class ActorDiedError(Exception):
    pass


class LocalRay:
    """A Ray of our own, whose GCS is gone or not."""

    def __init__(self, why_lost: str = "") -> None:
        self.why = why_lost
        self.stopped: list[bool] = []

    def remember(self) -> None: ...

    def why_lost(self) -> str:
        return self.why

    def stop(self, *, is_answering: bool, keep_logs_in: str, keep_signals: object) -> bool:
        self.stopped.append(is_answering)
        return is_answering


class Controller:
    """`wait_change` ends as told, or never."""

    def __init__(self, *ends: object) -> None:
        self._ends = list(ends)
        self.wait_change = SimpleNamespace(remote=self._wait_change)

    def _wait_change(self, *_: object) -> Any:
        answer: Future[dict[str, Any]] = Future()
        end = self._ends.pop(0) if self._ends else None
        if isinstance(end, Exception):
            answer.set_exception(end)
        elif end is not None:
            answer.set_result(cast(dict[str, Any], end))
        return SimpleNamespace(future=lambda: answer)


@pytest.fixture(autouse=True)
def ray(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = ModuleType("ray.exceptions")
    errors.ActorDiedError, errors.ActorUnavailableError = ActorDiedError, ConnectionError  # type: ignore[attr-defined]
    fake = ModuleType("ray")
    fake.is_initialized = lambda: True  # type: ignore[attr-defined]
    fake.util = SimpleNamespace(list_named_actors=list)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setitem(sys.modules, "ray.exceptions", errors)
    monkeypatch.setattr(deployments, "why_full", str)


def snapshot(change: int, *, is_ready: bool) -> dict[str, Any]:
    version = Version()._replace(change=change)
    return {"version": version, "spec_number": 0, "wants_secrets": False, "is_ready": is_ready}


def deployment(local: LocalRay, controller: Controller) -> Deployment:
    spec: Any = SimpleNamespace(router=SimpleNamespace(drain_s=5.0))
    made = Deployment(spec, address=None, secrets=Secrets(cluster=""), log_dir="")
    made._local, made._controller = local, controller  # type: ignore[assignment]
    return made


def test_actors_are_not_waited_for_once_rays_own_processes_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    local = LocalRay()
    hangs = threading.Event()

    def end_actors(*_: object) -> None:
        local.why = LOST  # as when a signal goes to all processes of a service
        hangs.wait(20.0)

    monkeypatch.setattr(deployments, "end_actors", end_actors)
    began_s = time.monotonic()
    deployment(local, Controller()).stop()
    hangs.set()
    assert time.monotonic() - began_s < 5.0
    assert local.stopped == [False]  # nobody is asked any more, all are killed


def test_actors_that_cannot_be_ended_are_killed_with_their_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def end_actors(*_: object) -> None:
        raise ValueError("the handle is of another job")

    monkeypatch.setattr(deployments, "end_actors", end_actors)
    local = LocalRay()
    assert not deployment(local, Controller()).stop()
    assert local.stopped == [False]


@pytest.mark.parametrize(("version", "waits_s"), [(Version(), 5.0), (Version(epoch=1), 305.0)])
def test_a_controller_that_never_answered_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, version: Version, waits_s: float
) -> None:
    """None has a request by then that may end."""
    waited: list[float] = []
    monkeypatch.setattr(deployments, "end_actors", lambda _, timeout_s: waited.append(timeout_s))
    stopping = deployment(LocalRay(), Controller())
    stopping._version = version
    assert stopping.stop()
    assert waited == [waits_s]


def test_a_controller_that_died_with_its_ray_is_not_waited_for() -> None:
    with pytest.raises(DeployError, match="gcs_server ended"):
        deployment(LocalRay(LOST), Controller(ConnectionError())).next_snapshot()


def test_a_controller_that_never_answers_is_waited_for_within_the_time_of_a_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deployments, "ANSWER_TIMEOUT_S", 0.05)
    with pytest.raises(DeployError, match="the controller does not answer") as told:
        deployment(LocalRay(), Controller()).next_snapshot(0.05, deadline_s=time.monotonic())
    assert told.value.is_a_crash


def test_a_controller_that_a_full_disk_keeps_from_starting_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployments, "why_full", lambda: "the disk is full")
    with pytest.raises(DeployError) as told:
        deployment(LocalRay(), Controller(ConnectionError())).next_snapshot()
    assert str(told.value) == "the controller does not start, and the disk is full"


def test_what_would_find_no_threads_is_refused_before_ray_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own processes end, or stand, with a flood of messages or with none."""
    spec = parse_spec({"model": "./m", "pools": [{"role": "mixed", "replicas": 2}]})
    assert why_crowded(spec, None) == why_crowded(spec, ProcessRoom(400, "10 run, and the limit is 410")) == ""
    monkeypatch.setattr(deployments, "process_room", lambda: ProcessRoom(140, "10 run; the limit is 150"))
    monkeypatch.setattr(deployments, "this_machine", lambda: Machine(cores=(0,), memory_bytes=64 << 30))
    made = deployment(LocalRay(), Controller())
    made._written = spec
    with pytest.raises(DeployError) as told:
        made.start()
    assert str(told.value) == (
        "only 140 more processes and threads may be started (10 run; the limit is 150), and this cluster "
        "takes 180 at least; raise that limit"
    )


def test_what_is_short_is_said_once_while_members_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(deployments, "why_full", lambda: "only 3 more threads may be started")
    starting = [snapshot(change, is_ready=change == 3) for change in range(1, 5)]
    made = deployment(LocalRay(), Controller(*starting))
    for _ in starting:
        made.next_snapshot()
    assert [record.message for record in caplog.records] == ["only 3 more threads may be started"]


def test_a_controller_that_was_killed_for_lack_of_memory_is_told_while_it_is_away(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With it the members that it would tell of: Ray may take a minute to start them."""
    made = deployment(
        LocalRay(), Controller(snapshot(1, is_ready=True), ConnectionError(), snapshot(2, is_ready=False))
    )
    made.next_snapshot()
    told = ["the kernel has killed 4 processes here"]
    kills: Any = SimpleNamespace(news=lambda: told.pop() if told else "")
    made._memory_kills = kills
    made.next_snapshot()
    words = "the controller does not answer, and the kernel has killed 4 processes here"
    assert [record.message for record in caplog.records] == [words]


def test_a_ray_that_ended_for_lack_of_memory_is_told_as_that() -> None:
    made = deployment(LocalRay(LOST), Controller(snapshot(1, is_ready=True)))
    kills: Any = SimpleNamespace(news=lambda: "the kernel has killed 1 process here")
    made._memory_kills = kills
    with pytest.raises(DeployError, match="start the cluster again: the kernel has killed 1 process here"):
        made.next_snapshot()


def test_a_controller_that_cannot_be_started_is_quoted() -> None:
    why = ActorDiedError("The actor died\n  File 'x'\nModuleNotFoundError: No module named 'cluster'\n")
    with pytest.raises(DeployError) as told:
        deployment(LocalRay(), Controller(why)).next_snapshot()
    assert str(told.value) == "the controller cannot be started: ModuleNotFoundError: No module named 'cluster'"


@pytest.mark.parametrize(("shares", "gpus"), [((0.0, 0.0), 0), ((1.0, 1.0), 8), ((0.6, 0.6), 8)])
def test_ray_is_told_of_all_the_machines_gpus(
    shares: tuple[float, float], gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of as many as the shares add up to, some would fit on none, and a worker that is added would wait for ever."""
    told: list[float] = []

    class NoRay(LocalRay):
        def start(self, namespace: str, needs: dict[str, float], preload: object) -> None:
            told.append(needs.get("GPU", 0))
            raise RuntimeError("enough")

    machine = Machine(cores=tuple(range(8)), memory_bytes=64 << 30, gpus=8, why_no_cuda="")
    monkeypatch.setattr(deployments, "this_machine", lambda: machine)
    pools = [
        {"role": role, "num_gpus": share, "device": "cuda" if share else "cpu"}
        for role, share in zip(("prefill", "decode"), shares, strict=True)
    ]
    made = deployment(NoRay(), Controller())
    made._written = parse_spec({"model": "./m", "pools": pools})
    with pytest.raises(DeployError, match="enough"):
        made.start()
    assert told == [gpus]
