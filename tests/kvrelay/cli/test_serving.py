"""One run of `up`, whatever happens to it: a lost terminal, signals, Ray's handlers; the cluster is a fake."""

from __future__ import annotations

import errno
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.deploy import deployment
from cluster.deploy.ray import DeployError
from cluster.spec.model import ClusterSpec
from kvrelay.cli.cluster import checking, serving, state
from kvrelay.cli.cluster.views import LineView
from kvrelay.cli.console import FAILURE, INTERRUPTED, CliError
from kvrelay.cli.spec.wanted import Wanted, build
from kvrelay.cli.spec_flags import SpecChanges
from kvrelay.doctor.finding import Finding
from kvrelay.known_clusters import Mode, alive, read
from placement.plan import Slo
from worker.wire.secrets import Secrets

pytestmark = pytest.mark.unit

READY = {"version": (1, 1), "is_ready": True, "failed": [], "has_crashed": False, "wants_secrets": False, "members": []}
SECRETS = Secrets(cluster="s" * 16, clients="default:" + "t" * 16)


class Cluster:
    """A Deployment that is ready at once. `then` runs each time that it is watched."""

    logs = ""

    def __init__(self, then: Callable[[], object], start: Callable[[], object] = int) -> None:
        self._then = then
        self.num_watched = 0
        self.start = start
        self.spec = SPEC
        self.is_stopped = False

    def next_snapshot(self, *_: object, **__: object) -> dict[str, Any]:
        self.num_watched += 1
        assert self.num_watched < 10, "nothing ends it"
        if self.num_watched > 1:
            self._then()
        return READY

    def wait_serving(self, _: float) -> None: ...

    def stop(self, *, has_crashed: bool, keep_signals: Callable[[], object]) -> bool:
        self.is_stopped = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as Ray's shutdown does
        keep_signals()
        return True


class Gone:
    """A terminal that was closed."""

    def write(self, _: str) -> int:
        raise OSError(errno.EIO, "Input/output error")

    flush = isatty = lambda _: False


SPEC = build(None, SpecChanges(cluster={"model": "m", "name": "chat"}, router={"port": 0}), {}).spec


REPLANNED: list[dict[str, Any]] = [
    {"model": "m"},
    {"model": "m", "replan": "act"},
    {"model": "m", "replan": "act", "ready_timeout_s": 7.0},
    {"model": "m", "replan": "act", "replan_attainment": 0.8},
]


@pytest.fixture(autouse=True)
def own_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(serving, "_asked_to_stop", [])
    handlers = {signum: signal.getsignal(signum) for signum in serving.SIGNALS}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may have ignored it
    yield
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


def serve(monkeypatch: pytest.MonkeyPatch, cluster: Cluster, address: str | None = None, mode: Mode = "daemon") -> int:
    monkeypatch.setattr(deployment, "Deployment", lambda *_, **__: cluster)
    return serving.serve(
        Wanted(spec=SPEC, sources={}), address=address, drawn=SECRETS, log_dir="", mode=mode, view=LineView()
    )


def fail() -> None:
    raise DeployError("the controller is gone")


def bad(*_: object) -> list[Finding]:
    raise CliError("memory: 9 GiB wanted, 1 free; lower kv_memory")


def test_what_is_bad_before_the_start_ends_it_with_nothing_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster(fail)
    monkeypatch.setattr(deployment, "Deployment", lambda *_, **__: cluster)
    monkeypatch.setattr(checking, "before", bad)
    names: list[str] = []
    monkeypatch.setattr(serving, "check_ports", lambda *_, **__: names.extend(each.name for each in alive()))
    asked: dict[str, Any] = {"drawn": SECRETS, "log_dir": "", "mode": "daemon", "view": LineView(), "checks": True}
    assert serving.serve(Wanted(spec=SPEC, sources={}), address=None, **asked) == FAILURE
    assert "lower kv_memory" in capsys.readouterr().err
    assert (cluster.num_watched, cluster.is_stopped) == (0, False)
    assert (names, read("chat")) == (["chat"], None), "`kvrelay down` could have ended it"


@pytest.mark.parametrize("host", ["nohost.invalid", "203.0.113.5"])
@pytest.mark.parametrize("port", [0, 50051])
def test_a_host_that_is_not_this_machine_is_what_has_to_change(host: str, port: int) -> None:
    spec = build(None, SpecChanges(cluster={"model": "m"}, router={"host": host, "port": port}), {}).spec
    with pytest.raises(
        CliError, match=f"^router cannot listen on {host}: .*; give another --host, one of this machine"
    ):
        serving.check_ports(spec, is_local=True)
    serving.check_ports(spec, is_local=False)


def test_all_is_ended_though_nobody_is_there_to_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(fail)
    monkeypatch.setattr(sys, "stderr", Gone())
    monkeypatch.setattr(sys, "__stdout__", Gone())
    assert serve(monkeypatch, cluster) == FAILURE
    assert cluster.is_stopped
    assert read("chat") is None


