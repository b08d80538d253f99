"""Which module of a command is imported, and that each is known by the names that it registers."""

from __future__ import annotations

import asyncio
import io
import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import trustme
import typer

from kvrelay.cli import main
from kvrelay.cli.cluster import state
from kvrelay.cli.console import ENDPOINT_VARIABLE, INTERRUPTED, exit_codes, write_to_any_terminal
from tests.certificates import write_tls
from tests.kvrelay.client.scripted import ScriptedServer
from worker.wire import rpc

pytestmark = pytest.mark.unit


def test_each_module_registers_the_commands_that_it_is_known_for() -> None:
    for path in dict.fromkeys(path for path, _ in main.COMMANDS.values()):
        app = typer.Typer()
        import_module(f"kvrelay.cli.{path}").register(app)
        callbacks = [each.name or each.callback.__name__ for each in app.registered_commands if each.callback]
        groups = [each.typer_instance.info.name for each in app.registered_groups if each.typer_instance]
        assert {*callbacks, *groups} == {name for name, (of, _) in main.COMMANDS.items() if of == path}


@pytest.mark.parametrize(
    ("line", "begins"),
    [
        ("up --model m", True),
        ("up cluster.yaml --report-fd 7", True),
        ("up -d cluster.yaml", False),  # a process of its own is `up`, and begins one
        ("up --address=auto cluster.yaml", False),
        ("up --check cluster.yaml", False),
        ("up --help", False),
        ("down", False),
        ("", False),
    ],
)
def test_a_fork_server_is_begun_where_one_will_be_wanted(
    line: str, begins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.deploy.gpus.count_gpus", lambda: 0)
    assert main._begins_forks(line.split(), {}) is begins
    assert not main._begins_forks(line.split(), {"_KVRELAY_COMPLETE": "complete_bash"})
    monkeypatch.setattr("cluster.deploy.gpus.count_gpus", lambda: 1)
    assert not main._begins_forks(line.split(), {})


def test_of_one_cluster_a_router_is_asked_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "KNOCK_TIMEOUT_S", 0.5)
    with (
        ScriptedServer() as server,
        socket.create_server(("127.0.0.1", 0)) as hanging,
        socket.create_server(("127.0.0.1", 0)) as closed,
    ):
        there, (hangs, away) = server.endpoint, (f"127.0.0.1:{each.getsockname()[1]}" for each in (hanging, closed))
        closed.close()
        several = (((away, there), there), ((there, away), there), ((hangs, there), there), ((away, hangs), away))
        for endpoints, asked in (*several, ((away,), away)):
            monkeypatch.delenv(ENDPOINT_VARIABLE, raising=False)
            running = replace(state.this_process("chat", "daemon"), endpoints=endpoints)
            monkeypatch.setattr("kvrelay.known_clusters.alive", lambda running=running: iter([running]))
            main._find_endpoint(["drain", "decode-0"])
            assert os.environ[ENDPOINT_VARIABLE] == asked
    monkeypatch.delenv(ENDPOINT_VARIABLE)


def test_the_list_of_commands_says_what_their_own_help_begins_with() -> None:
    main._register()
    group: Any = typer.main.get_command(main.app)
    begin = {name: " ".join(command.help.split("\n\n")[0].split()) for name, command in group.commands.items()}
    assert begin == {name: about for name, (_, about) in main.COMMANDS.items()}


def test_the_list_of_commands_imports_none_of_them() -> None:
    code = "import sys; from kvrelay.cli import main; sys.argv[1:] = {words}; main.main()"
    code = f"import atexit, sys; atexit.register(lambda: print(*sys.modules)); {code}"
    done = subprocess.run([sys.executable, "-c", code.format(words=["--help"])], capture_output=True, text=True)
    assert done.returncode == 0
    assert "Start a cluster and serve until Ctrl-C." in done.stdout
    assert not {"kvrelay.cli.cluster.up", "kvrelay.client", "pydantic"} & set(done.stdout.split())
    unknown = subprocess.run([sys.executable, "-c", code.format(words=["generat"])], capture_output=True, text=True)
    assert (unknown.returncode, "generate" in unknown.stderr) == (2, True)


def test_a_command_behind_two_dashes_is_the_command() -> None:
    words = [sys.executable, "-m", "kvrelay.cli.main", "--", "make-model"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, "kvrelay make-model" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("words", "environment", "wanted"),
    [
        (["status", "--json"], {}, "status"),
        (["--help"], {}, "--help"),  # no command's name: all are listed
        ([], {}, ""),
        ([], {"_KVRELAY_COMPLETE": "complete_bash", "COMP_WORDS": "kvrelay role"}, ""),
        ([], {"_KVRELAY_COMPLETE": "complete_bash", "COMP_WORDS": "kvrelay role "}, "role"),
        ([], {"_KVRELAY_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "kvrelay bench --ra"}, "bench"),
        ([], {"_KVRELAY_COMPLETE": "source_fish"}, ""),
    ],
)
def test_the_command_that_is_meant(words: list[str], environment: dict[str, str], wanted: str) -> None:
    assert main._command(words, environment) == wanted


def test_a_command_imports_none_of_the_others() -> None:
    code = "import sys; from kvrelay.cli import main; main._register('status'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = done.stdout.split()
    assert "kvrelay.cli.cluster.status" in modules
    assert not {"kvrelay.cli.chat", "kvrelay.cli.planning.plan", "aiohttp", "numpy", "ray", "torch"} & set(modules)


def test_sigterm_ends_a_command_as_ctrl_c_does(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(typer.Exit) as ended, exit_codes(as_json=False, interrupted="interrupted"):
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.exit_code == INTERRUPTED
    assert capsys.readouterr().err == "error: interrupted\n"
    assert signal.getsignal(signal.SIGTERM) is before


LIMITED = (
    "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512)); from kvrelay.cli.main import main; main()"
)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("--help", "error: what was to be told cannot be written: file too large"),
        ("make-model MODEL", r"error: \S+/model cannot be written: .*File too large.*; give another directory"),
    ],
)
def test_a_limit_on_files_is_told_in_a_sentence(command: str, said: str, tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", LIMITED, *command.replace("MODEL", str(tmp_path / "model")).split()]
    with open(tmp_path / "said", "w") as file:
        ended = subprocess.run(arguments, stdout=file, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 1
    assert re.fullmatch(said, ended.stderr.strip().splitlines()[-1]), ended.stderr
    assert "Traceback" not in ended.stderr


def test_what_a_terminal_cannot_show_ends_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, "ascii"))
    write_to_any_terminal()
    print("so schön", flush=True)
    assert shown.getvalue() == b"so sch?n\n"


async def test_what_fails_at_tls_is_told_in_our_own_words_alone(tmp_path: Path) -> None:
    server = rpc.make_server()
    port = rpc.bind(server, "127.0.0.1", 0, replace(write_tls(tmp_path, trustme.CA(), "127.0.0.1"), ca=""))
    await server.start()
    command = [sys.executable, "-m", "kvrelay.cli.main", "status", "--endpoint", f"127.0.0.1:{port}", "--tls"]
    environment = {key: value for key, value in os.environ.items() if key != "GRPC_VERBOSITY"}
    done = await asyncio.to_thread(subprocess.run, command, env=environment, capture_output=True, text=True, timeout=60)
    await server.stop(None)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "of no authority that is trusted here" in done.stderr
