"""`kvrelay apply`, `roll` and `config show`: what they show, ask, refuse, wait for and exit with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from kvrelay.cli.connection import Entrance
from kvrelay.cli.spec import apply, config, roll
from kvrelay.client.specs import Rollout, RunningSpec, SpecChange, SpecValue
from kvrelay.client.types import KvrelayError

pytestmark = pytest.mark.unit

SPEC = "model: m\nrouter: {max_calls: 7}\npools:\n- {role: prefill, kv_memory: '${KV:-64MiB}'}\n- {role: decode}\n"
NOW = SpecChange(key="router.max_calls", before=4096, after=7, how="now", reason="")
ROLLING = SpecChange(key="pools[0].kv_memory", before=1, after=2, how="rolling", reason="")
FIXED = SpecChange(key="page_size", before=16, after=8, how="fixed", reason="page_size is 16, and 8 cannot replace it")


AWAY = Rollout(running=True, current=0, total=0, reason="")  # nobody answers


class Cluster:
    """What its clients are told: `changes` of any spec that is asked for, and once it is applied those `since`; then a
    rollout, one state each time."""

    since: tuple[SpecChange, ...] = ()

    def __init__(self, *changes: SpecChange, rollouts: tuple[Rollout, ...] = ()) -> None:
        self.changes = changes
        self.rollouts = list(rollouts)
        self.applied: list[tuple[dict[str, Any], dict[str, str], int | None]] = []
        self.rolled: list[object] = []

    def apply_spec(
        self, spec: str, sources: Mapping[str, str], *, dry_run: bool = False, max_surge: int | None = None
    ) -> tuple[SpecChange, ...]:
        if not dry_run:
            self.applied.append((json.loads(spec), dict(sources), max_surge))
            return self.changes
        return self.since if self.applied else self.changes

    def roll(self, *pools: str, max_surge: int | None = None) -> None:
        self.rolled.append((pools, max_surge))

    def spec(self) -> RunningSpec:
        if self.rollouts and self.rollouts[0] is AWAY:
            self.rollouts.pop(0)
            raise KvrelayError("UNAVAILABLE", "the controller does not answer")
        rollout = self.rollouts.pop(0) if self.rollouts else Rollout(running=False, current=2, total=2, reason="")
        return RunningSpec(values=(SpecValue(key="model", value="m", source="c.yaml:1"),), rollout=rollout)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for variable in ("KVRELAY_ENDPOINT", "KVRELAY_TOKENS_FILE", "KV"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("kvrelay.cli.spec.rollout.POLL_S", 0.0)
    spec = tmp_path / "c.yaml"
    spec.write_text(SPEC)
    return str(spec)


def call(monkeypatch: pytest.MonkeyPatch, cluster: Cluster, *arguments: str, typed: str = "") -> Result:
    monkeypatch.setattr(Entrance, "client_of", lambda *_: cluster)
    app = typer.Typer()
    for module in (apply, config, roll):
        module.register(app)
    return CliRunner().invoke(app, arguments, input=typed, env={"COLUMNS": "200"})


def test_what_changes_is_shown_in_its_groups_and_done_when_asked_for(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(ROLLING, NOW, rollouts=(Rollout(running=False, current=2, total=2, reason=""),))
    cluster.rollouts += [Rollout(running=True, current=1, total=2, reason="decode-0 is at weights")]
    done = call(monkeypatch, cluster, "apply", path, "--yes", "--max-surge", "0", "--watermark", "0.5")
    assert done.exit_code == 0, done.output
    shown = (
        "changes now:\n  router.max_calls: 4096 -> 7\nchanges as workers are replaced:\n  pools[0].kv_memory: 1 -> 2\n"
    )
    assert done.output.startswith(shown)
    ((spec, sources, max_surge),) = cluster.applied
    assert (spec["pools"][1]["watermark"], spec["router"], max_surge) == (0.5, {"max_calls": 7}, 0)
    assert sources["pools[0].kv_memory"] == f"{path}:4 ${{KV}}"
    assert sources["pools[1].watermark"] == "--watermark"


@pytest.mark.parametrize(
    ("changes", "flags", "code", "words"),
    [
        ((NOW,), ("--dry-run",), 0, "router.max_calls: 4096 -> 7"),
        ((), ("--yes",), 0, "nothing to do: the cluster runs with it"),
        ((NOW, FIXED), ("--yes",), 2, "nothing was changed: page_size cannot change while the cluster runs"),
        ((NOW, FIXED), ("--dry-run",), 2, "page_size is 16, and 8 cannot replace it"),
        ((NOW,), (), 2, "nothing was changed: give --yes"),
        ((NOW,), ("--yes", "--watermark", "5"), 2, "pools[1].watermark is 5.0; give a number below 1"),
    ],
)
def test_nothing_is_changed(
    path: str,
    monkeypatch: pytest.MonkeyPatch,
    changes: tuple[SpecChange, ...],
    flags: tuple[str, ...],
    code: int,
    words: str,
) -> None:
    cluster = Cluster(*changes)
    done = call(monkeypatch, cluster, "apply", path, *flags)
    assert (done.exit_code, cluster.applied) == (code, [])
    assert words in done.output


def test_a_spec_that_runs_goes_on_where_it_stopped(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = Rollout(running=False, current=1, total=2, reason="decode-2 does not become ready: no memory")
    cluster = Cluster(rollouts=(stopped, stopped))
    done = call(monkeypatch, cluster, "apply", path, "--yes")
    assert (done.exit_code, len(cluster.applied)) == (1, 1)
    assert "error: decode-2 does not become ready: no memory" in done.output


def test_a_spec_that_gave_way_to_another_is_not_said_to_run(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(ROLLING)
    cluster.since = (ROLLING,)
    done = call(monkeypatch, cluster, "apply", path, "--yes")
    assert (done.exit_code, len(cluster.applied)) == (1, 1)
    assert "error: the cluster has been told otherwise since of pools[0].kv_memory; `kvrelay config" in done.output


def test_what_a_program_reads(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done = call(monkeypatch, Cluster(NOW), "apply", path, "--yes", "--json")
    answer = json.loads(done.stdout)
    assert (answer["applied"], answer["changes"][0]["key"], answer["rollout"]["running"]) == (
        True,
        "router.max_calls",
        False,
    )
    looked = json.loads(call(monkeypatch, Cluster(FIXED), "apply", path, "--json").stdout)
    assert (looked["applied"], looked["changes"][0]["how"]) == (False, "fixed")


def test_a_roll_is_waited_for_and_says_that_it_goes_on(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    running = Rollout(running=True, current=1, total=2, reason="decode-1 is being left by its requests")
    cluster = Cluster(rollouts=(AWAY, running, AWAY, running))
    done = call(monkeypatch, cluster, "roll", "decode", "--max-surge", "1")
    assert (done.exit_code, cluster.rolled, cluster.rollouts) == (0, [(("decode",), 1)], [])
    late = call(monkeypatch, Cluster(rollouts=(running,) * 99), "roll", "--timeout", "0.0000001")
    assert late.exit_code == 1
    assert "1 of 2 workers are as the spec has them after 1e-07 s (decode-1 is being left" in late.output


def test_a_roll_of_a_cluster_that_was_ended_is_not_waited_for(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.cli.spec.rollout.AWAY_S", 0.0)
    done = call(monkeypatch, Cluster(rollouts=(AWAY,) * 99), "roll")
    assert done.exit_code == 1
    assert "error: for 0 s by now the controller does not answer" in done.output


def test_a_spec_is_shown_with_where_each_value_comes_from(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV", "1MiB")
    shown = call(monkeypatch, Cluster(), "config", "show", path, "--router-max-passes", "3", "--json")
    values = json.loads(shown.stdout)
    assert values["pools[0].kv_memory"] == {"value": 1 << 20, "from": f"{path}:4 ${{KV}}"}
    assert values["router.max_passes"] == {"value": 3, "from": "--router-max-passes"}
    assert values["router.host"] == {"value": "127.0.0.1", "from": "derived"}
    table = call(monkeypatch, Cluster(), "config", "show", path, "--changed").output
    assert "router.max_calls" in table
    assert "router.max_passes" not in table


def test_without_a_spec_it_is_the_clusters(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = Rollout(running=False, current=1, total=2, reason="no memory")
    shown = call(monkeypatch, Cluster(rollouts=(stopped,)), "config", "show")
    assert "c.yaml:1" in shown.output
    assert "note: 1 of 2 workers: no memory" in shown.output
    flags = call(monkeypatch, Cluster(), "config", "show", "--router-max-passes", "3")
    assert flags.exit_code == 2
    assert "flags change a spec, and none is given" in flags.output


def test_what_the_cluster_refuses_is_told(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster()

    def refuse(*_: object, **__: object) -> tuple[SpecChange, ...]:
        raise KvrelayError("FAILED_PRECONDITION", "replan is act, and no `kvrelay up` stays with this cluster")

    monkeypatch.setattr(cluster, "apply_spec", refuse)
    done = call(monkeypatch, cluster, "apply", path, "--yes")
    assert done.exit_code == 2
    assert "no `kvrelay up` stays" in done.output