def test_a_second_signal_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though Ray has given signals their defaults meanwhile (Cluster.stop)."""
    cluster = Cluster(lambda: signal.raise_signal(signal.SIGTERM))
    ended = cluster.stop

    def stop(**given: Any) -> bool:
        ended(**given)
        signal.raise_signal(signal.SIGTERM)  # else it would end this process
        return True

    monkeypatch.setattr(cluster, "stop", stop)
    assert serve(monkeypatch, cluster) == 0
    assert read("chat") is None


def test_a_process_that_ray_does_not_let_go_ends_without_python_s_good_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would end in a SIGSEGV, and no exit code."""
    monkeypatch.setattr(serving, "_left_in_ray", [])
    cluster, codes = Cluster(fail), list[int]()
    monkeypatch.setattr(cluster, "stop", lambda **_: False)
    monkeypatch.setattr("os._exit", codes.append)
    serve(monkeypatch, cluster)
    assert codes == [FAILURE]
    assert read("chat") is None


def test_a_stop_that_fails_leaves_no_note(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(fail)
    monkeypatch.setattr(cluster, "stop", lambda **_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        serve(monkeypatch, cluster)
    assert read("chat") is None


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, INTERRUPTED), (signal.SIGTERM, 0), (signal.SIGHUP, 0)])
def test_a_signal_ends_it_in_good_order(monkeypatch: pytest.MonkeyPatch, signum: signal.Signals, code: int) -> None:
    def hear() -> None:
        assert callable(signal.getsignal(signum))  # else it would end this process
        signal.raise_signal(signum)

    cluster = Cluster(hear)
    assert serve(monkeypatch, cluster) == code
    assert cluster.is_stopped


def test_a_spec_that_is_applied_has_another_replanner_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [build(None, SpecChanges(cluster=keys, router={"slo_ttft_ms": 5}), {}).spec for keys in REPLANNED]
    left, seen = specs.copy(), list[str]()

    def then() -> None:
        if not left:
            fail()
        cluster.spec = left.pop(0)

    @contextmanager
    def replanning(spec: ClusterSpec, _: object) -> Iterator[None]:
        seen.append(f"{spec.replan} {spec.replan_attainment}")
        yield

    monkeypatch.setattr(serving, "_replanning", replanning)
    cluster = Cluster(then)
    assert serve(monkeypatch, cluster) == FAILURE
    assert seen == ["off 0.9", "act 0.9", "act 0.8"]


def test_a_terminal_that_is_closed_ends_nothing_but_us(monkeypatch: pytest.MonkeyPatch) -> None:
    blocked: list[set[int]] = []

    def start() -> None:
        signal.raise_signal(signal.SIGHUP)  # heard when all is there that must be ended
        blocked.append(set(signal.pthread_sigmask(signal.SIG_BLOCK, [])))

    cluster = Cluster(fail, start=start)
    assert serve(monkeypatch, cluster) == 0
    assert (cluster.is_stopped, cluster.num_watched) == (True, 0)
    assert signal.SIGHUP in blocked[0]
    assert signal.SIGHUP not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_hangup_is_not_heard_where_nohup_does_not_want_it(monkeypatch: pytest.MonkeyPatch) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert serve(monkeypatch, Cluster(fail)) == FAILURE
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_a_signal_that_is_lost_in_rays_code_ends_it_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def swallow() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except serving.Stopped:
            return

    cluster = Cluster(swallow)
    assert serve(monkeypatch, cluster) == 0
    assert (cluster.is_stopped, cluster.num_watched) == (True, 2)


def test_sigterm_while_ray_starts_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(fail, start=lambda: sys.exit(signal.SIGTERM))  # as Ray's own handler does
    assert serve(monkeypatch, cluster) == 0
    assert cluster.is_stopped


def test_a_second_start_in_the_same_ray_leaves_the_first_ones_token(monkeypatch: pytest.MonkeyPatch) -> None:
    first = replace(state.this_process("chat", "joined"), pid=0, address="auto", token="first", endpoints=("h:1",))
    state.write(first)
    assert serve(monkeypatch, Cluster(fail, start=fail), address="auto", mode="joined") == FAILURE
    assert read("chat") == first


def test_who_took_the_name_meanwhile_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(state.this_process("chat", "daemon"), pid=1)

    def lose_the_race() -> None:
        state.write(other)
        fail()

    assert serve(monkeypatch, Cluster(fail, start=lose_the_race)) == FAILURE
    assert read("chat") == other


def test_what_is_left_in_a_ray_is_announced_and_kept(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster(fail)
    cluster.leave = lambda: None  # type: ignore[attr-defined]
    assert serve(monkeypatch, cluster, address="auto", mode="joined") == 0
    noted = read("chat")
    assert noted is not None
    assert (noted.pid, noted.address, noted.is_alive, cluster.is_stopped) == (0, "auto", True, False)


def test_the_spec_says_how_roles_follow_the_load() -> None:
    router = {"slo_ttft_ms": 500.0}
    cluster = {"model": "m", "replan": "act", "replan_attainment": 0.75, "replan_policy": "distserve"}
    asked = serving.asked_of(build(None, SpecChanges(cluster=cluster, router=router), {}).spec)
    assert (asked.slo, asked.acts, asked.policy) == (Slo(ttft_s=0.5, attainment=0.75), True, "distserve")
    grows = {"model": "m", "replan": "advise", "replan_most_devices": 8}
    asked = serving.asked_of(build(None, SpecChanges(cluster=grows, router=router), {}).spec)
    assert (asked.slo.attainment, asked.acts, asked.policy, asked.most_devices) == (0.9, False, "kvrelay", 8)
