"""`kvrelay scale`: what it waits for, and how it ends."""

from __future__ import annotations

from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from kvrelay.cli.cluster import scale as command
from kvrelay.cli.connection import Router
from kvrelay.client.types import KvrelayError, PendingWorker, PoolState

pytestmark = pytest.mark.unit

LOADING = PendingWorker(name="decode-2", stage="weights", reason="")


class Cluster:
    """Says of the pool what the script has next, and the last of it on and on."""

    def __init__(self, *looks: PoolState | KvrelayError) -> None:
        self.looks = list(looks)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None: ...

    def scale(self, pool: str, replicas: int, *, force: bool) -> tuple[PendingWorker, ...]:
        return (LOADING,)

    def pool(self, pool: str) -> PoolState:
        look = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        if isinstance(look, KvrelayError):
            raise look
        return look


def run(monkeypatch: pytest.MonkeyPatch, cluster: Cluster, *args: str) -> Result:
    monkeypatch.setattr(Router, "client", lambda _: cluster)
    monkeypatch.setattr(command, "POLL_S", 0.0)
    app: Any = typer.Typer()
    app.callback()(lambda: None)
    command.register(app)
    return CliRunner().invoke(app, ["scale", "decode", "3", *args])


def of(replicas: int, *pending: PendingWorker) -> PoolState:
    return PoolState(replicas=replicas, pending=pending)


def test_it_waits_until_the_pool_has_them_also_while_the_controller_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    away = KvrelayError("UNAVAILABLE", "the controller does not answer")
    done = run(monkeypatch, Cluster(of(3, LOADING), away, of(3)))
    assert (done.exit_code, done.stderr.startswith("decode has 3 workers after ")) == (0, True), done.stderr


@pytest.mark.parametrize("told", [of(1), of(1, PendingWorker(name="decode-2", stage="leaving", reason=""))])
def test_another_size_that_is_asked_for_meanwhile_is_told(monkeypatch: pytest.MonkeyPatch, told: PoolState) -> None:
    done = run(monkeypatch, Cluster(of(3, LOADING), told))
    assert (done.exit_code, done.stderr) == (
        1,
        "error: decode has been told another size since, and goes on to 1 workers\n",
    )


def test_when_the_time_is_over_it_says_who_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run(monkeypatch, Cluster(of(3, LOADING)), "--timeout", "0.01")
    assert done.exit_code == 1
    assert done.stderr == "error: decode-2 is at weights after 0.01 s; decode goes on to 3 workers\n"
