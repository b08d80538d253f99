"""`kvrelay bench`: an open loop that sends what it says when it says, counts what failed, and ends as it should."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from kvrelay.cli.measuring import bench as command
from tests.kvrelay.client.scripted import EOS, HEED_INTERRUPTS, VOCAB_SIZE, ScriptedServer

DEADLINE_S = 30.0
GRPC_LOG = re.compile(rb"[IWE]\d{4} ")  # gRPC's own lines, of a machine that forks beside it
AZURE = Path(__file__).parents[3] / "configs/workloads/azure-conv-2023.csv"
APP = (
    "import typer; from kvrelay.cli.measuring.bench import register; app = typer.Typer(); "
    "app.callback()(lambda: None); register(app); app()"
)
SMALL = ("--num-prompts", "6", "--random-input-len", "8", "--random-output-len", "3")


def run(server: ScriptedServer | str, *args: str) -> Result:
    app = typer.Typer()
    app.callback()(lambda: None)
    command.register(app)
    endpoint = server if isinstance(server, str) else server.endpoint
    return CliRunner().invoke(app, ["bench", "--endpoint", endpoint, *args])


def run_json(server: ScriptedServer, *args: str) -> dict[str, object]:
    result = run(server, "--json", *args)
    assert result.exit_code == 0, result.stderr
    loaded: dict[str, object] = json.loads(result.stdout)
    return loaded


def test_random_lengths_reach_the_server(server: ScriptedServer) -> None:
    found = run_json(server, *SMALL, "--random-prefix-len", "4", "--seed", "5")
    assert (found["completed"], found["failed"]) == (6, 0)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (6 * 12, 6 * 3)
    prompts = [list(request.token_ids.ids) for request in server.requests]
    assert {len(prompt) for prompt in prompts} == {12}
    assert len({tuple(prompt[:4]) for prompt in prompts}) == 1
    assert len({tuple(prompt[4:]) for prompt in prompts}) == 6
    assert all(0 <= token < VOCAB_SIZE and token != EOS for prompt in prompts for token in prompt)
    sampling = server.requests[0].sampling
    assert (sampling.max_tokens, sampling.ignore_eos, sampling.temperature) == (3, True, 0.0)


def test_one_seed_makes_the_same_requests() -> None:
    seen = []
    for seed in ("1", "1", "2"):
        with ScriptedServer() as server:
            run_json(server, *SMALL, "--seed", seed, "--random-range-ratio", "0.5", "--max-concurrency", "1")
            seen.append([request.SerializeToString(deterministic=True) for request in server.requests])
    assert seen[0] == seen[1]
    assert seen[0] != seen[2]


def test_a_trace_gives_the_lengths(server: ScriptedServer) -> None:
    found = run_json(server, "--trace", str(AZURE), "--num-prompts", "3", "--trace-scale", "0.1")
    assert found["completed"] == 3
    seen = {(len(request.token_ids.ids), request.sampling.max_tokens) for request in server.requests}
    assert seen == {(37, 4), (40, 11), (88, 6)}


def test_a_short_trace_is_played_whole_and_said(server: ScriptedServer, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 5, "output_length": 2}\n')
    result = run(server, "--trace", str(trace), "--trace-timestamps", "--json")
    assert json.loads(result.stdout)["completed"] == 1
    assert "has 1 requests" in result.stderr


def test_requests_wait_for_a_place_and_not_for_each_other(server: ScriptedServer) -> None:
    assert run_json(server, *SMALL, "--max-concurrency", "2")["completed"] == 6
    assert server.most_running <= 2


def test_an_open_loop_sends_though_nothing_answers() -> None:
    with ScriptedServer(answering="hang") as server:
        result = run(server, *SMALL, "--request-rate", "1000", "--timeout", "5", "--json")
        assert server.most_running == 6
    found = json.loads(result.stdout)
    assert result.exit_code == 1
    assert found["errors"]["DEADLINE_EXCEEDED"]["count"] == 6


def test_warm_ups_are_not_counted(server: ScriptedServer) -> None:
    assert run_json(server, *SMALL, "--num-warmups", "2")["requests"] == 6
    assert len(server.requests) == 8
    assert len({tuple(request.token_ids.ids) for request in server.requests}) == 8


@pytest.mark.parametrize("args", [("--goodput", "ttft:60000", "tpot:60000"), ("--goodput", "ttft:60000") * 2])
def test_goodput_takes_several_values(server: ScriptedServer, args: tuple[str, ...]) -> None:
    found = run_json(server, *args, *SMALL)
    assert found["attainment"] == 1.0
    assert set(found["slos_ms"]) == {value.split(":")[0] for value in args if ":" in value}  # type: ignore[call-overload]


def test_a_person_gets_tables(server: ScriptedServer) -> None:
    result = run(server, *SMALL, "--goodput", "ttft:60000", "--metric-percentiles", "90")
    assert result.exit_code == 0
    told = ("Successful requests", "Time to first token", "P90", "SLO attainment", "Receipts good / unchecked", "6 / 0")
    for text in told:
        assert text in result.stdout
    assert "requests" not in run(server, *SMALL, "--no-progress").stderr


def test_failures_are_listed_and_fail_the_command() -> None:
    with ScriptedServer(answering="break UNAVAILABLE") as server:
        result = run(server, *SMALL)
        assert result.exit_code == 1
        assert "6 x UNAVAILABLE" in result.stdout
        assert "the script says UNAVAILABLE" in result.stdout
        assert run(server, *SMALL, "--allow-failures").exit_code == 0


def test_a_result_is_kept_with_every_request(server: ScriptedServer, tmp_path: Path) -> None:
    found = run_json(server, *SMALL, "--save-result", "--result-dir", str(tmp_path / "new"))
    (path,) = (tmp_path / "new").iterdir()
    assert found["saved"] == str(path)
    kept = json.loads(path.read_text())
    assert len(kept["requests_detail"]) == 6
    assert len(kept["requests_detail"][0]["token_times_s"]) == 3
    assert kept["settings"]["request_rate"] == "inf"


def test_the_figures_are_told_though_the_disk_is_full(
    server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("kvrelay.bench.results.save", full)
    result = run(server, "--json", *SMALL, "--save-result", "--result-dir", str(tmp_path))
    assert result.exit_code == 1
    assert result.stderr.endswith(f"error: the result cannot be saved in {tmp_path}: no space left on device\n")
    assert json.loads(result.stdout)["completed"] == 6


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--num-prompts", "0"], "--num-prompts is 0"),
        (["--request-rate", "0"], "request rate is 0"),
        (["--burstiness", "-1"], "burstiness is -1"),
        (["--max-concurrency", "0"], "--max-concurrency is 0"),
        (["--random-input-len", "0"], "random input length is 0"),
        (["--random-input-len", "5000", "--num-prompts", "1"], "longer than the model's 512 tokens"),
        (["--goodput", "itl:3"], "itl:3"),
        (["--metric-percentiles", "200"], "200"),
        (["--percentile-metrics", "ttft,speed"], "speed"),
        (["--trace", "no-such-file.csv"], "no-such-file.csv"),
        (["--trace-timestamps"], "--trace"),
        (["--trace", str(AZURE), "--trace-timestamps", "--trace-speedup", "0"], "speed-up is 0"),
        (["--timeout", "-1"], "--timeout is -1"),
        (["--seed", "-1"], "--seed is -1"),
        (["--save-result", "--result-dir", "/dev/null/x"], "--result-dir is /dev/null/x"),
    ],
)
def test_wrong_usage_names_what_is_wrong(server: ScriptedServer, args: list[str], named: str) -> None:
    result = run(server, *args)
    assert result.exit_code == 2
    assert named in result.stderr.replace("\n", " ")
    assert server.requests == []


def test_nobody_there() -> None:
    with ScriptedServer() as server:
        endpoint = server.endpoint
    result = run(endpoint, *SMALL)
    assert result.exit_code == 1
    assert f"nothing answers at {endpoint}" in result.stderr


def test_interrupt_cancels_what_is_out_and_exits_130() -> None:
    with ScriptedServer(answering="hang") as server:
        args = [
            sys.executable,
            "-c",
            HEED_INTERRUPTS + APP,
            "bench",
            "--endpoint",
            server.endpoint,
            *SMALL,
            "--no-progress",
        ]
        with subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert server.hanging.wait(DEADLINE_S)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 130
        said = [line for line in errors.splitlines() if not GRPC_LOG.match(line)]
        assert said == [b"error: interrupted; all requests were cancelled"]
        assert server.cancelled.wait(DEADLINE_S)
