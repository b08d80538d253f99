"""The command's exit codes and sentences where nothing comes to run, and that nothing stays where it failed."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from pathlib import Path

import psutil
import pytest

from kvrelay.demo_model import make_demo_model
from tests.deploy.running import COMMAND, RETURN_TIMEOUT_S, environment, gone, kvrelay, title, until


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_demo_model(tmp_path_factory.mktemp("models") / "tiny")


def test_help_names_every_command(tmp_path: Path) -> None:
    shown = kvrelay(tmp_path, "--help")
    assert shown.returncode == 0
    operating = ("up", "down", "status", "drain", "role", "scale", "apply", "roll", "config", "explain")
    for command in (*operating, "generate", "bench", "make-model"):
        assert f" {command} " in shown.stdout


@pytest.mark.parametrize("command", ["up", "down", "status", "drain", "role", "scale", "apply", "roll", "make-model"])
def test_help_shows_examples(tmp_path: Path, command: str) -> None:
    shown = kvrelay(tmp_path, command, "--help")
    assert shown.returncode == 0
    assert f"kvrelay {command}" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["up"], 2, "nothing to serve; give a spec file, or --model DIR"),
        (
            ["up", "--model", "/nowhere/m"],
            2,
            "model is '/nowhere/m'; there is no such directory, give another or a hub id, fetch one with "
            "`hf download ORG/NAME --local-dir /nowhere/m`, or make a random one with `kvrelay make-model /nowhere/m`",
        ),
        (["up", "--model", "org/m", "--prefill", "0"], 2, "pools[0].replicas is 0; give a number of 1 or more"),
        (["up", "--model", "org/m", "--dtype", "int4"], 2, "dtype is 'int4'; give 'auto', 'float32' or 'bfloat16'"),
        (["up", "nowhere.yaml"], 2, "nowhere.yaml cannot be read: No such file or directory"),
        (["down"], 1, "0 clusters were started from here; none runs"),
        (["down", "chat"], 1, "no cluster named chat was started from here; none runs"),
        (
            ["down", "chat", "--address", "127.0.0.1:1"],
            1,
            "no Ray answers at --address 127.0.0.1:1: connection refused; start one with `ray start --head`",
        ),
        (
            ["status", "--endpoint", "127.0.0.1:1"],
            1,
            "no status from 127.0.0.1:1: nothing answers; is the cluster up? (kvrelay up)",
        ),
    ],
)
def test_what_is_asked_wrongly_is_told_in_a_sentence(
    tmp_path: Path, arguments: list[str], code: int, sentence: str
) -> None:
    plain = kvrelay(tmp_path, *arguments)
    assert (plain.returncode, plain.stderr) == (code, f"error: {sentence}\n")
    as_json = kvrelay(tmp_path, *arguments, "--json")
    assert as_json.returncode == code
    assert json.loads(as_json.stdout) == {"error": {"message": sentence}}


def test_a_home_that_cannot_be_written_is_told_before_anything_starts(tmp_path: Path, model: Path) -> None:
    home = tmp_path / "file"
    home.touch()
    for more in ([], ["--detach"]):
        refused = kvrelay(home, "up", "--model", str(model), "--port", "0", *more)
        assert refused.returncode == 1
        assert refused.stderr.startswith(f"error: {home}")
        assert refused.stderr.endswith("set XDG_STATE_HOME to a directory that can\n")
        assert refused.stderr.count("\n") == 1


def test_an_unknown_flag_is_wrong_usage(tmp_path: Path) -> None:
    assert kvrelay(tmp_path, "up", "--frobnicate").returncode == 2


def test_a_misspelt_key_is_named(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text("modle: m\npools: [{role: prefill}, {role: decode}]\n")
    refused = kvrelay(tmp_path, "up", str(spec))
    assert (refused.returncode, refused.stderr) == (2, "error: modle is not a known key; did you mean model?\n")


def test_what_a_planner_may_write_and_is_not_served_is_told_before_anything_starts(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    pools = "[{role: prefill}, {role: decode, pipeline_parallel: 2, num_speculative_tokens: 4}]"
    spec.write_text(f"model: org/m\npools: {pools}\n")
    refused = kvrelay(tmp_path, "up", str(spec))
    assert (refused.returncode, refused.stderr) == (
        2,
        "error: pools[1].pipeline_parallel is 2 with num_speculative_tokens 4; give one of the two\n",
    )


def test_pool_sizes_do_not_go_with_a_spec(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text("model: org/m\npools: [{role: prefill}, {role: decode}]\n")
    refused = kvrelay(tmp_path, "up", str(spec), "--decode", "2")
    assert refused.returncode == 2
    assert "change replicas in its pools" in refused.stderr


def test_a_port_in_use_is_told_before_anything_starts(tmp_path: Path, model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = kvrelay(tmp_path, "up", "--model", str(model), "--port", str(port))
    assert refused.returncode == 1
    assert refused.stderr == (
        f"error: router cannot listen on 127.0.0.1:{port}: address already in use; give another --port, or 0\n"
    )


def test_a_model_that_cannot_be_served_ends_the_start_with_its_sentence(tmp_path: Path, model: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in model.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    before = {process.pid for process in psutil.process_iter()}
    failed = kvrelay(
        tmp_path, "up", "--model", str(broken), "--port", "0", "--kv-memory", "32MiB", "--detach", "--json"
    )
    assert failed.returncode == 1
    message = json.loads(failed.stdout)["error"]["message"]
    assert message.startswith(("prefill-0: ", "decode-0: "))
    assert "Traceback" not in failed.stderr
    ours = [p for p in psutil.process_iter() if p.pid not in before and _is_ours(p, tmp_path)]
    assert not gone(ours)
    assert not list((tmp_path / "kvrelay" / "clusters").glob("*.json"))


def test_ctrl_c_while_it_starts_ends_all_of_it(tmp_path: Path, model: Path) -> None:
    up = subprocess.Popen(
        [*COMMAND, "up", "--model", str(model), "--port", "0", "--kv-memory", "32MiB"],
        env=environment(tmp_path),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    processes = _while_it_starts(up)
    up.send_signal(signal.SIGINT)
    up.communicate(timeout=RETURN_TIMEOUT_S)
    assert up.returncode == 130
    assert not gone(processes)


def _while_it_starts(up: subprocess.Popen[str]) -> list[psutil.Process]:
    """All processes of a cluster of which one worker has just begun. Not by what `up` prints: that tells how all stand
    now, so that a stage of some milliseconds may never be seen."""
    command = psutil.Process(up.pid)
    until(lambda: any("PrefillActor" in title(p) for p in command.children(recursive=True)), "a worker has begun")
    processes: list[psutil.Process] = command.children(recursive=True)
    return processes


def _is_ours(process: psutil.Process, state_dir: Path) -> bool:
    try:
        return bool(process.environ().get("XDG_STATE_HOME") == str(state_dir))
    except psutil.Error:
        return False


def test_down_after_a_killed_up_says_so_and_forgets_it(tmp_path: Path, model: Path) -> None:
    flags = ["--model", str(model), "--name", "killed", "--port", "0", "--kv-memory", "32MiB"]
    up = subprocess.Popen(
        [*COMMAND, "up", *flags], env=environment(tmp_path), stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    _while_it_starts(up)
    up.kill()
    up.communicate(timeout=RETURN_TIMEOUT_S)
    told = kvrelay(tmp_path, "down", "killed")
    assert told.returncode == 1
    assert told.stderr == f"error: killed was gone already: process {up.pid} ended without `kvrelay down`\n"
    assert "none runs" in kvrelay(tmp_path, "down", "killed").stderr
