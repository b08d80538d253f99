"""A raylet gets the worker that it asked for, forked or not, and never two."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import psutil
import pytest

from cluster.deploy.forks import ask, started
from cluster.deploy.forks.ask import GO, LOADED, SOCKET_VARIABLE, STREAMS
from cluster.deploy.forks.preload import Imports, Preload
from cluster.deploy.forks.started import ForkServer
from kvrelay.demo_model import make_demo_model

TELLS_OF_ITSELF = """
import json, os, resource, sys
told = {"is_leader": os.getpgrp() == os.getpid(), "parent": os.getppid(),
    "arguments": sys.argv[1:], "folder": os.getcwd(),
    "mine": os.environ.get("MINE"), "imported": sorted({"sched", "shlex"} & set(sys.modules)),
    "is_loaded": bool(getattr(sys.modules.get("engine.loading.ready_made"), "_kept", None)),
    "script": os.path.basename(sys.argv[0]),
    "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0], "oom": open("/proc/self/oom_score_adj").read().strip()}
print(json.dumps(told), flush=True)
"""
TIMEOUT_S = 60.0
PYTHON = "--language=PYTHON"


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    for name in ("default_worker.py", "setup_worker.py"):
        (tmp_path / name).write_text(TELLS_OF_ITSELF)
    return tmp_path


@contextlib.contextmanager
def fork_server(
    folder: Path, *modules: str, num_light: int = 0, model: Path | None = None, ray_modules: Sequence[str] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    engine = None if model is None else {"model": str(model), "threads": 1}
    server = ForkServer(Imports(light=("sched",), all=("sched", *modules), ray=ray_modules))
    server.tell(folder, Preload(num_light=num_light, engine=engine))
    try:
        yield server.process
    finally:
        server.end()
        server.process.wait(TIMEOUT_S)


def worker_of(scripts: Path, *flags: str, cwd: Path | None = None, first: str = ":") -> dict[str, object]:
    """What the process tells that a raylet gets: asked for in a folder, with an environment and limits of its own.
    `first`: what the shell does before."""
    command = ["sh", "-c", f'{first}; ulimit -n 99; echo 7 >/proc/self/oom_score_adj; exec "$0" "$@"']
    command += [sys.executable, ask.__file__, str(scripts / "default_worker.py"), "--worker-id=1", *flags]
    environment = os.environ | {"MINE": "yes"}
    with subprocess.Popen(command, env=environment, cwd=cwd or scripts, stdout=subprocess.PIPE) as asked:
        assert asked.stdout is not None
        told: dict[str, object] = json.loads(asked.stdout.readline())  # its end may lie in a stopped server's socket
        assert asked.wait(TIMEOUT_S) == 0
    return told


def test_a_fork_has_what_the_raylet_gave_and_what_the_server_imported(scripts: Path) -> None:
    with fork_server(scripts, "shlex") as server:
        told = worker_of(scripts, PYTHON)
        parent = psutil.Process(cast(int, told["parent"]))
        assert parent.ppid() == server.pid
    assert told["imported"] == ["sched", "shlex"]
    assert told["is_leader"]
    assert told["script"] == "default_worker.py"
    assert told["arguments"] == ["--worker-id=1"]
    assert (told["folder"], told["mine"], told["open_files"], told["oom"]) == (str(scripts), "yes", 99, "7")


def test_a_server_that_is_stopped_later_holds_nobody_up_for_long(scripts: Path) -> None:
    """An import may take as long as it does, and it is over."""
    with fork_server(scripts) as server:
        assert worker_of(scripts, PYTHON)["script"] == "default_worker.py"
        both = [psutil.Process(server.pid), *psutil.Process(server.pid).children()]
        for process in both:
            process.suspend()
        began_s = time.monotonic()
        assert worker_of(scripts, PYTHON)["script"] == "setup_worker.py"
        assert time.monotonic() - began_s < ask.ANSWER_TIMEOUT_S / 2
        for process in both:
            process.resume()


@pytest.mark.parametrize("has_server", [True, False])
def test_a_folder_that_was_removed_since_keeps_nobody_from_coming(has_server: bool, scripts: Path) -> None:
    """That where `up` was run."""
    folder = scripts / "gone"
    folder.mkdir()
    with fork_server(scripts) if has_server else contextlib.nullcontext():
        told = worker_of(scripts, PYTHON, cwd=folder, first=f"rmdir {folder}")
    assert told["folder"] == "/"
    assert (told["script"] == "default_worker.py") == has_server


def test_the_first_do_not_wait_for_what_workers_import(scripts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (scripts / "slow.py").write_text(
        f"import os, time\nwhile not os.path.exists({str(scripts / 'go')!r}): time.sleep(0.01)\n"
    )
    monkeypatch.syspath_prepend(str(scripts))
    with fork_server(scripts, "slow", "shlex", num_light=2) as server:
        for told in (worker_of(scripts, PYTHON), worker_of(scripts, PYTHON)):
            assert (told["parent"], told["imported"]) == (server.pid, ["sched"])
        (scripts / "go").touch()
        assert worker_of(scripts, PYTHON)["imported"] == ["sched", "shlex"]


def test_who_has_other_settings_of_rays_than_the_first_is_started_by_ray(
    scripts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads them when it is imported."""
    with fork_server(scripts):
        for niceness, script in (("1", "default_worker.py"), ("2", "setup_worker.py"), ("1", "default_worker.py")):
            monkeypatch.setenv("RAY_worker_niceness", niceness)
            assert worker_of(scripts, PYTHON)["script"] == script


def test_ray_is_imported_with_the_settings_of_the_first_who_asks(
    scripts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = scripts / "told"
    (scripts / "reads_settings.py").write_text(
        f"import os\nopen({str(told)!r}, 'w').write(','.join(sorted(key for key in os.environ if 'RAY_' in key)))\n"
    )
    monkeypatch.setenv("RAY_ADDRESS", "another's")
    monkeypatch.syspath_prepend(str(scripts))
    with fork_server(scripts, ray_modules=("reads_settings",)):
        monkeypatch.delenv("RAY_ADDRESS")
        monkeypatch.setenv("RAY_JOB_ID", "01000000")
        assert worker_of(scripts, PYTHON)["script"] == "default_worker.py"
        settings = sorted(key for key in os.environ if "RAY_" in key)
    assert told.read_text() == ",".join(settings)
    assert "RAY_JOB_ID" in settings
    assert "RAY_ADDRESS" not in settings


@pytest.mark.parametrize("is_there", [True, False])
def test_a_model_is_there_in_all_forks_or_theirs_to_load(scripts: Path, is_there: bool) -> None:
    model = make_demo_model(scripts / "model") if is_there else scripts / "missing"
    with fork_server(scripts, model=model):
        for told in (worker_of(scripts, PYTHON), worker_of(scripts, PYTHON)):
            assert (told["script"], told["is_loaded"]) == ("default_worker.py", is_there)


def test_a_model_that_nobody_loads_any_more_is_let_go(scripts: Path) -> None:
    engine = {"model": str(make_demo_model(scripts / "model")), "threads": 1}
    server = ForkServer(Imports(light=(), all=(), ray=()))
    server.tell(scripts, Preload(engine=engine))
    assert worker_of(scripts, PYTHON)["is_loaded"]
    server.change(Preload(engine=engine, num_light=1))
    assert worker_of(scripts, PYTHON)["is_loaded"]
    server.change(Preload(engine=engine | {"threads": 2}))
    assert not worker_of(scripts, PYTHON)["is_loaded"]
    server.end()
    server.process.wait(TIMEOUT_S)


def test_workers_are_rays_to_start_where_the_loaded_process_has_ended(scripts: Path) -> None:
    with fork_server(scripts, "no_such_module", num_light=1):
        assert worker_of(scripts, PYTHON)["script"] == "default_worker.py"
        assert worker_of(scripts, PYTHON)["script"] == "setup_worker.py"


@pytest.mark.parametrize("is_told", [True, False])
def test_the_server_ends_with_who_started_it(scripts: Path, is_told: bool) -> None:
    server = ForkServer(Imports(light=(), all=(), ray=()))
    if is_told:
        server.tell(scripts, Preload())
    loaded = _loaded_of(server.process)
    server.end()
    assert server.process.wait(TIMEOUT_S) == 0
    assert not psutil.wait_procs([loaded], TIMEOUT_S)[1]


def test_one_that_was_begun_is_taken_or_ended_at_once(scripts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(started, "ForkServer", lambda: ForkServer(Imports(light=(), all=("not_there",), ray=())))
    started.begin()
    taken = started.take()
    started.begin()
    (other,) = started._begun
    started.end_untaken()
    assert (taken.process.poll(), other.process.poll()) == (None, -signal.SIGKILL)
    taken.end()
    taken.process.wait(TIMEOUT_S)


def test_no_secret_is_in_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_SECRET", "of-ours")
    server = ForkServer(Imports(light=(), all=(), ray=()))
    assert b"of-ours" not in Path(f"/proc/{server.process.pid}/environ").read_bytes()
    server.end()
    server.process.wait(TIMEOUT_S)


def _loaded_of(server: subprocess.Popen[bytes]) -> psutil.Process:
    """Once it is there. What builds the kernels, where they are not built yet, is a child of the server, too."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        for child in psutil.Process(server.pid).children():
            with contextlib.suppress(psutil.Error):
                if started.SERVER in child.cmdline():
                    return child
        time.sleep(0.01)
    raise AssertionError("no process is forked of the server")


@pytest.mark.parametrize("flag", ['--serialized-runtime-env-context={"env_vars": {}}', "--language=JAVA"])
def test_what_needs_setting_up_is_rays_to_start(scripts: Path, flag: str) -> None:
    with fork_server(scripts):
        told = worker_of(scripts, flag)
    assert told["script"] == "setup_worker.py"
    assert flag in str(told["arguments"])


def test_without_a_server_ray_starts_its_worker_itself(scripts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SOCKET_VARIABLE, str(scripts / "forks"))
    assert worker_of(scripts, PYTHON)["script"] == "setup_worker.py"


def test_one_with_a_second_thread_forks_nobody(scripts: Path) -> None:
    (scripts / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    sys.path.insert(0, str(scripts))
    try:
        with fork_server(scripts, "threaded"):
            assert worker_of(scripts, PYTHON)["script"] == "setup_worker.py"
    finally:
        sys.path.remove(str(scripts))


def test_a_fork_that_nobody_waits_for_any_more_runs_nothing(scripts: Path) -> None:
    script, mark = scripts / "default_worker.py", scripts / "mark"
    script.write_text(f"open({str(mark)!r}, 'a').write('run ')")
    with fork_server(scripts):
        for answer in (b"", GO):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asker:
                asker.settimeout(TIMEOUT_S)
                asker.connect(str(scripts / "forks"))
                socket.send_fds(asker, [json.dumps(ask._standing([str(script)])).encode()], STREAMS)
                assert asker.recv(1) == LOADED
                if answer:
                    asker.send(answer)
                    assert asker.recv(1) == b""  # it goes on, and has let go of the connection
        deadline = time.monotonic() + TIMEOUT_S
        while not mark.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert mark.read_text() == "run "
