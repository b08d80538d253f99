"""`kvrelay doctor` as it is typed: what is asked wrongly, what it prints, its exit codes; the checks are made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer

from kvrelay.cli import main as cli
from kvrelay.doctor import static
from kvrelay.doctor.assumed import of_profile
from kvrelay.doctor.finding import Finding
from tests.placement.latency.test_profile import profile

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("KVRELAY_ENDPOINT", raising=False)


def doctor(*arguments: str) -> int:
    cli._register()
    command: Any = typer.main.get_command(cli.app)
    with pytest.raises(SystemExit) as ended:
        command(["doctor", *arguments], prog_name="kvrelay")
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nowhere.yaml",), "nowhere.yaml cannot be read"),
        (("--address", "auto"), "--address is for a spec that is to run there; give SPEC, too"),
        (("--live",), "no cluster that was started from here runs; give --endpoint"),
        (("--profile", "nowhere.json"), "nowhere.json"),
    ],
)
def test_what_is_asked_wrongly_is_one_sentence(
    arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(*arguments) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1, error


@pytest.mark.parametrize(
    ("verdict", "flags", "code"),
    [
        ("good", (), 0),
        ("doubtful", (), 0),
        ("doubtful", ("--strict",), 1),
        ("unknown", ("--strict",), 0),
        ("bad", (), 1),
    ],
)
def test_the_exit_code_goes_by_the_worst(
    verdict: Any, flags: tuple[str, ...], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Finding(part="machine", name="CPU", verdict=verdict, found="[what it is]", mend="mend it")
    monkeypatch.setattr(static, "static_checks", lambda *_, **__: [found])
    assert doctor(*flags, "--json") == code
    told = json.loads(capsys.readouterr().out)
    assert (told["ok"], told["summary"]) == (code == 0, f"1 {verdict}")
    assert [Finding(**check) for check in told["checks"]] == [found]
    assert doctor(*flags) == code
    assert "[what it is]" in capsys.readouterr().out


def test_a_profile_says_what_each_role_takes() -> None:
    assumed = of_profile(profile())
    assert {each.prompt_tokens for each in assumed.values()} == {256}  # it knows no longer prompt than it may serve
    assert assumed["prefill"].decode_s is None
    assert assumed["decode"].prefill_s is None
    assert assumed["mixed"].prefill_s == assumed["prefill"].prefill_s
    assert assumed["decode"].error == 0.05
