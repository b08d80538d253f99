"""`kvrelay generate`: what it prints where, and how it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from kvrelay.cli import generate as command
from kvrelay.cli.cluster import state
from kvrelay.cli.connection import until_interrupted
from kvrelay.client.types import Delta, KvrelayError
from tests.kvrelay.client import scripted
from tests.kvrelay.client.scripted import HEED_INTERRUPTS, ScriptedServer

DEADLINE_S = 30.0
APP = (
    "import typer; from kvrelay.cli.generate import register; app = typer.Typer(); "
    "app.callback()(lambda: None); register(app); app()"
)


def run(server: ScriptedServer | str, *args: str, stdin: bytes | None = None) -> Result:
    app = typer.Typer()
    app.callback()(lambda: None)
    command.register(app)
    endpoint = server if isinstance(server, str) else server.endpoint
    return CliRunner().invoke(app, ["generate", *args], input=stdin, env={"KVRELAY_ENDPOINT": endpoint})


def test_the_text_goes_to_stdout_and_figures_to_stderr(server: ScriptedServer) -> None:
    result = run(server, "hello", "--max-tokens", "3")
    assert (result.exit_code, result.stdout) == (0, "é0 é1 é2 \n")
    assert "3 tokens" in result.stderr
    assert "ttft" in result.stderr
    assert "checksums ok" in result.stderr
    assert server.requests[0].text == "hello"


def test_checksums_that_are_off_are_not_called_bad(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    end = scripted._end

    def unchecked(request: Any, num_tokens: int) -> Any:
        last = end(request, num_tokens)
        last.receipt.checksums_ok = False
        return last

    monkeypatch.setattr(scripted, "_end", unchecked)
    assert "handoff 4 pages, 0.00 MB, checksums off" in run(server, "hello").stderr


def test_it_asks_for_128_tokens_and_leaves_the_rest_to_the_server(server: ScriptedServer) -> None:
    run(server, "hello")
    assert [(field.name, value) for field, value in server.requests[0].sampling.ListFields()] == [("max_tokens", 128)]


def test_every_flag_reaches_the_server(server: ScriptedServer) -> None:
    flags = (
        "--token-ids 5,6 --max-tokens 4 --temperature 0.5 --top-k 3 --top-p 0.25 --min-p 0.125 --seed 9 --stop END "
        "--stop STOP --stop-token-ids 7,8 --ignore-eos --min-tokens 1 --logprobs 2 --repetition-penalty 1.5 "
        "--presence-penalty -1 --frequency-penalty 0.5 -n 2 --model m --timeout 60 --logit-bias 7:-100,8:2.5 "
        "--allowed-token-ids 3,4 --bad-words x --bad-words y"
    )
    assert run(server, *flags.split()).exit_code == 0
    (seen,) = server.requests
    sampling = seen.sampling
    assert (list(seen.token_ids.ids), seen.model) == ([5, 6], "m")
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.top_p) == (4, 0.5, 3, 0.25)
    assert (sampling.min_p, sampling.seed, list(sampling.stop)) == (0.125, 9, ["END", "STOP"])
    assert (list(sampling.stop_token_ids), sampling.ignore_eos, sampling.min_tokens) == ([7, 8], True, 1)
    assert (sampling.logprobs, sampling.repetition_penalty, sampling.n) == (2, 1.5, 2)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-1.0, 0.5)
    assert dict(sampling.logit_bias) == {7: -100.0, 8: 2.5}
    assert (list(sampling.allowed_token_ids), list(sampling.bad_words)) == ([3, 4], ["x", "y"])
    assert 0 < (server.deadlines_s[0] or 0) <= 61


def test_a_dash_reads_stdin_as_it_is(server: ScriptedServer) -> None:
    assert run(server, "-", stdin="grüße\n".encode()).exit_code == 0
    assert server.requests[0].text == "grüße\n"


def test_json_is_one_object(server: ScriptedServer) -> None:
    result = run(server, "hello", "--json", "--max-tokens", "2", "--logprobs", "1")
    answer = json.loads(result.stdout)
    assert result.exit_code == 0
    assert list(answer)[:10] == [
        "request_id",
        "text",
        "token_ids",
        "finish_reason",
        "usage",
        "ttft_ms",
        "tpot_ms",
        "timeline",
        "receipt",
        "moved",
    ]
    assert (answer["text"], answer["token_ids"], answer["finish_reason"]) == ("é0 é1 ", [100, 101], "length")
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 2, "cached_tokens": 1}
    assert answer["timeline"]["phases_s"] == {"prefill": 0.25, "decode": 0.75}
    assert answer["receipt"]["pages"] == 4
    assert [receipt["bytes"] for receipt in answer["moved"]] == [5000]
    assert answer["logprobs"][0]["chosen"] == {"token_id": 100, "logprob": -0.5}
    assert answer["ttft_ms"] > 0


def test_several_choices_do_not_mix(server: ScriptedServer) -> None:
    result = run(server, "hello", "-n", "2", "--max-tokens", "1")
    assert result.stdout == "--- choice 0 (length)\né0 \n--- choice 1 (length)\né0 \n"
    answer = json.loads(run(server, "hello", "-n", "2", "--max-tokens", "1", "--json").stdout)
    assert [choice["text"] for choice in answer["choices"]] == ["é0 ", "é0 "]


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [("INVALID_ARGUMENT", 2), ("NOT_FOUND", 2), ("RESOURCE_EXHAUSTED", 1), ("UNAVAILABLE", 1), ("INTERNAL", 1)],
)
def test_a_refusal_is_one_sentence_and_an_exit_code(server: ScriptedServer, code: str, exit_code: int) -> None:
    result = run(server, f"fail {code}")
    assert (result.exit_code, result.stdout) == (exit_code, "")
    assert result.stderr.startswith(f"error: the script says {code}")
    assert result.stderr.count("\n") == 1
    told = json.loads(run(server, f"fail {code}", "--json").stdout)
    assert (told["error"]["code"], told["error"]["message"]) == (code, f"the script says {code}")


def test_a_deadline_ends_as_timeout_does(server: ScriptedServer) -> None:
    assert run(server, "hang", "--timeout", "0.3").exit_code == 124


def test_nobody_there() -> None:
    with ScriptedServer() as server:
        endpoint = server.endpoint
    result = run(endpoint, "hello")
    assert result.exit_code == 1
    assert f"nothing answers at {endpoint}" in result.stderr


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ([], "PROMPT"),
        (["hello", "--token-ids", "1"], "PROMPT"),
        (["--token-ids", "1,x"], "--token-ids"),
        (["--token-ids", "1,-4"], "-4"),
        (["hello", "--stop-token-ids", "one"], "--stop-token-ids"),
        (["hello", "--timeout", "0"], "--timeout"),
        (["hello", "--timeout", "nan"], "--timeout"),
        (["hello", "--max-tokens", "99999999999"], "max_tokens"),
        (["hello", "--endpoint", "here"], "here"),
        (["hello", "--no-such-flag"], "--no-such-flag"),
    ],
)
def test_wrong_usage_names_what_is_wrong(server: ScriptedServer, args: list[str], named: str) -> None:
    result = run(server, *args)
    assert result.exit_code == 2
    assert named in result.stderr
    assert "Traceback" not in result.stderr
    assert server.requests == []


def test_stdin_that_is_not_text_is_refused(server: ScriptedServer) -> None:
    result = run(server, "-", stdin=b"ab\xff")
    assert (result.exit_code, result.stderr) == (2, "error: stdin is not UTF-8 at byte 2; convert it first\n")


def test_interrupt_cancels_the_request_and_exits_130(server: ScriptedServer) -> None:
    args: list[Any] = [sys.executable, "-c", HEED_INTERRUPTS + APP, "generate", "hang", "--endpoint", server.endpoint]
    with subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(5) == b"first"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert errors == b"error: interrupted; the request was cancelled\n"
    assert server.cancelled.wait(DEADLINE_S)


class Interrupted:
    """A stream of one message whose wait the user interrupts, before or after it came."""

    waited = closed = False

    def __init__(self, outcome: KvrelayError | Delta) -> None:
        self.outcome = outcome

    def __next__(self) -> Delta:
        signal.raise_signal(signal.SIGINT)
        self.waited = True
        if isinstance(self.outcome, Delta):
            return self.outcome
        raise self.outcome

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    "outcome", [KvrelayError("CANCELLED", "it was cancelled"), Delta(index=0, text="late", token_ids=(1,))]
)
def test_an_interrupt_is_raised_when_the_wait_is_over(outcome: KvrelayError | Delta) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    stream: Any = Interrupted(outcome)
    try:
        with pytest.raises(KeyboardInterrupt):
            list(until_interrupted(stream))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert stream.waited
    assert stream.closed


def test_of_several_clusters_one_is_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = state.this_process("chat", "daemon")
    running = [replace(ours, name=name, endpoints=(f"127.0.0.1:{port}",)) for name, port in (("a", 1), ("b", 2))]
    monkeypatch.setattr("kvrelay.known_clusters.alive", lambda: iter(running))
    monkeypatch.setattr("kvrelay.cli.connection.DEFAULT_ENDPOINT", "127.0.0.1:9")
    told = "error: 2 clusters run here, a at 127.0.0.1:1 and b at 127.0.0.1:2; say by --endpoint which one is meant\n"
    assert run("127.0.0.1:9", "hello").stderr == told
    assert "nothing answers at 127.0.0.1:8" in run("127.0.0.1:8", "hello").stderr
    running.pop()
    assert "nothing answers at 127.0.0.1:9" in run("127.0.0.1:9", "hello").stderr
