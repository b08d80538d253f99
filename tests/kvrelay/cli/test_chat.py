"""`kvrelay chat`: how it ends where a question fails."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from kvrelay.cli import chat as command
from kvrelay.client.types import KvrelayError

pytestmark = pytest.mark.unit


class Server:
    """Answers a question with itself, but for "fail CODE"; "break CODE" says something first."""

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        question = body["messages"][-1]["content"]
        verb, _, code = question.partition(" ")
        if verb != "fail":
            yield {"choices": [{"delta": {"content": question}}]}
        if verb in ("fail", "break"):
            raise KvrelayError(code, f"it is {code}")


def run(monkeypatch: pytest.MonkeyPatch, said: str) -> Result:
    monkeypatch.setattr(command.Place, "server", lambda _: Server())
    app: Any = typer.Typer()
    app.callback()(lambda: None)
    command.register(app)
    return CliRunner().invoke(app, ["chat", "--base-url", "http://h:1", "--model", "m"], input=said)


@pytest.mark.parametrize(
    ("second", "answers", "exit_code"),
    [
        ("fail INVALID_ARGUMENT", "one\n", 2),
        ("fail UNAVAILABLE", "one\n", 1),
        ("break UNAVAILABLE", "one\nbreak UNAVAILABLE\n", 1),
        ("two", "one\ntwo\nthree\n", 0),
    ],
)
def test_a_question_of_a_program_that_fails_ends_it_with_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, second: str, answers: str, exit_code: int
) -> None:
    done = run(monkeypatch, f"one\n{second}\nthree\n")
    assert (done.stdout, done.exit_code) == (answers, exit_code)
    assert ("error: it is " in done.stderr) == (exit_code > 0)


def test_a_person_asks_on(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(("fail UNAVAILABLE", "two"))
    monkeypatch.setattr(sys, "stdin", type("Terminal", (), {"isatty": lambda _: True})())
    monkeypatch.setattr(command, "_line", lambda: next(lines, None))
    monkeypatch.setattr(command.Place, "server", lambda _: Server())
    command.chat("http://h:1", "m")
