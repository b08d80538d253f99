"""`up` that cannot note what it starts ends with a sentence."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.deploy.deployment import NoSuchCluster
from cluster.deploy.ray import DeployError
from kvrelay.cli.cluster import daemon, down, leaving, state
from kvrelay.cli.console import INTERRUPTED, CliError
from kvrelay.client.types import KvrelayError
from kvrelay.known_clusters import read, start_of
from worker.wire.private_files import write_private

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def sigterm() -> Iterator[None]:
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


def _full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(state, "write_private", _full)
    with pytest.raises(CliError, match="cannot be written: no space left on device; set XDG_STATE_HOME"):
        state.write(state.this_process("chat", "foreground"))


def test_nothing_stays_of_what_could_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "chat.json").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_private(tmp_path / "chat.json", "{}")
    assert [path.name for path in tmp_path.iterdir()] == ["chat.json"]


def test_so_is_a_log_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    state.make_directory()
    (state.log_path("chat").parent.parent).write_text("a file where a folder is wanted")
    with pytest.raises(CliError, match=r"cannot be written: .*; set XDG_STATE_HOME"):
        daemon.start_and_wait("chat", as_json=False)


def test_a_process_is_known_though_the_clock_is_set_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = state.this_process("chat", "daemon")
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: 0.0)  # by which alone it would be another's
    assert ours.is_alive
    assert not replace(ours, pid=1).is_alive


def test_a_number_that_is_anothers_after_a_reboot_is_not_ours() -> None:
    ours = state.this_process("chat", "daemon")
    ticks = ours.started.rpartition(" ")[2]
    assert not replace(ours, started=f"0e0c4c42-0000-4000-8000-000000000000 {ticks}").is_alive
    assert not replace(ours, started="").is_alive


def test_a_name_that_a_ray_elsewhere_has_is_not_taken_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    state.write(replace(state.this_process("chat", "joined"), address="head:6379"))
    with pytest.raises(CliError, match=r"chat runs already \(in the Ray at head:6379\); end it with"):
        state.check_name("chat", is_joined=False)
    state.check_name("chat", is_joined=True)


def test_what_a_killed_up_left_in_a_ray_is_ended_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    state.write(replace(state.this_process("chat", "foreground"), started="before", address="head:6379"))
    assert (down._pick("chat").mode, down._pick("chat").address) == ("joined", "head:6379")


def test_down_waits_for_nobody_to_reap_the_one_that_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container without an init."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with subprocess.Popen(["sleep", "60"]) as up:
        state.write(replace(state.this_process("chat", "daemon"), pid=up.pid, started=start_of(up.pid)))
        down.down("chat", timeout=10.0)
        assert read("chat") is None
        assert up.wait(0) == -signal.SIGTERM


def test_down_says_who_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE) as up:
        assert up.stdout is not None
        up.stdout.readline()
        state.write(replace(state.this_process("chat", "daemon"), pid=up.pid, started=start_of(up.pid)))
        with pytest.raises(CliError, match=rf"chat \(process {up.pid}\) has not ended after 0.1 s"):
            down.down("chat", timeout=0.1)
        assert read("chat") is not None
        up.kill()


@pytest.mark.parametrize("handles", ["signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))", "0"])
def test_down_ends_what_only_begins_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], handles: str
) -> None:
    """It has said and noted nothing yet, whether it hears signals already or not."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    began: list[subprocess.Popen[bytes]] = []

    def spawn(_: str, write_fd: int) -> subprocess.Popen[bytes]:
        code = f"import signal, sys; {handles}; print(flush=True); signal.pause()"
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, pass_fds=[write_fd])
        assert child.stdout is not None
        child.stdout.readline()
        began.append(child)
        return child

    monkeypatch.setattr(daemon, "_spawn", spawn)
    ends = threading.Thread(target=_end_once_noted, args=("chat",))
    ends.start()
    assert daemon.start_and_wait("chat", as_json=False) == 1
    ends.join()
    assert began[0].returncode == (0 if "exit" in handles else -signal.SIGTERM)
    assert "chat was ended before it was ready, as by `kvrelay down`" in capsys.readouterr().err
    assert read("chat") is None


def _end_once_noted(name: str) -> None:
    until_s = time.monotonic() + 5.0
    while read(name) is None and time.monotonic() < until_s:
        time.sleep(0.01)
    down.down(name, timeout=5.0)


def test_a_sigterm_ends_what_only_begins_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has ended the command, as `timeout` does, knows of no other process."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with subprocess.Popen(["sleep", "60"]) as child:
        monkeypatch.setattr(daemon, "_spawn", lambda *_: child)
        monkeypatch.setattr(daemon, "_relay", lambda *_: signal.raise_signal(signal.SIGTERM))
        assert daemon.start_and_wait("chat", as_json=False) == INTERRUPTED
        assert child.returncode == -signal.SIGTERM
    assert read("chat") is None


