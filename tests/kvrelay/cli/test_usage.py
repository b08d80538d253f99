"""`kvrelay usage`: routers that share a database count once, lines are grouped and priced, and mistakes are told."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvrelay.cli import main as cli
from kvrelay.cli.connection import Router
from kvrelay.cli.console import CliError
from kvrelay.cli.usage import time_of
from kvrelay.client.usage import KeyUsage, Prices, Usage

pytestmark = pytest.mark.unit
HOUR = 1_764_028_800  # 2025-11-25T00:00Z
PRICES = Prices(currency="EUR", prompt=2.0, cached=1.0, generated=10.0)


def row(key: str, hour: int, generated: int) -> KeyUsage:
    return KeyUsage(
        hour_s=HOUR + 3600 * hour,
        key=key,
        requests=1,
        prompt_tokens=1_000_000,
        cached_tokens=500_000,
        generated_tokens=generated,
        prefill_s=0.25,
        handoff_s=0.5,
        decode_s=2.0,
    )


def usage(database: str, *rows: KeyUsage, prices: Prices | None = PRICES) -> Usage:
    return Usage(database=database, rows=rows, prices=prices)


def run(monkeypatch: pytest.MonkeyPatch, told: Sequence[Usage], *args: str) -> Result:
    """The command, with a router for each that is told."""

    @contextmanager
    def client_of(_: Router, endpoint: str) -> Iterator[Any]:
        class Told:
            usage = staticmethod(lambda since_s, until_s: told[int(endpoint)])

        yield Told()

    monkeypatch.setattr(Router, "client_of", client_of)
    monkeypatch.setattr(Router, "endpoints", lambda _: [str(i) for i in range(len(told))])
    cli._register()
    return CliRunner().invoke(cli.app, ["usage", *args], env={"COLUMNS": "200"})


SHARED = (
    usage("one", row("anna", 0, 10)),  # before the second router had drained
    usage("one", row("anna", 0, 30), row("bert", 1, 5)),
    usage("other", row("anna", 25, 100)),
)


def test_a_database_that_two_routers_tell_counts_once_and_others_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = run(monkeypatch, SHARED, "--json")
    told = json.loads(answer.stdout)
    assert (answer.exit_code, told["by"], told["currency"]) == (0, "key", "EUR")
    anna, bert = told["usage"]
    assert (anna["key"], anna["requests"], anna["generated_tokens"], anna["decode_s"]) == ("anna", 2, 130, 4.0)
    assert anna["cost"] == 2.0 + 1.0 + 0.0013, "a million uncached, a million cached, 130 generated"
    assert (bert["key"], bert["generated_tokens"], bert["cost"]) == ("bert", 5, 1.50005)


@pytest.mark.parametrize(
    ("by", "groups"),
    [("day", ["2025-11-25", "2025-11-26"]), ("hour", ["2025-11-25T00:00Z", "2025-11-25T01:00Z", "2025-11-26T01:00Z"])],
)
def test_lines_are_of_days_or_hours(monkeypatch: pytest.MonkeyPatch, by: str, groups: list[str]) -> None:
    lines = list(csv.DictReader(io.StringIO(run(monkeypatch, SHARED, "--csv", "--by", by).stdout)))
    assert [line[by] for line in lines] == groups
    assert sum(int(line["generated_tokens"]) for line in lines) == 135
    assert {line["currency"] for line in lines} == {"EUR"}


def test_a_table_shows_costs_where_there_are_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    priced = run(monkeypatch, SHARED).stdout
    free = run(monkeypatch, [usage("one", row("", 0, 1234), prices=None)]).stdout
    assert "cost, EUR" in priced
    assert "3.0013" in priced
    assert "cost" not in free
    assert "(no key)" in free
    assert "1,234" in free


def test_a_time_is_an_age_or_a_date_in_utc() -> None:
    assert time_of("1.5h", HOUR, "since") == HOUR - 5400
    assert time_of("2025-11-25", 0, "since") == time_of("2025-11-25T02:00+02:00", 0, "since") == HOUR
    with pytest.raises(CliError, match="--until is 'soon'; give an age such as 1d or 12h"):
        time_of("soon", HOUR, "until")


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("--since", "yesterday"), "--since is 'yesterday'; give an age"),
        (("--since", "1h", "--until", "2h"), "--until is 2h, which is not after --since 1h; give a later one"),
        (("--csv", "--json"), "give one of --csv and --json"),
    ],
)
def test_what_was_asked_wrongly_is_told(monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], why: str) -> None:
    answer = run(monkeypatch, SHARED, *args)
    assert answer.exit_code == 2
    assert why in answer.stderr
