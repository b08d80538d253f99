"""`kvrelay adapter add`: what is left of one that could not be tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from kvrelay.cli import adapter as command
from kvrelay.cli.connection import Router
from kvrelay.client.types import KvrelayError

pytestmark = pytest.mark.unit


class Cluster:
    def __init__(self, trouble: BaseException, *, keeps: bool) -> None:
        self.names = ["old"]
        self._trouble = trouble
        self._keeps = keeps  # answers no more once it was tried

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None: ...

    def adapters(self) -> list[Any]:
        return [SimpleNamespace(name=name) for name in self.names]

    def set_adapters(self, *, add: Mapping[str, str], remove: Sequence[str]) -> None:
        if remove and self._keeps:
            raise KvrelayError("UNAVAILABLE", "the controller does not answer")
        self.names = [*(name for name in self.names if name not in {*add, *remove}), *add]

    def generate(self, *_: object, **__: object) -> None:
        raise self._trouble


def add(monkeypatch: pytest.MonkeyPatch, cluster: Cluster, name: str) -> Result:
    monkeypatch.setattr(Router, "client", lambda _: cluster)
    app: Any = typer.Typer()
    app.callback()(lambda: None)
    command.register(app)
    return CliRunner().invoke(app, ["adapter", "add", name, "/adapters/sql"])


@pytest.mark.parametrize(
    ("trouble", "code"),
    [
        (KvrelayError("INVALID_ARGUMENT", "it does not fit"), 2),
        (KvrelayError("UNAVAILABLE", "no worker can serve it"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_whatever_comes_between_one_that_is_new_is_removed_again(
    monkeypatch: pytest.MonkeyPatch, trouble: BaseException, code: int
) -> None:
    cluster = Cluster(trouble, keeps=False)
    done = add(monkeypatch, cluster, "sql")
    assert (done.exit_code, cluster.names) == (code, ["old"])
    assert "sql is not added: two tokens could not be had of it" in done.stderr
    assert add(monkeypatch, cluster, "old").exit_code == code
    assert cluster.names == ["old"], "it was there before"


def test_one_that_cannot_be_removed_again_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(KvrelayError("UNAVAILABLE", "no worker can serve it"), keeps=True)
    done = add(monkeypatch, cluster, "sql")
    assert (done.exit_code, cluster.names) == (1, ["old", "sql"])
    assert "sql was added, and could not be removed again" in done.stderr
    assert "error: no worker can serve it" in done.stderr