def test_what_the_child_has_noted_itself_is_left_and_no_other_takes_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with subprocess.Popen(["sleep", "60"]) as child, subprocess.Popen(["sleep", "60"]) as other:
        noted = replace(state.of_process(child.pid, "chat", "daemon"), token="t")
        state.write(noted)
        state.claim_for(replace(noted, token=""))
        assert read("chat") == noted
        with pytest.raises(CliError, match=rf"chat runs already \(process {child.pid}\)"):
            state.claim_for(state.of_process(other.pid, "chat", "daemon"))
        state.remove_own("chat", other.pid)
        assert read("chat") == noted
        child.kill()
        other.kill()
    state.claim_for(ours := state.this_process("chat", "daemon"))
    state.claim(ours)
    state.remove_own("chat")
    assert read("chat") is None


def test_of_two_ups_of_one_name_the_second_leaves_the_firsts_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both had looked before either wrote."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        state.write(replace(state.this_process("chat", "daemon"), pid=other.pid, started=start_of(other.pid)))
        with pytest.raises(CliError, match=rf"chat runs already \(process {other.pid}\)"):
            state.claim(state.this_process("chat", "foreground"))
        state.remove_own("chat")
        assert read("chat") is not None
        other.kill()
    state.claim(state.this_process("chat", "foreground"))
    state.remove_own("chat")
    assert read("chat") is None


@pytest.mark.parametrize(
    ("error", "flags", "is_kept"),
    [
        (DeployError("no Ray answers"), {}, True),
        (DeployError("no Ray answers"), {"forget": True}, False),
        (NoSuchCluster("no cluster named chat runs"), {}, False),
        (KeyboardInterrupt(), {}, True),
        (None, {}, False),
    ],
)
@pytest.mark.parametrize("address", ["head:6379", ""])
def test_the_note_of_a_cluster_goes_when_it_is_known_to_be_gone(
    error: BaseException | None,
    flags: dict[str, bool],
    is_kept: bool,
    address: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def end(*_: str) -> None:
        if error is not None:
            raise error

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("cluster.deploy.deployment.end_joined", end)
    state.write(replace(state.this_process("chat", "joined" if address else "daemon"), address=address))
    is_told = error is not None and not (flags and address)
    with pytest.raises((CliError, KeyboardInterrupt)) if is_told else nullcontext() as told:
        down.down("chat", address="head:6379", **flags)
    if isinstance(error, DeployError) and told is not None:
        assert ("--forget" in str(told.value)) == bool(is_kept and address)
    assert (read("chat") is not None) == (is_kept or not address), "one of another Ray, or of its own, stays"


def test_a_user_without_a_home_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(state, "make_private_folder", _full)
    with pytest.raises(CliError, match=r"/\.kvrelay/clusters cannot be written: .*; set XDG_STATE_HOME"):
        state.make_directory()


@pytest.mark.parametrize(("flags", "why"), [(0, "permission denied"), (os.ST_RDONLY, "read-only file system")])
def test_a_folder_that_cannot_be_written_is_told_with_the_reason(
    flags: int, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=flags))
    with pytest.raises(CliError, match=f"cannot be written: {why}; set XDG_STATE_HOME"):
        state.make_directory()


def test_what_stands_in_the_folder_of_the_caller_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "typer.py").write_text("raise SystemExit(7)")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(Path(state.__file__).parents[3]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["kvrelay", "up", "--help"])
    read_fd, write_fd = os.pipe()
    child = daemon._spawn("chat", write_fd)
    os.close(read_fd)
    os.close(write_fd)
    assert child.wait(60) == 0


def test_a_drain_is_waited_for_though_its_router_is_started_again() -> None:
    worker: Any = SimpleNamespace(name="decode-1", state="ready", num_waiting=0, num_running=1, role="decode")
    answers: Any = iter(
        [
            worker,
            KvrelayError("UNAVAILABLE", "the connection was lost"),
            None,  # it knows nobody yet
            SimpleNamespace(**{**vars(worker), "role": "prefill"}),
        ]
    )

    def status() -> Any:
        if isinstance(answer := next(answers), KvrelayError):
            raise answer
        return SimpleNamespace(workers=[] if answer is None else [answer])

    client: Any = SimpleNamespace(status=status)
    left, _ = leaving.wait_until(client, "decode-1", lambda each: each.role == "prefill", 10.0, show=False)
    assert left == 0
    gone: Any = SimpleNamespace(status=lambda: SimpleNamespace(workers=[]))
    assert leaving.wait_until(gone, "decode-1", lambda _: False, 10.0, show=False, may_end=True)[0] == 0, "the only one"
