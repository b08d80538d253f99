"""What is asked of a Ray that does not answer ends."""

from __future__ import annotations

import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster.deploy import ray as rays
from cluster.deploy.ray import DeployError, ends_within, initialized_ray, join_ray, shut_down, why_apart, why_full
from engine.limits.process_room import ProcessRoom

pytestmark = pytest.mark.unit


def test_who_hangs_is_left_behind() -> None:
    began_s = time.monotonic()
    assert not ends_within(threading.Event().wait, 0.05)
    assert time.monotonic() - began_s < 5.0


def test_who_can_never_end_is_not_waited_for() -> None:
    began_s = time.monotonic()
    assert not ends_within(threading.Event().wait, 60.0, lambda: "the GCS is gone")
    assert time.monotonic() - began_s < 5.0


def test_what_fails_did_not_end_well() -> None:
    def fail() -> None:
        raise ConnectionError("the GCS is gone")

    assert not ends_within(fail, 5.0)
    assert ends_within(lambda: None, 5.0)


def test_a_ray_that_takes_connections_and_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its GCS is stopped, say: Ray's own client would try for more than a minute."""
    monkeypatch.setattr(rays, "CONNECT_TIMEOUT_S", 0.1)
    why = r"no Ray answers at --address 127\.0\.0\.1:\d+: timed out; start one with"
    with socket.create_server(("127.0.0.1", 0)) as hanging, pytest.raises(DeployError, match=why):
        join_ray(f"127.0.0.1:{hanging.getsockname()[1]}", "chat")


@pytest.mark.parametrize(
    ("addresses", "why"),
    [
        (("127.0.1.1", "10.0.0.2"), "Ray knows its node host-0 as 127.0.1.1, where its other nodes cannot reach it; "),
        (("10.0.0.1", "::1"), "Ray knows its node host-1 as ::1, where its other nodes cannot reach it; "),
        (("127.0.0.1", "127.0.0.1"), ""),  # of one machine
        (("10.0.0.1", "node-b"), ""),
        (("127.0.1.1",), ""),
    ],
)
def test_a_node_whose_address_is_its_own_alone_is_told(addresses: tuple[str, ...], why: str) -> None:
    """Its workers would listen there, and all others wait for them until ready_timeout_s."""
    nodes = [
        {"NodeManagerAddress": address, "NodeManagerHostname": f"host-{index}", "Alive": True}
        for index, address in enumerate(addresses)
    ]
    gone = {"NodeManagerAddress": "10.0.0.9", "NodeManagerHostname": "gone", "Alive": False}
    told = why_apart([*nodes, gone])
    assert told == (why and f"{why}start it with `ray start --node-ip-address=ADDRESS`")


@pytest.mark.parametrize(
    ("imported", "is_there"),
    [
        (None, False),
        (SimpleNamespace(), False),  # its import was interrupted
        (SimpleNamespace(is_initialized=lambda: False), False),
        (SimpleNamespace(is_initialized=lambda: True), True),
    ],
)
def test_a_ray_that_was_not_begun_is_none(imported: object, is_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", imported)
    assert initialized_ray() is (imported if is_there else None)


def test_a_shutdown_is_bounded_and_signals_are_kept_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.deploy.ray.SHUTDOWN_S", 0.2)
    kept: list[int] = []
    assert not shut_down(SimpleNamespace(shutdown=threading.Event().wait), lambda: kept.append(1))
    assert len(kept) > 5
    kept.clear()
    assert shut_down(SimpleNamespace(shutdown=int), lambda: kept.append(1))
    assert kept, "once more when it has ended"


def test_a_disk_on_which_ray_can_keep_nothing_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert why_full() == "", "nobody knows where it is"
    node = SimpleNamespace(get_session_dir_path=lambda: str(tmp_path))
    monkeypatch.setattr("ray._private.worker._global_node", node)
    assert why_full() == ""
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=8 << 10))
    assert why_full() == f"the disk of Ray's folder {tmp_path} is full (8 KiB free); make room there"


def test_a_limit_on_threads_that_lets_no_process_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.deploy.ray.process_room", lambda: ProcessRoom(90, "10 run, and the limit is 100"))
    assert why_full() == ""
    monkeypatch.setattr("cluster.deploy.ray.process_room", lambda: ProcessRoom(9, "91 run, and the limit is 100"))
    told = "only 9 more processes and threads may be started (91 run, and the limit is 100); raise that limit"
    assert why_full() == told
